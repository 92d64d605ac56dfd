"""The port at which a run's processes find each other: `MASTER_PORT`, else one that is free."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from torch.distributed import DistNetworkError

from fl_lightning.errors import BadInput
from fl_lightning.log import say

NAME = "MASTER_PORT"


def leave_if_taken() -> None:
    """Remove `MASTER_PORT` from the environment, with a line, where it is in use: Lightning then takes a free one."""
    value = os.environ.get(NAME)
    if value is not None and not _is_free(value):
        del os.environ[NAME]
        say(f"{NAME}={value}: no port that is free; this run takes another one")


@contextlib.contextmanager
def named_if_taken() -> Iterator[None]:
    """Raise `BadInput` with the port where processes that were started from outside cannot meet there."""
    try:
        yield
    except DistNetworkError as error:
        reason = str(error).partition("\n")[0]
        allowed = f"the processes cannot meet at it ({reason}): choose a port that is free"
        raise BadInput(NAME, os.environ.get(NAME), allowed) from error


def _is_free(value: str) -> bool:
    with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(value)))
        except (OSError, ValueError, OverflowError):
            return False
    return True
