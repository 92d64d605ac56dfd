"""Randomness as a function of (seed, purpose, client, round or absolute epoch), never of rank,
order or history.

Two runs that differ in ranks, or of which one was resumed, therefore draw the same numbers.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence

import numpy as np
import torch

FEW = 12
"""Up to so many keys `keys` makes one by one, which is as fast. Ours."""
ENTROPY = 4 * 624
"""Bytes of the state of a Mersenne Twister."""
_HEAD = 24
"""Bytes before the state's words, of 8 bytes each, in what torch gives: seed, counters."""


# ------------------------------- numpy's SeedSequence for many keys at once, its constants' names


def _powers(first: int, factor: int, count: int) -> np.ndarray:
    """Return `first` times the powers of `factor`, uint32 (count, 1)."""
    powers = [first * pow(factor, k, 2**32) % 2**32 for k in range(count)]
    return np.array(powers, dtype=np.uint32)[:, None]


_A = _powers(0x43B0D7E5, 0x931E8875, 17)  # INIT_A, MULT_A
_B = _powers(0x8B51F9DD, 0x58F38DED, 3)  # INIT_B, MULT_B
_MIX_MULT_L, _MIX_MULT_R = np.array([0xCA01F9DD, 0x4973F715], dtype=np.uint32)
_POOL_SIZE = 4


def _entropy(seed: int, purpose: str, ids: Sequence[int]) -> list[int]:
    return [seed, zlib.crc32(purpose.encode()), *ids]


def key(seed: int, purpose: str, *ids: int) -> int:
    """A 63-bit number for (seed, purpose, ids): equal arguments, equal number."""
    words: list[int] | np.ndarray = _entropy(seed, purpose, ids)
    # else numpy splits each word, which takes twice as long as the rest
    if min(words) >= 0 and max(words) < 2**32:
        words = np.array(words, dtype=np.uint32)
    low, high = np.random.SeedSequence(words).generate_state(2).tolist()
    return (low | high << 32) >> 1


def keys(entropy: Sequence[tuple[int, str, int, int]]) -> list[int]:
    """`key` of each (seed, purpose, two ids): many at once, by `np.random.SeedSequence`'s
    documented algorithm."""
    words = np.array([_entropy(seed, purpose, ids) for seed, purpose, *ids in entropy])
    fits = words.dtype == np.int64 and words.min(initial=0) >= 0 and words.max(initial=0) < 2**32
    if len(entropy) < FEW or not fits:
        return [key(seed, purpose, *ids) for seed, purpose, *ids in entropy]
    pool = _hashed(words.T.astype(np.uint32), _A[:5])
    for k in range(_POOL_SIZE):
        others = [other for other in range(_POOL_SIZE) if other != k]
        hashed = _hashed(pool[k], _A[4 + 3 * k : 8 + 3 * k])
        mixed = _MIX_MULT_L * pool[others] - _MIX_MULT_R * hashed
        pool[others] = mixed ^ mixed >> 16
    low, high = _hashed(pool[:2], _B).astype(np.uint64)
    numbers: list[int] = ((low | high << 32) >> 1).tolist()
    return numbers


def _hashed(words: np.ndarray, constants: np.ndarray) -> np.ndarray:
    """Hash `words` (k, n) or (n,) with k + 1 `constants` (k + 1, 1): uint32 (k, n)."""
    words = (words ^ constants[:-1]) * constants[1:]
    return words ^ words >> 16


def generator(seed: int, purpose: str, *ids: int) -> torch.Generator:
    """A torch generator for (seed, purpose, ids), on the CPU."""
    return torch.Generator().manual_seed(key(seed, purpose, *ids))


def unrepeatable(entropy: bytes | None = None) -> torch.Generator:
    """A torch generator on the CPU whose whole state is the operating system's random numbers.

    `torch.Generator.seed` and `manual_seed` keep 32 bits of a seed, all of which can be tried in
    hours. `entropy`: `ENTROPY` such bytes, where several processes are to draw the same; None: new
    ones.
    """
    words = np.frombuffer(entropy or os.urandom(ENTROPY), np.uint32)
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state()
    state[_HEAD : _HEAD + 2 * ENTROPY] = torch.from_numpy(words.astype(np.uint64).view(np.uint8))
    return generator.set_state(state)


def numpy_rng(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """A numpy generator for (seed, purpose, ids)."""
    return np.random.default_rng(_entropy(seed, purpose, ids))
