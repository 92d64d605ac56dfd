"""Parts of a configuration with an import path: components, and networks with weights and
adapters.

Plain data: nothing here imports torch.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

from fl_lightning.configuration.ranges import PositiveFloat, PositiveInt, ShareBelow1


@dataclass
class Component:
    """A class by its import path, and the arguments it is built with."""

    class_path: str
    init_args: dict[str, Any] = field(default_factory=dict)

    def load(self) -> Any:
        """The class itself."""
        module, _, name = self.class_path.rpartition(".")
        return getattr(importlib.import_module(module), name)

    def check(self) -> None:
        """Build the object, so that its class checks the arguments; the next `build` returns it."""
        # beside the fields: what is built is no part of the configuration
        vars(self)["built"] = self.load()(**self.init_args)

    def build(self) -> Any:
        """Return the object that `check` has built, the first time; then a new one each time."""
        cls = self.load()
        built = vars(self).pop("built", None)
        return built if type(built) is cls else cls(**self.init_args)


@dataclass
class AdaptersConfig:
    """Low-rank adapters (LoRA: Hu et al., ICLR 2022): W stays, and a client trains B A, which is
    added to it.

    Defaults are those of the paper for RoBERTa-base on GLUE (its Table 9), its setting with a
    classifier; they are also `peft`'s for rank, alpha and dropout. The authors' script for MNLI has
    alpha 16.
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
    """A network: its class, the weights that it begins with, and its adapters."""

    weights: str | None = None
    """A safetensors file; None: drawn from the seed."""
    adapters: dict[str, Any] | None = None
    """Values of `AdaptersConfig`; None: there are none, and all weights train."""

    def beside(self) -> dict[str, Any]:
        """Its settings besides class and arguments."""
        settings = {"weights": self.weights, "adapters": self.adapters}
        return {key: value for key, value in settings.items() if value is not None}


@dataclass
class ModelConfig:
    """One architecture and how many clients run it (`count` None: all of them)."""

    component: Component
    count: int | None = None

    def beside(self) -> dict[str, Any]:
        """Its settings besides the component's class and arguments."""
        settings: dict[str, Any] = {} if self.count is None else {"count": self.count}
        if isinstance(self.component, Network):
            settings |= self.component.beside()
        return settings


@dataclass(frozen=True)
class Text:
    """Facts that a model for tokens (int64 [n, T]) is built with."""

    vocabulary: int
    """Tokens are numbers below it."""
    per_position: bool
    """Whether there is a target for each position (int64 [n, T], -100: none) in place of one for
    each sample."""
