"""The accelerator's suite, by device: FL_TEST_DEVICE names it, or it is whichever this machine has.

Where there is no device, nothing here is collected.
"""

import os
import sys

import pytest
import torch

from fl_lightning.foundation.device import accelerator_kind, why_lost


def asked():
    """The device of these tests: asked anew each time, since `device_day` starts a pytest within
    the process of another."""
    return os.environ.get("FL_TEST_DEVICE") or accelerator_kind()


if asked() is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_runtest_logfinish():
    """A lost device stays lost in its process: a worker of pytest-xdist ends, and another one goes
    on in its place."""
    device = asked()
    if "PYTEST_XDIST_WORKER" in os.environ and (reason := why_lost(torch.device(device))):
        print(f"{device} is lost: {reason}", file=sys.stderr)
        os._exit(1)


@pytest.fixture
def device():
    """What `fabric.accelerator` is to be."""
    return asked()
