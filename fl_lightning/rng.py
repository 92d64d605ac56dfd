"""Randomness as a function of (seed, purpose, client, round or absolute epoch), never of rank, order or history.

Two runs that differ in ranks, or of which one was resumed, therefore draw the same numbers.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch


def _entropy(seed: int, purpose: str, ids: tuple[int, ...]) -> list[int]:
    return [seed, zlib.crc32(purpose.encode()), *ids]


def key(seed: int, purpose: str, *ids: int) -> int:
    """A 63-bit number for (seed, purpose, ids): equal arguments, equal number."""
    words: list[int] | np.ndarray = _entropy(seed, purpose, ids)
    if min(words) >= 0 and max(words) < 2**32:  # else numpy takes each apart, which takes twice as long as the rest
        words = np.array(words, dtype=np.uint32)
    low, high = np.random.SeedSequence(words).generate_state(2).tolist()
    return (low | high << 32) >> 1


def generator(seed: int, purpose: str, *ids: int) -> torch.Generator:
    """A torch generator for (seed, purpose, ids), on the CPU."""
    return torch.Generator().manual_seed(key(seed, purpose, *ids))


def numpy_rng(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """A numpy generator for (seed, purpose, ids)."""
    return np.random.default_rng(_entropy(seed, purpose, ids))
