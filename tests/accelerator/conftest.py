"""The accelerator's suite, by device: FL_TEST_DEVICE names it, or it is whichever this machine has.

`pretended` is one that is written in Python (pretended.py) and runs anywhere. It wants a process of
its own, since torch cannot fork any more once it knows of a device:

    FL_TEST_DEVICE=pretended pytest tests/accelerator -m ""

Where there is no device, nothing here is collected; tests/test_accelerator.py starts that command.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fl_lightning.foundation.device import here, lost

DEVICE = os.environ.get("FL_TEST_DEVICE") or here()
HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.with_name("golden")), str(HERE.with_name("faults"))]

if DEVICE == "pretended":
    import pretended

    pretended.install()
elif DEVICE is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_runtest_logfinish() -> None:
    """A lost device stays lost in its process: a worker of pytest-xdist ends, and another one goes
    on in its place."""
    worker = "PYTEST_XDIST_WORKER" in os.environ and DEVICE not in (None, "pretended")
    if worker and (reason := lost(torch.device(DEVICE or ""))):
        print(f"{DEVICE} is lost: {reason}", file=sys.stderr)
        os._exit(1)


@pytest.fixture
def device() -> Iterator[str]:
    """What `fabric.accelerator` is to be."""
    if DEVICE != "pretended":
        assert DEVICE is not None
        yield DEVICE
        return
    with pretended.present():
        yield DEVICE


@pytest.fixture
def only_pretended() -> None:
    """For tests that look into the device."""
    if DEVICE != "pretended":
        pytest.skip("it looks into the pretended device")
