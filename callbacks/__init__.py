"""Callbacks of the four kinds (relations, transforms, observers, aggregators), imported as
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
