"""Every client alone: the lower reference of all personalised methods."""

from __future__ import annotations

from dataclasses import dataclass

from fl_lightning.callbacks.relations import Alone, Relation
from fl_lightning.layout import Block
from fl_lightning.methods.base import Method, Scope


@dataclass(frozen=True)
class Local(Method):
    """Nothing is sent; every client trains its own model."""

    judge = "after"

    def relation(self) -> Relation:
        """Everybody hears only themselves."""
        return Alone()

    def scope(self, block: Block) -> Scope:
        """Nothing travels."""
        return "personal"
