"""Random numbers as a function of (seed, purpose, client, round or absolute epoch).

They do not depend on the rank, on the order of draws or on earlier draws, so a run on several ranks
and a resumed run draw the same numbers.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence

import numpy as np
import torch

FEW = 12
"""Fewer keys than this `keys` computes one by one, which is as fast. Our choice."""
ENTROPY = 4 * 624
"""Bytes of the state of a Mersenne Twister."""
_HEAD = 24
"""Bytes of torch's state (seed, counters) before the generator's words, which have 8 bytes each."""


# ------------------------- numpy's SeedSequence for many keys at once, with its names of constants


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
    """Return a 63-bit seed that is determined by (seed, purpose, ids)."""
    words: list[int] | np.ndarray = _entropy(seed, purpose, ids)
    # numpy would split each word of a list, which takes twice as long as the rest
    if min(words) >= 0 and max(words) < 2**32:
        words = np.array(words, dtype=np.uint32)
    low, high = np.random.SeedSequence(words).generate_state(2).tolist()
    return (low | high << 32) >> 1


def keys(entropy: Sequence[tuple[int, str, int, int]]) -> list[int]:
    """Return `key` of each (seed, purpose, id, id), many at once by the documented algorithm of
    `np.random.SeedSequence`."""
    words = np.array([_entropy(seed, purpose, ids) for seed, purpose, *ids in entropy])
    fits = words.dtype == np.int64 and words.min(initial=0) >= 0 and words.max(initial=0) < 2**32
    if len(entropy) < FEW or not fits:
        return [key(seed, purpose, *ids) for seed, purpose, *ids in entropy]
    pool = _hashed(words.T.astype(np.uint32), _A[:5])
    for k in range(_POOL_SIZE):
        others = [place for place in range(_POOL_SIZE) if place != k]
        hashed = _hashed(pool[k], _A[4 + 3 * k : 8 + 3 * k])
        mixed = _MIX_MULT_L * pool[others] - _MIX_MULT_R * hashed
        pool[others] = mixed ^ mixed >> 16
    low, high = _hashed(pool[:2], _B).astype(np.uint64)
    numbers: list[int] = ((low | high << 32) >> 1).tolist()
    return numbers


def _hashed(words: np.ndarray, constants: np.ndarray) -> np.ndarray:
    """Return hashes, uint32 (k, n), of `words` (k, n) or (n,) with `constants` (k + 1, 1)."""
    words = (words ^ constants[:-1]) * constants[1:]
    return words ^ words >> 16


def generator(seed: int, purpose: str, *ids: int) -> torch.Generator:
    """Return a torch generator on the CPU with the seed `key(seed, purpose, *ids)`."""
    return torch.Generator().manual_seed(key(seed, purpose, *ids))


def unrepeatable(entropy: bytes | None = None) -> torch.Generator:
    """Return a torch generator on the CPU whose whole state consists of the operating system's
    random numbers.

    `torch.Generator.seed` and `manual_seed` use 32 bits of a seed, and all 2^32 seeds can be tried
    in hours. `entropy`: `ENTROPY` random bytes that several processes share, to draw the same
    numbers; None: new ones.
    """
    words = np.frombuffer(entropy or os.urandom(ENTROPY), np.uint32)
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state()
    state[_HEAD : _HEAD + 2 * ENTROPY] = torch.from_numpy(words.astype(np.uint64).view(np.uint8))
    return generator.set_state(state)


def numpy_rng(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """Return a numpy generator that is determined by (seed, purpose, ids)."""
    return np.random.default_rng(_entropy(seed, purpose, ids))
