"""The user's own LightningDataModule, whose data sets give (x, y), or (x, y, client) for natural
clients."""

import inspect
from dataclasses import replace
from typing import Any

import numpy as np

from fl_lightning.configuration.components import Component
from fl_lightning.configuration.config import DataConfig, check
from fl_lightning.data import loaders
from fl_lightning.data.columns import say_merged_samples
from fl_lightning.data.source import Pool, Source, check_class_names, source_of
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.named import composed

LAYOUT = (
    "a data set of known length whose samples are (x, y) or (x, y, client): tensors, a class from "
    "0, a name"
)


def load(data: DataConfig) -> Source:
    """The samples that `train_dataloader()` and, where there is one, `test_dataloader()` can yield.

    x: float or uint8 (channels, height, width), (channels, samples) or (features), or int64
        (length): tokens, of which
    the module's attribute `vocabulary` says how many there are. Loaders' own batches and order are
    not used (`data.loaders`). `root` is passed to a module that takes it.

    Raises:
        BadInput: no such class, it fails, or its samples do not fit together.
    """
    from lightning import LightningDataModule

    name = data.source
    root = data.root
    try:
        cls = Component(name).load()
    except (ImportError, AttributeError) as error:
        raise BadInput("data.source", name, f"it cannot be imported ({error})") from error
    valid = inspect.isclass(cls) and issubclass(cls, LightningDataModule)
    check("data.source", name, valid, "an import path must be that of a LightningDataModule")
    try:
        module = cls(root=root) if "root" in inspect.signature(cls).parameters else cls()
        train, test = loaders.parts_of(
            loaders.Owner("data.source", name), module, reads_test=data.reads_test
        )
    except BadInput:
        raise
    except Exception as error:  # whatever a user's class raises
        line = (str(error) or type(error).__name__).splitlines()[0]
        raise BadInput(
            "data.source", name, f"its training and test data cannot be read: {line}"
        ) from error
    return _source(data, module, train, test)


def _source(
    data: DataConfig,
    module: Any,
    train: list[Any],
    test: list[Any] | None,
) -> Source:
    name = data.source
    names_here = {
        _client(sample) for sample in train if isinstance(sample, tuple | list) and len(sample) == 3
    }
    numbers = all(client.isdecimal() for client in names_here)
    # numbers by size: 2 before 10
    clients = sorted(names_here, key=lambda client: (int(client) if numbers else 0, client))
    pools = [_pool(name, part, clients) for part in (train, test) if part is not None]
    firsts = [pool.read(np.arange(1)) for pool in pools]
    valid = firsts[0].shape == firsts[-1].shape
    check("data.source", name, valid, "its training and test samples differ in shape")
    classes = 1 + max(int(pool.labels.max()) for pool in pools)
    names = list(
        getattr(
            module,
            "class_names",
            map(str, range(classes)),
        )
    )
    names = [composed(each) if isinstance(each, str) else each for each in names]
    check_class_names("data.source", name, names, classes)
    vocabulary = int(getattr(module, "vocabulary", 0))
    counted = firsts[0].dtype != np.int64 or vocabulary > 0
    check(
        "data.source",
        name,
        counted,
        "whole numbers are tokens: its attribute vocabulary must count them",
    )
    source = source_of(
        data,
        pools[0],
        None if test is None else pools[1],
        names,
        clients,
    )
    return replace(source, vocabulary=vocabulary)


def _pool(
    name: str,
    samples: list[Any],
    clients: list[str],
) -> Pool:
    check("data.source", name, bool(samples), f"it has no samples; it must give {LAYOUT}")
    first: tuple[int, ...] | None = None
    for number, sample in enumerate(samples):
        valid = (
            isinstance(sample, tuple | list)
            and len(sample) == (3 if clients else 2)
            and _is_class(sample[1])
        )
        first = np.asarray(sample[0]).shape if valid and first is None else first
        valid = valid and np.asarray(sample[0]).shape == first
        check(
            "data.source",
            name,
            valid,
            f"its sample {number} does not fit the others; it must give {LAYOUT}",
        )
        numbered = not clients or _client(sample) in clients
        check(
            "data.source",
            name,
            numbered,
            f"its sample {number} for tests is of a client without training data",
        )
    x = np.stack([np.asarray(sample[0]) for sample in samples])
    check(
        "data.source",
        name,
        x.dtype.kind in "iufb",
        f"its samples hold {x.dtype}; it must give {LAYOUT}",
    )
    exact = x
    x = x if x.dtype in (np.uint8, np.int64) else x.astype(np.float32)
    finite = np.isfinite(x.reshape(len(x), -1)).all(1)
    check(
        "data.source",
        name,
        finite.all(),
        f"its sample {finite.argmin()} holds values that are not finite",
    )
    if x.dtype != np.int64:
        say_merged_samples("its samples", exact)
    places = {client: place for place, client in enumerate(clients)}
    groups = (
        np.array([places[_client(sample)] for sample in samples], np.int64) if clients else None
    )
    return Pool(
        np.array([int(sample[1]) for sample in samples], np.int64), lambda index: x[index], groups
    )


def _client(sample: Any) -> str:
    """The name of a sample's client, (x, y, client): text, a whole number, or a tensor of one."""
    plain = np.asarray(sample[2])
    return composed(
        str(plain.item() if plain.size == 1 and plain.dtype.kind in "iu" else sample[2])
    )


def _is_class(label: Any) -> bool:
    """Whether a label is a whole number from 0, and no text or fraction that would be cut down to
    one."""
    number = np.asarray(label)
    return (
        number.size == 1
        and number.dtype.kind in "iufb"
        and float(number) >= 0
        and float(number).is_integer()
    )
