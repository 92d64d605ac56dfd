"""Public samples without labels, which the server and all clients have, for methods that distil.

They are either held back from the training data before the clients share it, or another data set.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy import ndarray

from fl_lightning.configuration.config import DataConfig, check
from fl_lightning.data import windows
from fl_lightning.data.load import SOURCE_BY_SUFFIX, check_name, read
from fl_lightning.data.source import Absent, SamplePool
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.rng import numpy_rng

HELD_BACK = "held_back"
HELD_BACK_SHARE = 0.1
"""Share of the training data in use that is held back, unless `data.public_samples` sets a number.
Ours: 6,000 of MNIST, enough for KT-pFL's 3,000 or FedMD's 5,000 in every round."""
SMOKE_SAMPLES = 64
"""Largest number of public samples in a smoke run."""


def hold_back(
    used: ndarray,
    data: DataConfig,
    seed: int,
    smoke: bool,
) -> tuple[ndarray, ndarray]:
    """Split the indices of the training samples in use into private and public ones, without
    reading labels.

    Raises:
        BadInput: nothing would be left to train on, or nothing would be held back.
    """
    count = round(HELD_BACK_SHARE * len(used))
    if data.public_samples is not None:
        count = min(data.public_samples, count) if smoke else data.public_samples
    problem = (
        f"it must be below {len(used)}, the training samples in use, which they are taken from"
    )
    check("data.public_samples", count, count < len(used), problem)
    problem = (
        f"a tenth of the {len(used)} training samples in use rounds to none: set "
        f"data.public_samples, or use more of them (data.fraction)"
    )
    check("data.public", HELD_BACK, count > 0, problem)
    order = numpy_rng(seed, "data.public").permutation(len(used))
    private = used[order[count:]]
    return np.sort(private), np.sort(used[order[:count]])


def without_overlaps(
    held_back: SamplePool, *scored: tuple[SamplePool, Sequence[ndarray]]
) -> SamplePool:
    """Return the public samples without windows that overlap validation or test windows of the
    clients.

    Args:
        held_back: the public samples.
        scored: pools on which clients are scored, each with the clients' indices.

    Raises:
        BadInput: no window would be left.
    """
    if held_back.spans is None:
        return held_back
    spans = [
        pool.spans[np.concatenate(shares)] for pool, shares in scored if pool.spans is not None
    ]
    is_overlapping = windows.overlapping(held_back.spans, np.concatenate(spans))
    index = np.flatnonzero(~is_overlapping)
    check(
        "data.public",
        HELD_BACK,
        len(index) > 0,
        "all public windows overlap test or validation windows: choose another data set",
    )
    return held_back.part(index)


def load_pool(data: DataConfig, smoke: bool) -> SamplePool | None:
    """Load the data set that `data.public` names; None if it names none, or if it is absent in a
    smoke run.

    Raises:
        BadInput: the data set is absent or malformed.
    """
    if data.public in (None, HELD_BACK):
        return None
    try:
        return _load_pool(data.public or "", data, smoke)
    except Absent:
        if not smoke:
            raise
        return None


def raw_samples(
    data: DataConfig,
    public: SamplePool | None,
    private: ndarray,
    made_up: bool,
    seed: int,
    smoke: bool,
) -> tuple[ndarray, bool]:
    """Return raw public samples [n, ...] in the shape of the private ones, and whether any data are
    made up.

    Grey images are repeated for three channels if the private ones are in colour, as in KT-pFL.
    Noise replaces a public data set that is absent in a smoke run; if the private data are made up,
    noise replaces the public ones too.

    Args:
        data: the configuration.
        public: the result of `load_pool`.
        private: raw private samples.
        made_up: whether these are noise.
        seed: of the run.
        smoke: whether this is a smoke run.

    Raises:
        BadInput: the data set is empty, or its samples differ from the private ones in shape or
            number format.
    """
    name = data.public or ""
    if made_up or public is None:
        noise = numpy_rng(0, "made up public").integers(
            0, 256, (SMOKE_SAMPLES, *private.shape[1:]), dtype=np.uint8
        )
        return noise.astype(private.dtype), True
    size = len(public.labels)
    check("data.public", name, size != 0, "it holds no samples: choose another data set")
    limits = [size, data.public_samples or size, SMOKE_SAMPLES if smoke else size]
    index = np.arange(size)
    if min(limits) < size:
        draws = numpy_rng(seed, "data.public")
        index = np.sort(draws.choice(size, min(limits), replace=False))
    raw = public.read(index)
    channels = [samples.shape[1] for samples in (raw, private) if samples.ndim == 4]
    if channels == [1, 3]:
        raw = np.repeat(raw, 3, axis=1)
    shapes = raw.shape[1:], private.shape[1:]
    problem = f"its samples have the shape {shapes[0]}, those of the private data {shapes[1]}"
    check("data.public", name, shapes[0] == shapes[1], problem)
    problem = f"it holds {raw.dtype}, but the private data {private.dtype}: convert it"
    check("data.public", name, raw.dtype == private.dtype, problem)
    return raw, False


def _load_pool(
    name: str,
    data: DataConfig,
    smoke: bool,
) -> SamplePool:
    from fl_lightning.data import arrays

    root = data.public_root
    if root is None and data.root is not None:
        file = Path(data.root)
        root = str(file.parent) if file.suffix.lower() in SOURCE_BY_SUFFIX else data.root
    place = data.root if name == data.root else root
    are_private = name in (data.source, data.root) and place == data.root
    problem = "it names the private data: set it to held_back, another data set or a file"
    check("data.public", name, not are_private, problem)
    if name.endswith(".npz"):
        return arrays.public("data.public", name)
    check("data.public", name, name != "arrays", "name the path of the .npz file instead")
    check_name("data.public", name)
    try:
        download = data.download and not smoke
        return read(replace(data, source=name, root=root, download=download)).train
    except BadInput as error:  # its text speaks of the keys of private data
        remedy = error.requirement.partition("; or --data.source")[0].replace(
            "data.root", "data.public_root"
        )
        raise type(error)("data.public_root", root, remedy) from error
