"""Classes that a configuration names by import path, with their arguments: components, and networks
with weights and adapters.

Nothing here imports torch.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

from fl_lightning.configuration.ranges import PositiveFloat, PositiveInt, ShareBelow1


@dataclass
class Component:
    """A class by its import path, and the arguments to build an object with."""

    class_path: str
    init_args: dict[str, Any] = field(default_factory=dict)

    def load(self) -> Any:
        """Import and return the class."""
        module, _, name = self.class_path.rpartition(".")
        return getattr(importlib.import_module(module), name)

    def check(self) -> None:
        """Build an object, so that the class checks its arguments. The next `build` returns this
        object."""
        # not a field: the object is no part of the configuration
        vars(self)["built"] = self.load()(**self.init_args)

    def build(self) -> Any:
        """Return the object that `check` has built, if it has not been returned yet, or a new
        one."""
        cls = self.load()
        built = vars(self).pop("built", None)
        return built if type(built) is cls else cls(**self.init_args)


@dataclass
class AdaptersConfig:
    """Low-rank adapters (LoRA: Hu et al., ICLR 2022): the weights W stay, and a client trains B A,
    which is added to them.

    Defaults are those of the paper for RoBERTa-base with a classifier on GLUE (its Table 9); they
    are also `peft`'s for rank, alpha and dropout. The authors' script for MNLI has alpha 16.
    """

    rank: PositiveInt = 8
    """r, the rows of A and columns of B. 8: the paper, Table 9 (its GPT-2 has 4, Table 11)."""
    alpha: PositiveFloat = 8.0
    """B A is scaled by alpha / rank. 8: the paper, Table 9 (its GPT-2 has 32, Table 11)."""
    targets: list[str] | None = None
    """Modules that get adapters, by the ends of their dotted names. null: those that the model
    names itself (`adapter_targets`; in ours the projections to queries and values, as in the
    paper's Table 9), else every linear layer but the classifier."""
    dropout: ShareBelow1 = 0.0
    """Of what goes into A, in training. 0: `peft`; the paper's Table 9 names none (GPT-2: 0.1 or 0,
    Table 11)."""
    head: bool = True
    """Whether the classifier trains, too, as the paper's does on GLUE: a pretrained classifier has
    other classes."""


@dataclass
class Network(Component):
    """A network: its class and arguments, its initial weights, and its adapters."""

    weights: str | None = None
    """A safetensors file; None: drawn from the seed."""
    adapters: dict[str, Any] | None = None
    """Values of `AdaptersConfig`; None: no adapters, and all weights train."""

    def options(self) -> dict[str, Any]:
        """Return `weights` and `adapters` as a config has them, without those that are None."""
        settings = {"weights": self.weights, "adapters": self.adapters}
        return {key: value for key, value in settings.items() if value is not None}


@dataclass
class ModelConfig:
    """An architecture, and the number of clients that run it (`count` None: all)."""

    component: Component
    count: int | None = None

    def options(self) -> dict[str, Any]:
        """Return `count`, `weights` and `adapters` as a config has them, without those that are
        None."""
        settings: dict[str, Any] = {} if self.count is None else {"count": self.count}
        if isinstance(self.component, Network):
            settings |= self.component.options()
        return settings


@dataclass(frozen=True)
class Text:
    """Facts about text data that a model's constructor needs. Samples of text data are numbers of
    tokens, int64 [n, T]."""

    vocabulary: int
    """Number of tokens; a token is a number below it."""
    per_position: bool
    """Whether each position has a target (int64 [n, T], -100: none); otherwise each sample has
    one."""
