"""What methods and callbacks are written with: a client's vectors and phases, the server's means
and mixes."""

from fl_lightning.core.beside import Beside as Beside
from fl_lightning.core.client import Client as Client
from fl_lightning.core.layout import Block as Block
from fl_lightning.core.layout import Layout as Layout
from fl_lightning.core.mixing import Gram as Gram
from fl_lightning.core.module import Batch as Batch
from fl_lightning.core.module import Module as Module
from fl_lightning.core.newcomer import Rule as Rule
from fl_lightning.core.objective import Objective as Objective
from fl_lightning.core.objective import PureLoss as PureLoss
from fl_lightning.core.objective import Tensors as Tensors
from fl_lightning.core.payload import Payload as Payload
from fl_lightning.core.payload import Payloads as Payloads
from fl_lightning.core.phase import PLAIN as PLAIN
from fl_lightning.core.phase import Fit as Fit
from fl_lightning.core.phase import Phase as Phase
from fl_lightning.core.phase import Phases as Phases
from fl_lightning.core.phase import Slot as Slot
from fl_lightning.core.protocols import RelationInputs as RelationInputs
from fl_lightning.core.run import ModelGroup as ModelGroup
from fl_lightning.core.run import RunContext as RunContext
from fl_lightning.core.server import GroupServer as GroupServer
from fl_lightning.core.server import Server as Server
from fl_lightning.core.traits import Traits as Traits
from fl_lightning.results.record import RelationView as RelationView
from fl_lightning.results.record import RoundRecord as RoundRecord
