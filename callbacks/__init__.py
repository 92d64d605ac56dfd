"""Callbacks: relations, what is sent, what is seen, what is saved. Imported as
`fl_lightning.callbacks`."""

from fl_lightning.callbacks.base import Aggregator, Callback, Observer, Transform
from fl_lightning.callbacks.relations import Relation
from fl_lightning.results.record import RelationView, RoundRecord

__all__ = [
    "Aggregator",
    "Callback",
    "Observer",
    "Relation",
    "RelationView",
    "RoundRecord",
    "Transform",
]
