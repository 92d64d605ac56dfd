"""The C library keeps freed memory, unless its user has said what it is to do."""

import platform
import subprocess
import sys

import pytest

from fl_lightning.foundation.heap import keep_freed

MEASURE = """
import resource, sys
import torch
from fl_lightning.foundation.heap import keep_freed

kept = keep_freed()
assert kept is (sys.argv[1] == "kept"), kept
step = [torch.ones(1 << 20) for _ in range(8)]  # 4 MiB each
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    del step
    step = [torch.ones(1 << 20) for _ in range(8)]
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(kept, **variables):
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, kept],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=variables,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_a_step_takes_the_memory_of_the_step_before():
    """Once it has settled down; 32 MiB are 8192 pages, or 16 huge ones."""
    assert faults("kept") < 8
    assert faults("left", MALLOC_TRIM_THRESHOLD_="1", MALLOC_MMAP_THRESHOLD_="100000") >= 16


@pytest.mark.parametrize(
    "name, value", [("MALLOC_ARENA_MAX", "2"), ("GLIBC_TUNABLES", "glibc.malloc.check=0")]
)
def test_who_has_set_something_is_left_alone(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    assert not keep_freed()
