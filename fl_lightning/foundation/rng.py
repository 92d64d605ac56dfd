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
"""Keys that are as fast one by one. Ours."""
ENTROPY = 4 * 624
"""Bytes of the state of a Mersenne Twister."""
_HEAD = 24
"""Bytes before the state's words, of 8 bytes each, in what torch gives: seed, counters."""


def _powers(first: int, factor: int, count: int) -> np.ndarray:
    return np.array([first * pow(factor, k, 2**32) % 2**32 for k in range(count)], dtype=np.uint32)[
        :, None
    ]


_SET, _GET = _powers(0x43B0D7E5, 0x931E8875, 17), _powers(0x8B51F9DD, 0x58F38DED, 3)
_LEFT, _RIGHT = np.array([0xCA01F9DD, 0x4973F715], dtype=np.uint32)
"""`SeedSequence`'s constants."""
_OTHERS = [[k for k in range(4) if k != own] for own in range(4)]


def _entropy(seed: int, purpose: str, ids: tuple[int, ...]) -> list[int]:
    return [seed, zlib.crc32(purpose.encode()), *ids]


def key(seed: int, purpose: str, *ids: int) -> int:
    """A 63-bit number for (seed, purpose, ids): equal arguments, equal number."""
    words: list[int] | np.ndarray = _entropy(seed, purpose, ids)
    # else numpy takes each apart, which takes twice as long as the rest
    if min(words) >= 0 and max(words) < 2**32:
        words = np.array(words, dtype=np.uint32)
    low, high = np.random.SeedSequence(words).generate_state(2).tolist()
    return (low | high << 32) >> 1


def keys(entropy: Sequence[tuple[int, str, int, int]]) -> list[int]:
    """`key` of each (seed, purpose, two ids): many at once, by `np.random.SeedSequence`'s
    documented algorithm."""
    words = np.array([_entropy(seed, purpose, (one, two)) for seed, purpose, one, two in entropy])
    if len(entropy) < FEW or words.dtype != np.int64 or words.min() < 0 or words.max() >= 2**32:
        return [key(seed, purpose, *ids) for seed, purpose, *ids in entropy]
    pool = _stirred(words.T.astype(np.uint32), _SET[:5])
    for k, others in enumerate(_OTHERS):
        mixed = _LEFT * pool[others] - _RIGHT * _stirred(pool[k], _SET[4 + 3 * k : 8 + 3 * k])
        pool[others] = mixed ^ mixed >> 16
    low, high = _stirred(pool[:2], _GET).astype(np.uint64)
    numbers: list[int] = ((low | high << 32) >> 1).tolist()
    return numbers


def _stirred(words: np.ndarray, constants: np.ndarray) -> np.ndarray:
    """`words` (k, n) or (n,) with k + 1 `constants` (k + 1, 1): uint32 (k, n)."""
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
    made = torch.Generator().manual_seed(0)
    state = made.get_state()
    state[_HEAD : _HEAD + 2 * ENTROPY] = torch.from_numpy(words.astype(np.uint64).view(np.uint8))
    return made.set_state(state)


def numpy_rng(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """A numpy generator for (seed, purpose, ids)."""
    return np.random.default_rng(_entropy(seed, purpose, ids))
