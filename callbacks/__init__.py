"""Callbacks: relations, what is sent, what is seen, what is saved. Imported as `fl_lightning.callbacks`."""

from fl_lightning.callbacks.base import Callback, RelationView, RoundRecord

__all__ = ["Callback", "RelationView", "RoundRecord"]
