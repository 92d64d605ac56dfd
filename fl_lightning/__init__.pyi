# For type checkers: what __init__.py imports when it is asked for.
from fl_lightning.api import Run as Run
from fl_lightning.api import Worth as Worth
from fl_lightning.api import archive as archive
from fl_lightning.api import audit as audit
from fl_lightning.api import check_data as check_data
from fl_lightning.api import check_method as check_method
from fl_lightning.api import compare as compare
from fl_lightning.api import dashboard as dashboard
from fl_lightning.api import deploy as deploy
from fl_lightning.api import export as export
from fl_lightning.api import fit as fit
from fl_lightning.api import join as join
from fl_lightning.api import plan as plan
from fl_lightning.api import report as report
from fl_lightning.api import reproduce as reproduce
from fl_lightning.api import resolved as resolved
from fl_lightning.api import status as status
from fl_lightning.api import study as study
from fl_lightning.api import submit as submit
from fl_lightning.api import test as test
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
    "archive",
    "audit",
    "check_data",
    "check_method",
    "compare",
    "dashboard",
    "deploy",
    "export",
    "fit",
    "join",
    "plan",
    "report",
    "reproduce",
    "resolved",
    "status",
    "study",
    "submit",
    "test",
    "tune",
    "worth",
]
