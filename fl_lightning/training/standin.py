"""Stands in for Lightning's Trainer in a user's LightningModule: provides the numbers of epochs and
steps, and refuses everything else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NoReturn

import torch
from lightning import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn

from fl_lightning.foundation.errors import BadInput
from fl_lightning.training.schedule import StepState

INSTEAD = {
    "self.optimizers()": "there is no optimiser to step by hand: set the keys of `optimizer`",
    "self.lr_schedulers()": "there is no scheduler: set `optimizer.lr_decay` and `lr_step`",
    "self.manual_backward()": "return the loss",
    "self.clip_gradients()": "set `optimizer.clip_norm`",
    "self.toggle_optimizer()": "set requires_grad in the constructor",
    "self.untoggle_optimizer()": "set requires_grad in the constructor",
    "self.all_gather()": "clients exchange only their models: remove the call",
    "self.trainer.local_rank": "use self.device",
}
"""Advice for each refused method or attribute."""


class StandIn:
    """Takes the place of the Trainer of a LightningModule. Reading an attribute that is not defined
    here raises `BadInput`.

    Args:
        model: class name of the LightningModule.
        step_state: the state of the current local step.
    """

    is_global_zero = True
    world_size = num_devices = num_nodes = 1
    """A client trains in a single process."""
    global_rank = node_rank = 0
    sanity_checking = fast_dev_run = False
    progress_bar_callback = None

    def __init__(self, model: str, step_state: StepState) -> None:
        self.__dict__.update(_model=model, _state=step_state)

    @property
    def current_epoch(self) -> int:
        """Number of earlier epochs of local training in all rounds."""
        return self._counted("current_epoch")[0]

    @property
    def global_step(self) -> int:
        """Number of earlier local steps in all rounds."""
        epoch, state = self._counted("global_step")
        return epoch * state.per_epoch + state.batch_idx

    @property
    def num_training_batches(self) -> int:
        """Number of the client's batches in an epoch."""
        return self._counted("trainer.num_training_batches")[1].per_epoch

    @property
    def estimated_stepping_batches(self) -> int:
        """Number of local steps of a client that takes part in all rounds."""
        state = self._counted("trainer.estimated_stepping_batches")[1]
        return state.rounds * state.per_round

    max_steps = estimated_stepping_batches

    @property
    def max_epochs(self) -> int:
        """Number of local epochs of a client that takes part in all rounds, rounded up."""
        state = self._counted("trainer.max_epochs")[1]
        return math.ceil(state.rounds * state.per_round / state.per_epoch)

    @property
    def training(self) -> bool:
        """Whether a local step is being taken."""
        return self._state.epoch is not None

    @property
    def logger(self) -> DummyLogger:
        """A logger that discards all values."""
        self.log()
        return DummyLogger()

    @property
    def loggers(self) -> list[DummyLogger]:
        """A list with a logger that discards all values."""
        return [self.logger]

    def log(self, *values: Any, **options: Any) -> None:
        """Replaces `self.log` and `self.log_dict`: discards the values, and once logs a line that
        says so."""
        self._state.log_once(
            f"model: values that {self._model} logs (self.log, self.logger) are discarded: the run "
            "writes its own tables"
        )

    def refuse(self, member: str, *values: Any, **options: Any) -> NoReturn:
        """Raise `BadInput`, as the model reads or calls `member`."""
        names = [name for name in vars(StandIn) if name[0] != "_" and name not in ("log", "refuse")]
        advice = INSTEAD.get(member, f"self.trainer has only {', '.join(names)}")
        requirement = f"it reads {member}, and there is no Trainer: {advice}"
        raise BadInput("model", self._model, requirement)

    def _counted(self, member: str) -> tuple[int, StepState]:
        """Return the epoch and the state, and note that the model reads `member`.

        Raises:
            BadInput: no local step is being taken.
        """
        state = self._state
        state.read = f"self.{member}"
        if state.epoch is None:
            requirement = (
                f"it reads {state.read} outside of local steps, where it is not counted: read it "
                "in training_step, or if self.training is True"
            )
            raise BadInput("model", self._model, requirement)
        return state.epoch, state

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look for these
            raise AttributeError(name)
        self.refuse(f"self.trainer.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        self.refuse(f"self.trainer.{name}")


def stand_in(model: nn.Module, step_state: StepState) -> None:
    """Replace the Trainer of every LightningModule in `model` by a `StandIn`, whose numbers are
    those of `step_state`."""
    for module in lightning_modules(model):
        stand = StandIn(type(module).__name__, step_state)
        module._fabric, module._trainer = None, stand  # type: ignore[assignment]
        module.log = module.log_dict = stand.log  # type: ignore[method-assign]
        for call in INSTEAD:
            if call.endswith("()"):
                name = call.removeprefix("self.").removesuffix("()")
                setattr(module, name, partial(stand.refuse, call))


def set_reported_device(
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Set the values that `self.device` and `self.dtype` report in every LightningModule of
    `model`, without moving it."""
    for module in lightning_modules(model):
        module._device = device
        module._dtype = dtype


def lightning_modules(model: nn.Module) -> Iterator[LightningModule]:
    """Return the LightningModules in `model`, including itself."""
    return (module for module in model.modules() if isinstance(module, LightningModule))
