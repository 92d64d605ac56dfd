"""Sets how the C library treats freed memory: each training step frees and allocates the same
activations."""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
MMAP_BYTES = 32 << 20
"""Blocks of at least this size are returned to the system when they are freed. 32 MiB: glibc's
maximum."""
TRIM_BYTES = 1 << 30
"""Free memory at the end of the heap that the process keeps. 1 GiB: more than the activations of
models that train on a CPU."""


def keep_freed() -> bool:
    """Have glibc keep freed memory for the next training step; return whether it does.

    By default glibc returns it to the system in some cases, in which rounds of small CNNs took 1.25
    times as long (docs/performance.md). Nothing changes without glibc, or if the user has set its
    variables (MALLOC_..., GLIBC_TUNABLES).
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
