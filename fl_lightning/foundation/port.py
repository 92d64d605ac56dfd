"""The port at which processes that were started from outside find each other."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from torch.distributed import DistNetworkError

from fl_lightning.foundation.errors import BadInput

NAME = "MASTER_PORT"


@contextlib.contextmanager
def named_if_taken() -> Iterator[None]:
    """Raise `BadInput` with the port where processes that were started from outside cannot meet
    there."""
    try:
        yield
    except DistNetworkError as error:
        reason = str(error).partition("\n")[0]
        allowed = f"the processes cannot meet at it ({reason}): choose a port that is free"
        raise BadInput(NAME, os.environ.get(NAME), allowed) from error
