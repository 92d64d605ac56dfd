"""Methods: one small file each. A method states only how it differs from FedAvg, which is `Method`
itself."""

from fl_lightning.configuration.search import Choice, LogRange, Range, Whole, searched
from fl_lightning.core import Traits
from fl_lightning.methods.base import Method, Scope

__all__ = ["Choice", "LogRange", "Method", "Range", "Scope", "Traits", "Whole", "searched"]
