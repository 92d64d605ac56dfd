"""The federated methods, one file each; this module has all names that a method is written with."""

from fl_lightning.callbacks.relations import Alone, Relation, SampleCounts, mean_relation
from fl_lightning.configuration.config import check
from fl_lightning.configuration.ranges import (
    AdamRate,
    Needs,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveAdamRate,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    ShareBelow1,
    UnitInterval,
)
from fl_lightning.configuration.search import Choice, LogRange, Range, Whole, searched
from fl_lightning.core import (
    Batch,
    Beside,
    Block,
    Client,
    GroupServer,
    Layout,
    Module,
    Objective,
    Payload,
    Payloads,
    Phase,
    Phases,
    PureLoss,
    RelationInputs,
    RelationView,
    Rule,
    RunContext,
    Server,
    Slot,
    Tensors,
    Traits,
)
from fl_lightning.core.traits import sees_only_the_mean
from fl_lightning.methods.base import (
    Method,
    OwnClassifier,
    OwnStatistics,
    PlainMean,
    PlainSteps,
    Scope,
    WithoutModels,
    check_no_scaling,
    check_plain_steps,
    check_sgd,
    move_on,
)
