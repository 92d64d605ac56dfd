"""What methods and callbacks are written with: a client's vectors and phases, the server's means and mixes."""

from fl_lightning.core.client import Client
from fl_lightning.core.layout import Block, Layout
from fl_lightning.core.mixing import Gram
from fl_lightning.core.newcomer import Rule
from fl_lightning.core.objective import Objective
from fl_lightning.core.payload import Payload
from fl_lightning.core.phase import Fit, Phase, Slot
from fl_lightning.core.relation import RelationInputs
from fl_lightning.core.run import ModelGroup, Run
from fl_lightning.core.server import GroupServer, Server
from fl_lightning.record import RelationView, RoundRecord

__all__ = [
    "Block",
    "Client",
    "Fit",
    "Gram",
    "GroupServer",
    "Layout",
    "ModelGroup",
    "Objective",
    "Payload",
    "Phase",
    "RelationInputs",
    "RelationView",
    "RoundRecord",
    "Rule",
    "Run",
    "Server",
    "Slot",
]
