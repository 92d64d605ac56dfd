"""Methods: one small file each. A method states only how it differs from FedAvg, which is `Method` itself."""

from fl_lightning.methods.base import Method, Scope

__all__ = ["Method", "Scope"]
