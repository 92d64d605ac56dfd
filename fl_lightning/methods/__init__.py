"""Methods: one small file each. A method states only how it differs from FedAvg, which is `Method` itself."""

from fl_lightning.methods.base import Method, Scope
from fl_lightning.search import Choice, LogRange, Range, Whole, searched

__all__ = ["Choice", "LogRange", "Method", "Range", "Scope", "Whole", "searched"]
