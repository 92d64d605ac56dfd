"""Sources by name: reads the data of a source, or synthesises noise in their place."""

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
"""Approximate number of samples of each client in a smoke run."""
MADE_UP_FEATURES = 8
"""Number of features of a synthetic table if `data.columns` names none."""
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
"""Functions of this folder that read sources, by name; any other name is a data set of torchvision
or an import path."""
MADE_UP_TOKENS = 80
"""Number of different tokens of synthetic texts; LEAF's Shakespeare has as many characters."""
TARGETS = ("table", "arrays", "hf")
"""Sources whose labels may be numbers."""
SOURCE_BY_SUFFIX = {".npz": "arrays", **dict.fromkeys(tables.SUFFIXES, "table"), ".parquet": "hf"}
"""Source that reads the file `data.root`, by the file's suffix (`source_name`)."""
ROOTLESS = ("digits", "watch")
"""Sources that read nothing below `data.root`, since their files come with packages."""


def load(
    data: DataConfig,
    clients: int,
    smoke: bool,
) -> tuple[Source, bool]:
    """Load the configured source; return it, and whether it is noise in place of absent data (smoke
    runs only).

    Raises:
        BadInput: the data are absent or malformed, or keys contradict each other.
    """
    name = source_name(data)
    check_name("data.source", name)
    # a public data set may have its files below `data.root`
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
    """Return the name of the source: the source that reads the file `data.root`
    (`SOURCE_BY_SUFFIX`), or `data.source` if `data.root` is no file with such a suffix.

    Raises:
        BadInput: `data.source` is `arrays` or `table`, and the file is for another source.
    """
    suffix = Path(data.root or "").suffix.lower()
    source_of_file = SOURCE_BY_SUFFIX.get(suffix)
    if source_of_file is None or (data.source == "table" and suffix in tables.PANDAS):
        return data.source
    fits = data.source not in ("arrays", "table") or data.source == source_of_file
    problem = f"{data.root} is a file for the source {source_of_file}: name that, or none"
    check("data.source", data.source, fits, problem)
    return source_of_file


def check_name(key: str, name: str) -> None:
    """Raise `BadInput` for `key` if there is no source `name`."""
    if name not in SOURCES and "." not in name:
        close = difflib.get_close_matches(name.lower(), SOURCES, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise BadInput(
            key, name, f"there is no such source: {hint}`fl-train list sources` lists them"
        )


def read(data: DataConfig) -> Source:
    """Read the source `data.source`; unlike `load`, never replace absent data by noise.

    Raises:
        Absent: there are no data (a kind of `BadInput`; `load` makes noise instead in a smoke run).
        BadInput: the data are malformed.
    """
    data = tables.spelled(data)
    path = READERS.get(data.source, "datamodule.load" if "." in data.source else "vision.load")
    module, _, function = path.partition(".")
    # imported here, since scikit-learn and torchvision take seconds to load
    loader: Callable[[DataConfig], Source] = getattr(
        import_module(f"fl_lightning.data.{module}"), function
    )
    return loader(data)


def made_up(
    name: str,
    data: DataConfig,
    clients: int,
) -> Source:
    """Synthesise noise in the shape of the source `name`, for a smoke run.

    Samples of an unknown source are images 3x32x32 of 10 classes; those of a table have as many
    features as `data.columns` names. Texts are random tokens; with the source `text` the labels are
    the next tokens, otherwise each text has a class. There are as many natural groups as clients.
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
    """Return the shape of a sample and the number of classes of a source, if they are known without
    its data; else None."""
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
    """Return how many samples of each class to synthesise so that a client gets about `per_client`
    in all, and each client can have one of every class."""
    return max(math.ceil(per_client * clients / classes), clients)
