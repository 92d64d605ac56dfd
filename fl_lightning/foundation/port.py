"""The port at which processes that were started from outside find each other."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from torch.distributed import DistNetworkError

from fl_lightning.foundation.errors import BadInput

NAME = "MASTER_PORT"


@contextlib.contextmanager
def port_errors_named() -> Iterator[None]:
    """Raise `BadInput`, naming the port, where processes that were started from outside cannot meet
    within the block."""
    try:
        yield
    except DistNetworkError as error:
        reason = str(error).partition("\n")[0]
        problem = f"the processes cannot meet at it ({reason}): choose a port that is free"
        raise BadInput(NAME, os.environ.get(NAME), problem) from error
