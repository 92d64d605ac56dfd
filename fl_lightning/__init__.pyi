# For type checkers: what __init__.py imports when it is asked for.
from fl_lightning.api import Run as Run
from fl_lightning.api import Worth as Worth
from fl_lightning.api import compare as compare
from fl_lightning.api import fit as fit
from fl_lightning.api import study as study
from fl_lightning.api import tune as tune
from fl_lightning.api import worth as worth
from fl_lightning.foundation.errors import BadInput as BadInput
from fl_lightning.foundation.errors import RunFailed as RunFailed

__version__: str
__all__ = [
    "BadInput",
    "Run",
    "RunFailed",
    "Worth",
    "__version__",
    "compare",
    "fit",
    "study",
    "tune",
    "worth",
]
