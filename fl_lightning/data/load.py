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
from fl_lightning.data.source import Absent, Pool, Source
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.rng import numpy_rng

SMOKE_TRAIN, SMOKE_TEST = 64, 8
"""Samples per client in a smoke run, about."""
MADE_UP_FEATURES = 8
"""Columns of a table that is not there and of which none are chosen."""
LOADERS = {
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
OVERRIDES = {".npz": "arrays", **dict.fromkeys(tables.SUFFIXES, "table"), ".parquet": "hf"}
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
    name = source_of(data)
    check_name("data.source", name)
    # else public data's
    unread = data.root is not None and name in ROOTLESS and data.public in (None, "held_back")
    files = f"{', '.join(OVERRIDES)}"
    other = f"name a file ({files}), or set data.source (`fl-train list sources`)"
    check("data.root", data.root, not unread, f"the source {name} reads no files: {other}")
    if data.task == "regression" and name not in TARGETS:
        raise BadInput(
            "data.task",
            data.task,
            f"its targets come from the sources {', '.join(TARGETS)}, not {name}",
        )
    try:
        return read(
            replace(
                data,
                source=name,
                download=data.download and not smoke,
            )
        ), False
    except Absent:
        if not smoke:
            raise
        return made_up(name, data, clients), True


def source_of(data: DataConfig) -> str:
    """The name of the source: `data.source`, or that which the file `data.root` means.

    Raises:
        BadInput: both are given, and contradict each other.
    """
    suffix = Path(data.root or "").suffix.lower()
    meant = OVERRIDES.get(suffix)
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
    path = LOADERS.get(data.source, "datamodule.load" if "." in data.source else "vision.load")
    module, _, function = path.partition(".")
    # Imported here: scikit-learn and torchvision take seconds to load.
    loader: Callable[[DataConfig], Source] = getattr(
        import_module(f"fl_lightning.data.{module}"), function
    )
    return loader(data)


def made_up(name: str, data: DataConfig, clients: int) -> Source:
    """Noise with labels, of the shape and classes of the source `name` (else 10 classes of
    3x32x32).

    A table of several columns has as many features. Groups are as many as clients.
    """
    shape, classes = shape_of(name) or ((3, 32, 32), 10)
    if name == "text" or data.tokens is not None:
        return _made_up_text(name, data, clients)
    if name == "table" and len(data.columns or []) != 1:
        shape = (len(data.columns) if data.columns else MADE_UP_FEATURES,)
    pools = []
    grouped = name == "table" or data.partition == NATURAL
    for part, per_client in (("train", SMOKE_TRAIN), ("test", SMOKE_TEST)):
        size = per_class(classes, per_client, clients) * classes
        noise = numpy_rng(0, f"made up {part}").integers(
            0,
            256,
            (size, *shape),
            dtype=np.uint8,
        )
        labels = np.arange(size) % classes
        labels = labels.astype(np.float32) if data.task == "regression" else labels
        groups = np.arange(size) // classes % clients if grouped else None
        pools.append(replace(Pool.of(noise, labels), groups=groups))
    group_names = [str(group) for group in range(clients)] if grouped else []
    return Source(
        pools[0],
        pools[1],
        [str(label) for label in range(classes)],
        group_names,
    )


def _made_up_text(name: str, data: DataConfig, clients: int) -> Source:
    """Tokens at random, of which each has a next one (source text), or the text a class."""
    pools = []
    for part, per_client in (("train", SMOKE_TRAIN), ("test", SMOKE_TEST)):
        size = per_client * clients
        rng = numpy_rng(0, f"made up {part}")
        tokens = rng.integers(
            0,
            MADE_UP_TOKENS,
            (size, data.length + 1),
        )
        labels = tokens[:, 1:] if name == "text" else np.arange(size) % MADE_UP_TOKENS
        pools.append(replace(Pool.of(tokens[:, :-1], labels), groups=np.arange(size) % clients))
    names = [str(token) for token in range(MADE_UP_TOKENS)]
    groups = [str(group) for group in range(clients)]
    return Source(
        pools[0],
        pools[1],
        names,
        groups,
        vocabulary=MADE_UP_TOKENS,
    )


def shape_of(name: str) -> tuple[tuple[int, ...], int] | None:
    """Shape of a sample and number of classes of the source `name`, as far as they are known
    without its data."""
    from fl_lightning.data.vision import RECIPES
    from fl_lightning.data.watch import CLASSES, SHAPE

    shapes: dict[str, tuple[tuple[int, ...], int]] = {
        n: (r.shape, r.classes) for n, r in RECIPES.items()
    }
    shapes |= {
        "watch": (SHAPE, CLASSES),
        "digit_pair": ((1, 8, 8), 10),
        "leaf": ((1, 28, 28), 62),
    }
    return shapes.get(name)


def per_class(classes: int, per_client: int, clients: int) -> int:
    """Samples of each class that give about `per_client` to each client, and let every client hold
    every class."""
    return max(math.ceil(per_client * clients / classes), clients)
