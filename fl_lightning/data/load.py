"""A source by its name, or samples made up in its place."""

import difflib
import math
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np

from fl_lightning.configuration import tables
from fl_lightning.configuration.config import DataConfig, check
from fl_lightning.configuration.names import SOURCES
from fl_lightning.data.partition import NATURAL
from fl_lightning.data.source import Absent, SamplePool, Source
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.rng import numpy_rng

SMOKE_TRAIN, SMOKE_TEST = 64, 8
"""Samples per client in a smoke run, about."""
MADE_UP_FEATURES = 8
"""Columns of a table that is not there and of which none are chosen."""
READERS = {
    "digits": "digits.load",
    "arrays": "arrays.load",
    "images": "images.load",
    "table": "table.load",
    "watch": "watch.load",
    "glyphs": "glyphs.load",
    "domains": "domains.load",
    "digit_pair": "domains.digit_pair",
    "leaf": "leaf.load",
    "hf": "hub.load",
    "text": "text.load",
}
"""Sources by name, and the function in this folder that reads each from the keys of `data`; any
other is one of torchvision's, or an import path."""
MADE_UP_TOKENS = 80
"""Different tokens of texts that are not there: LEAF's Shakespeare has so many characters."""
TARGETS = ("table", "arrays", "hf")
"""Sources whose labels may be numbers."""
SOURCE_BY_SUFFIX = {".npz": "arrays", **dict.fromkeys(tables.SUFFIXES, "table"), ".parquet": "hf"}
"""The source that a file for `data.root` means, where `data.source` names none that reads files of
another kind."""
ROOTLESS = ("digits", "watch")
"""Sources that come with packages: there is nothing to look for below `data.root`."""


def load(
    data: DataConfig,
    clients: int,
    smoke: bool,
) -> tuple[Source, bool]:
    """The source, and whether it was made up."""
    name = source_name(data)
    check_name("data.source", name)
    # other public data have their files below `data.root`
    is_unread = data.root is not None and name in ROOTLESS and data.public in (None, "held_back")
    remedy = (
        f"name a file ({', '.join(SOURCE_BY_SUFFIX)}), or set data.source (`fl-train list sources`)"
    )
    check("data.root", data.root, not is_unread, f"the source {name} reads no files: {remedy}")
    if data.task == "regression" and name not in TARGETS:
        problem = f"its targets come from the sources {', '.join(TARGETS)}, not {name}"
        raise BadInput("data.task", data.task, problem)
    try:
        download = data.download and not smoke
        return read(replace(data, source=name, download=download)), False
    except Absent:
        if not smoke:
            raise
        return made_up(name, data, clients), True


def source_name(data: DataConfig) -> str:
    """The name of the source: `data.source`, or that which the file `data.root` means.

    Raises:
        BadInput: both are given, and contradict each other.
    """
    suffix = Path(data.root or "").suffix.lower()
    meant = SOURCE_BY_SUFFIX.get(suffix)
    if meant is None or (data.source == "table" and suffix in tables.PANDAS):
        return data.source
    fits = data.source not in ("arrays", "table") or data.source == meant
    check("data.source", data.source, fits, f"{data.root} is a file for the source {meant}")
    return meant


def check_name(key: str, name: str) -> None:
    """Raise `BadInput` for `key` unless there is a source called `name`."""
    if name not in SOURCES and "." not in name:
        close = difflib.get_close_matches(name.lower(), SOURCES, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise BadInput(key, name, f"{hint}`fl-train list sources` names them all")


def read(data: DataConfig) -> Source:
    """The source that `data.source` names; `BadInput` for data that are absent (then `Absent`) or
    malformed."""
    data = tables.spelled(data)
    path = READERS.get(data.source, "datamodule.load" if "." in data.source else "vision.load")
    module, _, function = path.partition(".")
    # Imported here: scikit-learn and torchvision take seconds to load.
    loader: Callable[[DataConfig], Source] = getattr(
        import_module(f"fl_lightning.data.{module}"), function
    )
    return loader(data)


def made_up(
    name: str,
    data: DataConfig,
    clients: int,
) -> Source:
    """Noise with labels, of the shape and classes of the source `name` (else 10 classes of
    3x32x32); of texts random tokens, of which each has a next one (source text), or the text a
    class.

    A table of several columns has as many features. Groups are as many as clients.
    """
    are_texts = name == "text" or data.tokens is not None
    shape, classes = shape_of(name) or ((3, 32, 32), 10)
    if are_texts:
        shape, classes = (data.length + 1,), MADE_UP_TOKENS
    elif name == "table" and len(data.columns or []) != 1:
        shape = (len(data.columns) if data.columns else MADE_UP_FEATURES,)
    is_grouped = are_texts or name == "table" or data.partition == NATURAL
    pools = []
    for part, per_client in (("train", SMOKE_TRAIN), ("test", SMOKE_TEST)):
        size = (
            per_client * clients if are_texts else classes * per_class(classes, per_client, clients)
        )
        rng = numpy_rng(0, f"made up {part}")
        labels = np.arange(size) % classes
        groups = np.arange(size) if are_texts else np.arange(size) // classes
        if are_texts:
            tokens = rng.integers(0, classes, (size, *shape))
            samples = tokens[:, :-1]
            labels = tokens[:, 1:] if name == "text" else labels
        else:
            samples = rng.integers(0, 256, (size, *shape), dtype=np.uint8)
            labels = labels.astype(np.float32) if data.task == "regression" else labels
        pool = SamplePool.of(samples, labels)
        pools.append(replace(pool, groups=groups % clients if is_grouped else None))
    train, test = pools
    names = [str(label) for label in range(classes)]
    group_names = [str(group) for group in range(clients)] if is_grouped else []
    return Source(
        train,
        test,
        names,
        group_names,
        vocabulary=classes if are_texts else 0,
    )


def shape_of(name: str) -> tuple[tuple[int, ...], int] | None:
    """Shape of a sample and number of classes of the source `name`, as far as they are known
    without its data."""
    from fl_lightning.data.vision import RECIPES
    from fl_lightning.data.watch import CLASSES, SHAPE

    if name in RECIPES:
        return RECIPES[name].shape, RECIPES[name].classes
    shapes: dict[str, tuple[tuple[int, ...], int]] = {
        "watch": (SHAPE, CLASSES),
        "digit_pair": ((1, 8, 8), 10),
        "leaf": ((1, 28, 28), 62),
    }
    return shapes.get(name)


def per_class(
    classes: int,
    per_client: int,
    clients: int,
) -> int:
    """Samples of each class that give about `per_client` to each client, and let every client hold
    every class."""
    return max(math.ceil(per_client * clients / classes), clients)
