"""Building blocks of methods and callbacks: a client's vectors and phases, the server's means and
mixes."""

from fl_lightning.core.beside import Beside
from fl_lightning.core.client import Client
from fl_lightning.core.layout import Block, Layout
from fl_lightning.core.mixing import Gram
from fl_lightning.core.module import Batch, Module
from fl_lightning.core.newcomer import Rule
from fl_lightning.core.objective import Objective, PureLoss, Tensors
from fl_lightning.core.payload import Payload, Payloads
from fl_lightning.core.phase import PLAIN, Fit, Phase, Phases, Slot
from fl_lightning.core.relation import RelationInputs
from fl_lightning.core.run import ModelGroup, RunContext
from fl_lightning.core.server import GroupServer, Server
from fl_lightning.core.traits import Traits
from fl_lightning.results.record import RelationView, RoundRecord

__all__ = [
    "PLAIN",
    "Batch",
    "Beside",
    "Block",
    "Client",
    "Fit",
    "Gram",
    "GroupServer",
    "Layout",
    "ModelGroup",
    "Module",
    "Objective",
    "Payload",
    "Payloads",
    "Phase",
    "Phases",
    "PureLoss",
    "RelationInputs",
    "RelationView",
    "RoundRecord",
    "Rule",
    "RunContext",
    "Server",
    "Slot",
    "Tensors",
    "Traits",
]
