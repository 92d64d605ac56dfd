"""Public samples without labels, held by the server and every client: what methods that distil
agree upon.

They are a part of the training data, held back before the clients share it, or another data set.
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
"""Share of the training data in use that is held back unless `data.public_samples` says how many.
Ours: 6,000 of MNIST, enough to draw KT-pFL's 3,000 or FedMD's 5,000 from in every round."""
SMOKE_SAMPLES = 64
"""Public samples of a smoke run, at most."""


def hold_back(
    used: ndarray,
    data: DataConfig,
    seed: int,
    smoke: bool,
) -> tuple[ndarray, ndarray]:
    """Split the training samples in use into private and public ones, as ascending indices; no
    label is read.

    Raises:
        BadInput: nothing would be left to train on, or nothing would be held back.
    """
    count = round(HELD_BACK_SHARE * len(used))
    if data.public_samples is not None:
        count = min(data.public_samples, count) if smoke else data.public_samples
    problem = (
        f"it must be below the {len(used)} training samples in use, from which they are held back"
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


def apart(held_back: SamplePool, *judged: tuple[SamplePool, Sequence[ndarray]]) -> SamplePool:
    """`held_back` without windows that overlap one that a client is judged by: the shares of each
    pool in `judged`.

    Raises:
        BadInput: no window would be left.
    """
    if held_back.spans is None:
        return held_back
    spans = [
        pool.spans[np.concatenate(shares)] for pool, shares in judged if pool.spans is not None
    ]
    is_overlapping = windows.overlapping(held_back.spans, np.concatenate(spans))
    index = np.flatnonzero(~is_overlapping)
    check(
        "data.public",
        HELD_BACK,
        len(index) > 0,
        "all of its windows overlap one that clients are judged by",
    )
    return held_back.part(index)


def pool(data: DataConfig, smoke: bool) -> SamplePool | None:
    """All samples of another set that `data.public` names; None where there is none, or it is
    absent in a smoke run.

    Raises:
        BadInput: the set is absent or malformed.
    """
    if data.public in (None, HELD_BACK):
        return None
    try:
        return _pool(data.public or "", data, smoke)
    except Absent:
        if not smoke:
            raise
        return None


def load(
    data: DataConfig,
    every: SamplePool | None,
    private: ndarray,
    made_up: bool,
    seed: int,
    smoke: bool,
) -> tuple[ndarray, bool]:
    """Raw samples [n, ...] of the set that `data.public` names, shaped as `private`, and whether
    any data are made up.

    `every`: what `pool` gives.

    In a smoke run they are where they are absent, or the private data are `made_up`. Grey images
    are repeated for the three channels of private ones in colour, as KT-pFL does.

    Raises:
        BadInput: the set is absent, empty, or differs from the private data in shape or number
            format.
    """
    name = data.public or ""
    if made_up or every is None:
        noise = numpy_rng(0, "made up public").integers(
            0, 256, (SMOKE_SAMPLES, *private.shape[1:]), dtype=np.uint8
        )
        return noise.astype(private.dtype), True
    size = len(every.labels)
    check("data.public", name, size != 0, "it holds no samples")
    limits = [size, data.public_samples or size, SMOKE_SAMPLES if smoke else size]
    index = np.arange(size)
    if min(limits) < size:
        draws = numpy_rng(seed, "data.public")
        index = np.sort(draws.choice(size, min(limits), replace=False))
    raw = every.read(index)
    channels = [samples.shape[1] for samples in (raw, private) if samples.ndim == 4]
    if channels == [1, 3]:
        raw = np.repeat(raw, 3, axis=1)
    shapes = raw.shape[1:], private.shape[1:]
    problem = f"its samples have the shape {shapes[0]}, but the private data {shapes[1]}"
    check("data.public", name, shapes[0] == shapes[1], problem)
    problem = f"it holds {raw.dtype}, but the private data {private.dtype}"
    requirement = f"{problem}: they must be on one scale"
    check("data.public", name, raw.dtype == private.dtype, requirement)
    return raw, False


def _pool(
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
    problem = "those are the private data themselves: held_back, another set or a file"
    check("data.public", name, not are_private, problem)
    if name.endswith(".npz"):
        return arrays.public("data.public", name)
    check("data.public", name, name != "arrays", "give the path of the .npz file itself")
    check_name("data.public", name)
    try:
        download = data.download and not smoke
        return read(replace(data, source=name, root=root, download=download)).train
    except BadInput as error:  # written for the private data
        remedy = error.requirement.partition("; or --data.source")[0].replace(
            "data.root", "data.public_root"
        )
        raise type(error)("data.public_root", root, remedy) from error
