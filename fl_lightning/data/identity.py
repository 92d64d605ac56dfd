"""The digest of a run's data: of all samples of its source and of its public samples, whoever holds
them.

It does not depend on the seed, so it shows whether runs with different seeds had the same data.
"""

import json

import numpy as np
import xxhash

from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import public
from fl_lightning.data.load import load
from fl_lightning.data.source import SamplePool, Source

BLOCK = 4096
"""Number of samples that are read at a time."""


def current(
    data: DataConfig,
    clients: int,
    smoke: bool,
) -> str:
    """Return the digest of the data that the configuration names now.

    Raises:
        BadInput: the data are absent or malformed.
    """
    source, made_up = load(data, clients, smoke)
    unlabelled = None if made_up else public.load_pool(data, smoke)
    return digest(source, unlabelled, data.reads_test)


def is_seed_independent(data: DataConfig) -> bool:
    """Return whether every seed reads the same samples, so that their digest can be stored.

    All samples are read unless models are scored on validation data, when test samples are not.
    The training samples then depend on the seed if it draws the test part: without
    `data.test_seed`, or if each client's test part is cut from pooled training and test data
    (`data.client_test`, `data.folds`).
    """
    return data.score_on == "test" or (not data.pooled and data.test_seed is not None)


def digest(
    source: Source,
    unlabelled: SamplePool | None,
    reads_test: bool = True,
) -> str:
    """Return the XXH3 digest, in hexadecimal, of all samples, whatever their order and split.

    Args:
        source: the labelled samples.
        unlabelled: the public samples, if any.
        reads_test: whether `source` has its test part; if not, only the training part counts.
    """
    names = json.dumps([source.class_names, source.group_names])
    state = xxhash.xxh3_128(names.encode())
    labelled = [source.train, source.test] if reads_test else [source.train]
    public_pools = [] if unlabelled is None else [unlabelled]
    for pools in (labelled, public_pools):
        count = sum(len(pool.labels) for pool in pools)
        total = sum(_sum_of_digests(pool) for pool in pools)
        state.update(f"{count} {total % 2**64} ".encode())
    return str(state.hexdigest())


def _sum_of_digests(pool: SamplePool) -> int:
    """Return the sum of the digests of samples, each taken with its label and group."""
    total = 0
    size = len(pool.labels)
    groups = np.zeros(size, np.int64) if pool.groups is None else pool.groups
    for start in range(0, size, BLOCK):
        index = np.arange(start, min(start + BLOCK, size))
        contents = _rows(pool.read(index)) if pool.mark is None else pool.mark(index)
        labels = _rows(pool.labels[index])
        for parts in zip(contents, labels, _rows(groups[index]), strict=True):
            total += xxhash.xxh3_64_intdigest(b"".join(parts))
    return total


def _rows(array: np.ndarray) -> list[bytes]:
    """Return the bytes of each row of an array (n, ...)."""
    width = array[:1].nbytes
    content = array.tobytes()
    begins = [place * width for place in range(len(array))]
    return [content[begin : begin + width] for begin in begins]
