"""A source by its name, or samples made up in its place."""

from __future__ import annotations

import difflib
import math

import numpy as np

from fl_lightning.config import DataConfig
from fl_lightning.data.names import SOURCES
from fl_lightning.data.source import Absent, Pool, Source
from fl_lightning.errors import BadInput
from fl_lightning.rng import numpy_rng

SMOKE_TRAIN, SMOKE_TEST = 64, 8
"""Samples per client in a smoke run, about."""


def load(data: DataConfig, clients: int, smoke: bool) -> tuple[Source, bool]:
    """The source, and whether it was made up."""
    name = data.source
    if data.root is not None and data.root.endswith(".npz"):
        name = "arrays"
    check_name("data.source", name)
    try:
        return read(name, data.root, data.download and not smoke), False
    except Absent:
        if not smoke:
            raise
        return made_up(name, clients), True


def check_name(key: str, name: str) -> None:
    """Raise `BadInput` for `key` unless there is a source called `name`."""
    if name not in SOURCES:
        close = difflib.get_close_matches(name.lower(), SOURCES, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise BadInput(key, name, f"{hint}`fl-train list sources` names them all")


def read(name: str, root: str | None, download: bool) -> Source:
    """The source called `name`; `BadInput` for data that are absent (then `Absent`) or malformed."""
    # Imported here: scikit-learn and torchvision take seconds to load.
    if name == "digits":
        from fl_lightning.data import digits

        return digits.load()
    if name == "arrays":
        from fl_lightning.data import arrays

        return arrays.load(root)
    if name == "images":
        from fl_lightning.data import images

        return images.load(root)
    from fl_lightning.data import vision

    return vision.load(name, root, download)


def made_up(name: str, clients: int) -> Source:
    """Noise with labels, of the shape and classes of torchvision's `name` (else 10 classes of 3x32x32)."""
    from fl_lightning.data.vision import RECIPES

    recipe = RECIPES.get(name)
    shape, classes = (recipe.shape, recipe.classes) if recipe else ((3, 32, 32), 10)
    pools = []
    for part, per_client in (("train", SMOKE_TRAIN), ("test", SMOKE_TEST)):
        size = per_class(classes, per_client, clients) * classes
        noise = numpy_rng(0, f"made up {part}").integers(0, 256, (size, *shape), dtype=np.uint8)
        pools.append(Pool.of(noise, np.arange(size) % classes))
    return Source(pools[0], pools[1], [str(label) for label in range(classes)])


def per_class(classes: int, per_client: int, clients: int) -> int:
    """Samples of each class that give about `per_client` to each client, and let every client hold every class."""
    return max(math.ceil(per_client * clients / classes), clients)
