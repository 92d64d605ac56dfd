"""What a user's LightningModule reads of Lightning's Trainer, which is not there: how far its
client has trained, and a refusal of everything else."""

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
"""What there is in place of a method or attribute that is refused."""


class StandIn:
    """In the Trainer's place in the LightningModule `model`: what is not defined here is refused by
    name."""

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
        """Epochs of local training of a client that takes part in all rounds, one that is begun
        included."""
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
        line = (
            f"model: what {self._model} logs (self.log, self.logger) is not kept: the run writes "
            f"tables of its own"
        )
        self._last.say(line)

    def refuse(self, what: str, *values: Any, **options: Any) -> NoReturn:
        """Raise `BadInput`: the model reads or calls `what`."""
        names = ", ".join(
            name for name in vars(StandIn) if name[0] != "_" and name not in ("log", "refuse")
        )
        instead = INSTEAD.get(what, f"of self.trainer there are {names}")
        raise BadInput("model", self._model, f"it reads {what}, and there is no Trainer: {instead}")

    def _counted(self, what: str) -> tuple[int, Last]:
        """The epoch, and what else is counted; `what` is being read."""
        last = self._last
        last.read = f"self.{what}"
        if last.epoch is None:
            allowed = (
                "which counts in local training alone: read it in training_step, or where "
                "self.training is True"
            )
            raise BadInput(
                "model", self._model, f"it reads self.{what} outside of local steps, {allowed}"
            )
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
        name = type(module).__name__
        stand = StandIn(name, last)
        module._fabric, module._trainer = None, stand  # type: ignore[assignment]
        module.log = module.log_dict = stand.log  # type: ignore[method-assign]
        for call in (call for call in INSTEAD if call.endswith("()")):
            setattr(
                module, call.removeprefix("self.").removesuffix("()"), partial(stand.refuse, call)
            )


def place(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Have `self.device` and `self.dtype` of every LightningModule in `model` say where, and as
    what, it trains."""
    for module in lightning_modules(model):
        module._device = device
        module._dtype = dtype


def lightning_modules(model: nn.Module) -> Iterator[LightningModule]:
    """Those in `model`, itself included."""
    return (module for module in model.modules() if isinstance(module, LightningModule))
