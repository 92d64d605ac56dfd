"""How the C library keeps freed memory: training steps free and take the same activations over and
over."""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
MMAP_BYTES = 32 << 20
"""Blocks from this size on are the system's own, given back when they are freed. 32 MiB: the most
that glibc takes."""
TRIM_BYTES = 1 << 30
"""Free memory at the end of the heap that is kept. 1 GiB: more than the activations of what trains
on a CPU."""


def keep_freed() -> bool:
    """Have this process keep freed memory for its next step; return whether it does.

    By its own rules glibc keeps it or not depending on what was freed first; where it did not,
    rounds of small CNNs took 1.25 times as long (docs/performance.md). Without glibc, or where its
    own variables (MALLOC_..., GLIBC_TUNABLES) are set, nothing changes.
    """
    configured = any(name.startswith("MALLOC_") for name in os.environ)
    configured = configured or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if configured or not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES))
