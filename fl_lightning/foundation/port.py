"""Names the port in the error if processes that a launcher has started cannot connect."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from torch.distributed import DistNetworkError

from fl_lightning.foundation.errors import BadInput

NAME = "MASTER_PORT"


@contextlib.contextmanager
def port_errors_named() -> Iterator[None]:
    """Raise `BadInput` for MASTER_PORT if the processes cannot connect within the block."""
    try:
        yield
    except DistNetworkError as error:
        reason = str(error).partition("\n")[0]
        problem = f"the processes cannot connect at this port ({reason}): choose a free one"
        raise BadInput(NAME, os.environ.get(NAME), problem) from error
