"""Methods: one file each, with what methods are written with. A method states only how it differs
from FedAvg, which is `Method` itself."""

from fl_lightning.configuration.ranges import (
    AdamRate as AdamRate,
)
from fl_lightning.configuration.ranges import (
    Needs as Needs,
)
from fl_lightning.configuration.ranges import (
    NonNegativeFloat as NonNegativeFloat,
)
from fl_lightning.configuration.ranges import (
    NonNegativeInt as NonNegativeInt,
)
from fl_lightning.configuration.ranges import (
    PositiveAdamRate as PositiveAdamRate,
)
from fl_lightning.configuration.ranges import (
    PositiveFloat as PositiveFloat,
)
from fl_lightning.configuration.ranges import (
    PositiveInt as PositiveInt,
)
from fl_lightning.configuration.ranges import (
    PositiveShare as PositiveShare,
)
from fl_lightning.configuration.ranges import (
    ShareBelow1 as ShareBelow1,
)
from fl_lightning.configuration.ranges import (
    UnitInterval as UnitInterval,
)
from fl_lightning.configuration.search import (
    Choice as Choice,
)
from fl_lightning.configuration.search import (
    LogRange as LogRange,
)
from fl_lightning.configuration.search import (
    Range as Range,
)
from fl_lightning.configuration.search import (
    Whole as Whole,
)
from fl_lightning.configuration.search import (
    searched as searched,
)
from fl_lightning.core import Traits as Traits
from fl_lightning.core.traits import sees_only_the_mean as sees_only_the_mean
from fl_lightning.methods.base import (
    Method as Method,
)
from fl_lightning.methods.base import (
    OwnClassifier as OwnClassifier,
)
from fl_lightning.methods.base import (
    OwnStatistics as OwnStatistics,
)
from fl_lightning.methods.base import (
    PlainMean as PlainMean,
)
from fl_lightning.methods.base import (
    Scope as Scope,
)
from fl_lightning.methods.base import (
    WithoutModels as WithoutModels,
)
from fl_lightning.methods.base import (
    check_no_scaling as check_no_scaling,
)
from fl_lightning.methods.base import (
    check_plain_steps as check_plain_steps,
)
from fl_lightning.methods.base import (
    move_on as move_on,
)
