"""The accelerator's suite, by device: FL_TEST_DEVICE names it, or it is whichever this machine has.

`pretended` is one that is written in Python (pretended.py) and runs anywhere. It wants a process of
its own, since torch cannot fork any more once it knows of a device:

    FL_TEST_DEVICE=pretended pytest tests/accelerator -m ""

Where there is no device, nothing here is collected; tests/test_accelerator.py starts that command.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

from fl_lightning.foundation.device import here, lost

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.with_name("golden")), str(HERE.with_name("faults"))]


def asked():
    """The device of these tests: asked anew each time, since `device_day` starts a pytest within
    the process of another."""
    return os.environ.get("FL_TEST_DEVICE") or here()


if asked() == "pretended":
    import pretended

    pretended.install()
elif asked() is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_runtest_logfinish():
    """A lost device stays lost in its process: a worker of pytest-xdist ends, and another one goes
    on in its place."""
    device = asked()
    worker = "PYTEST_XDIST_WORKER" in os.environ and device not in (None, "pretended")
    if worker and (reason := lost(torch.device(device or ""))):
        print(f"{device} is lost: {reason}", file=sys.stderr)
        os._exit(1)


@pytest.fixture
def device():
    """What `fabric.accelerator` is to be."""
    name = asked()
    assert name is not None
    if name != "pretended":
        yield name
        return
    with pretended.present():
        yield name


@pytest.fixture
def only_pretended():
    """For tests that look into the device."""
    if asked() != "pretended":
        pytest.skip("it looks into the pretended device")
