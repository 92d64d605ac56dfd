"""Which data a run is of: one digest of all samples of a source and of its public samples, whatever
is dealt to whom.

It is the same for every seed, so that runs of one row of a table can be seen to be of other data.
"""

import json

import numpy as np
import xxhash

from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import public
from fl_lightning.data.load import load
from fl_lightning.data.source import SamplePool, Source

BLOCK = 4096
"""Samples that are in memory at a time."""


def current(
    data: DataConfig,
    clients: int,
    smoke: bool,
) -> str:
    """The digest of what `data` names now; `BadInput` for data that are absent or malformed."""
    source, made_up = load(data, clients, smoke)
    unlabelled = None if made_up else public.pool(data, smoke)
    return of(source, unlabelled, data.reads_test)


def keeps_digest(data: DataConfig) -> bool:
    """Whether a run with `data` keeps a digest that is the same for every seed: where models are
    scored on validation data no test sample is read, and without `data.test_seed` other ones are
    for each seed."""
    return data.score_on == "test" or (not data.pooled and data.test_seed is not None)


def of(
    source: Source,
    unlabelled: SamplePool | None,
    reads_test: bool = True,
) -> str:
    """Returns a digest of all samples, XXH3 in hexadecimal, whatever their order and the split into
    training and test part."""
    names = json.dumps([source.class_names, source.group_names])
    state = xxhash.xxh3_128(names.encode())
    labelled = [source.train, source.test] if reads_test else [source.train]
    public_pools = [] if unlabelled is None else [unlabelled]
    for pools in (labelled, public_pools):
        count = sum(len(pool.labels) for pool in pools)
        total = sum(_sum(pool) for pool in pools)
        state.update(f"{count} {total % 2**64} ".encode())
    return str(state.hexdigest())


def _sum(pool: SamplePool) -> int:
    """The sum of the samples' digests, of each with its label and group."""
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
    """The bytes of each row of an array (n, ...)."""
    width = array[:1].nbytes
    content = array.tobytes()
    begins = [place * width for place in range(len(array))]
    return [content[begin : begin + width] for begin in begins]
