"""Stands in for Lightning's Trainer in a user's LightningModule: says how far its client has
trained, and refuses everything else."""

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
from fl_lightning.training.schedule import Last

INSTEAD = {
    "self.optimizers()": "there is no optimiser to step by hand: set the keys of `optimizer`",
    "self.lr_schedulers()": "there is no scheduler: set `optimizer.lr` and its kin",
    "self.manual_backward()": "return the loss",
    "self.clip_gradients()": "set `optimizer.clip_norm`",
    "self.toggle_optimizer()": "set requires_grad in the constructor",
    "self.untoggle_optimizer()": "set requires_grad in the constructor",
    "self.all_gather()": "clients exchange their models alone",
    "self.trainer.local_rank": "use self.device",
}
"""Advice in place of a method or attribute that is refused."""


class StandIn:
    """The Trainer of the LightningModule `model`: attributes that are not defined here are refused
    by name."""

    is_global_zero = True
    world_size = num_devices = num_nodes = 1
    """A client trains in one process, whichever it is."""
    global_rank = node_rank = 0
    sanity_checking = fast_dev_run = False
    progress_bar_callback = None

    def __init__(self, model: str, last: Last) -> None:
        self.__dict__.update(_model=model, _last=last)

    @property
    def current_epoch(self) -> int:
        """Epochs of local training before this one, those of earlier rounds included."""
        return self._counted("current_epoch")[0]

    @property
    def global_step(self) -> int:
        """Local steps before this one, those of earlier rounds included."""
        epoch, last = self._counted("global_step")
        return epoch * last.per_epoch + last.batch_idx

    @property
    def num_training_batches(self) -> int:
        """Batches of an epoch of the client."""
        return self._counted("trainer.num_training_batches")[1].per_epoch

    @property
    def estimated_stepping_batches(self) -> int:
        """Local steps of a client that takes part in all rounds."""
        last = self._counted("trainer.estimated_stepping_batches")[1]
        return last.rounds * last.per_round

    max_steps = estimated_stepping_batches

    @property
    def max_epochs(self) -> int:
        """Epochs of local training of a client that takes part in all rounds, rounded up."""
        last = self._counted("trainer.max_epochs")[1]
        return math.ceil(last.rounds * last.per_round / last.per_epoch)

    @property
    def training(self) -> bool:
        """Whether a local step is being taken."""
        return self._last.epoch is not None

    @property
    def logger(self) -> DummyLogger:
        """One that keeps nothing."""
        self.log()
        return DummyLogger()

    @property
    def loggers(self) -> list[DummyLogger]:
        """One that keeps nothing."""
        return [self.logger]

    def log(self, *values: Any, **options: Any) -> None:
        """Stands in for `self.log` and `self.log_dict`."""
        self._last.say(
            f"model: what {self._model} logs (self.log, self.logger) is not kept: the run writes "
            "tables of its own"
        )

    def refuse(self, member: str, *values: Any, **options: Any) -> NoReturn:
        """Raise `BadInput`: the model reads or calls `member`."""
        names = [name for name in vars(StandIn) if name[0] != "_" and name not in ("log", "refuse")]
        advice = INSTEAD.get(member, f"of self.trainer there are {', '.join(names)}")
        requirement = f"it reads {member}, and there is no Trainer: {advice}"
        raise BadInput("model", self._model, requirement)

    def _counted(self, member: str) -> tuple[int, Last]:
        """The epoch and the other numbers, for a model that reads `member`."""
        last = self._last
        last.read = f"self.{member}"
        if last.epoch is None:
            requirement = (
                f"it reads {last.read} outside of local steps, which counts in local training "
                "alone: read it in training_step, or where self.training is True"
            )
            raise BadInput("model", self._model, requirement)
        return last.epoch, last

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copy and pickle ask for
            raise AttributeError(name)
        self.refuse(f"self.trainer.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        self.refuse(f"self.trainer.{name}")


def stand_in(model: nn.Module, last: Last) -> None:
    """Put a stand-in for the Trainer into every LightningModule in `model`; it counts by `last`."""
    for module in lightning_modules(model):
        stand = StandIn(type(module).__name__, last)
        module._fabric, module._trainer = None, stand  # type: ignore[assignment]
        module.log = module.log_dict = stand.log  # type: ignore[method-assign]
        for call in INSTEAD:
            if call.endswith("()"):
                name = call.removeprefix("self.").removesuffix("()")
                setattr(module, name, partial(stand.refuse, call))


def place(
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Set what `self.device` and `self.dtype` of every LightningModule in `model` report; nothing
    is moved."""
    for module in lightning_modules(model):
        module._device = device
        module._dtype = dtype


def lightning_modules(model: nn.Module) -> Iterator[LightningModule]:
    """The LightningModules in `model`, itself included."""
    return (module for module in model.modules() if isinstance(module, LightningModule))
