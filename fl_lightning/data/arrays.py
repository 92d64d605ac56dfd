"""The user's own arrays, in one `.npz` file."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast
from zipfile import is_zipfile

import numpy as np
from numpy import ndarray

from fl_lightning.configuration.config import DataConfig
from fl_lightning.data.columns import say_merged, say_merged_samples
from fl_lightning.data.source import Absent, SamplePool, Setting, Source, source_of
from fl_lightning.foundation.errors import first_line
from fl_lightning.foundation.metric import Task
from fl_lightning.foundation.named import composed

Layout = Literal["first", "last", "unsaid", "raw"]
KEYS = ("x_train", "y_train", "x_test", "y_test")
SHAPED = ("channels", "raw")
"""What a file may hold to say how its samples lie: `channels` (first, last), or `raw`: as clients
train on them."""
MOST_CHANNELS = 4
"""Channels of a picture, at most: with fewer on one side it is clear where they are."""
LAYOUT = (
    "x_train and x_test of shape (n, height, width), (n, height, width, channels) or (n, "
    "features); "
    "y_train and y_test of shape (n,), class numbers from 0 (for regression: numbers)"
)


def load(data: DataConfig) -> Source:
    """Read x_train, y_train, x_test, y_test; plain vectors give the input shape (features,).

    A file with the key `raw` (data/given.py) has its axes as clients train on them, and may lack a
    test part.
    """
    root = data.root
    if root is None or not root.lower().endswith(".npz"):
        problem = f"the source arrays wants the path of an .npz file: {LAYOUT}"
        raise Absent("data.root", root, problem)
    setting = Setting("data.root", root)
    parts = ["train", "test"] if data.reads_test else ["train"]
    names = [f"{kind}_{part}" for part in parts for kind in ("x", "y", "client", "unit")]
    with _opened(setting) as archive:
        missing = [key for key in KEYS if key not in archive]
        arrays = _arrays(archive, [*names, "class_names", "client_names", "vocabulary", *SHAPED])
    has_test = "raw" not in arrays or missing != ["x_test", "y_test"]
    problem = f"it lacks {', '.join(missing)}; it must hold {LAYOUT}"
    setting.check(not missing or not has_test, problem)
    return as_source(setting, arrays, data, has_test)


def as_source(
    setting: Setting,
    arrays: dict[str, ndarray],
    data: DataConfig,
    has_test: bool,
) -> Source:
    """Returns the source of `arrays`, with the keys of a file.

    Args:
        setting: for messages.
        arrays: of training, and where it is read of the test part.
        data: says what the targets are, and how a test part is drawn.
        has_test: whether there is one, be it unread; else a fifth of the training part is.

    Raises:
        BadInput: the arrays do not fit together.
    """
    layout = _layout(setting, arrays)
    pools = {}
    for part in ("train", "test"):
        if f"x_{part}" in arrays:
            x = arrays[f"x_{part}"]
            y = arrays[f"y_{part}"]
            pools[part] = _pool(setting, part, x, y, data.task, layout)
    pools, group_names = _grouped(setting, _with_units(setting, pools, arrays), arrays)
    shape, *others = [arrays[f"x_{part}"].shape[1:] for part in pools]
    problem = f"x_train and x_test differ in shape: {shape}, {others}"
    setting.check(others in ([], [shape]), problem)
    class_names = _class_names(setting, pools, arrays) if data.task == "classification" else []
    test = pools.get("test", pools["train"]) if has_test else None
    source = source_of(data, pools["train"], test, class_names, group_names)
    return replace(source, vocabulary=int(arrays.get("vocabulary", 0)))


def _class_names(
    setting: Setting,
    pools: Mapping[str, SamplePool],
    arrays: Mapping[str, ndarray],
) -> list[str]:
    """Returns `class_names`, different texts and one for each class; else the classes' numbers."""
    labels = np.concatenate([pool.labels for pool in pools.values()])
    classes = 1 + int(labels.max())
    samples = len(pools["train"].labels)
    problem = f"label {classes - 1} of {samples} training samples: number classes from 0 on"
    setting.check(classes <= samples, problem)
    if "class_names" not in arrays:
        return [str(number) for number in range(classes)]
    names = arrays["class_names"].tolist()
    for name in names:
        problem = f"the class name {name!r} is no text: class_names must hold texts"
        setting.check(isinstance(name, str), problem)
    problem = f"class_names has {len(names)} names for {classes} classes"
    setting.check(len(names) >= classes, problem)
    names = [composed(name) for name in names]
    setting.check(len(set(names)) == len(names), "class_names has a name twice")
    return names


def _grouped(
    setting: Setting,
    pools: dict[str, SamplePool],
    arrays: Mapping[str, ndarray],
) -> tuple[dict[str, SamplePool], list[str]]:
    """The pools with each sample's client, and the clients' names: `client_names`, or the values in
    order."""
    if "client_train" not in arrays:
        return pools, []
    values = sorted(
        set(_clients(arrays, "train")),
        key=lambda value: (isinstance(value, str), value),
    )
    names: list[Any] = [str(value) for value in values]
    if "client_names" in arrays:
        names = arrays["client_names"].ravel().tolist()
        values = list(range(len(names)))
    places = {value: place for place, value in enumerate(values)}
    grouped = {}
    for part, pool in pools.items():
        clients = _clients(arrays, part)
        samples = len(pool.labels)
        problem = f"client_{part} holds {len(clients)} clients of {samples} samples"
        setting.check(len(clients) == samples, problem)
        for client in clients:
            problem = f"client_{part} holds {client!r}, which no name or training sample has"
            setting.check(client in places, problem)
        numbers = np.array([places[client] for client in clients], np.int64)
        grouped[part] = replace(pool, groups=numbers)
    for name in names:
        setting.check(isinstance(name, str), f"client_names holds {name!r}, which is no text")
    return grouped, [composed(name) for name in names]


def _clients(
    arrays: Mapping[str, ndarray],
    part: str,
) -> list[Any]:
    """The client of each sample of a part: its number, or its name."""
    column = arrays.get(f"client_{part}", np.zeros(0))
    values = column.ravel().tolist()
    return [composed(value) if isinstance(value, str) else value for value in values]


def _with_units(
    setting: Setting,
    pools: dict[str, SamplePool],
    arrays: Mapping[str, ndarray],
) -> dict[str, SamplePool]:
    """The pools with the unit of each sample, where the file has `unit_train`."""
    if "unit_train" not in arrays:
        return pools
    columns = [arrays.get(f"unit_{part}", np.zeros(0)).ravel() for part in pools]
    for (part, pool), column in zip(pools.items(), columns, strict=True):
        problem = f"unit_{part} holds {len(column)} units of {len(pool.labels)} samples"
        setting.check(len(column) == len(pool.labels), problem)
    numbers = np.unique(np.concatenate(columns), return_inverse=True)[1]
    ends = np.cumsum([len(column) for column in columns])[:-1]
    parts = np.split(numbers, ends)
    with_units = {}
    for (part, pool), units in zip(pools.items(), parts, strict=True):
        with_units[part] = replace(pool, units=units)
    return with_units


def public(key: str, path: str) -> SamplePool:
    """The samples without labels in the file at `path`: x_public, else x_train; `BadInput` for
    `key`."""
    setting = Setting(key, path)
    with _opened(setting) as archive:
        content = _arrays(archive, ["x_train", "x_public", "channels"])
    samples = content.get("x_public", content.get("x_train"))
    if samples is None:
        raise setting.error("it must hold x_public or x_train")
    setting.check(samples.size > 0, "it holds no samples")
    labels = np.zeros(len(samples), np.int64)
    return _pool(setting, "public", samples, labels, layout=_layout(setting, content))


def newcomer(
    root: str,
    task: Task,
) -> dict[str, tuple[ndarray, ndarray | None]]:
    """A new client's `train` samples and labels (None: unlabelled), and its `test` samples where
    the file has any."""
    setting = Setting("data", root)
    with _opened(setting) as archive:
        arrays = _arrays(archive, [*KEYS, "channels"])
    layout = _layout(setting, arrays)
    has_parts = "x_train" in arrays and ("x_test" in arrays) == ("y_test" in arrays)
    requirement = "it must hold x_train, y_train where there are labels, and x_test with y_test"
    setting.check(has_parts, requirement)
    parts: dict[str, tuple[ndarray, ndarray | None]] = {}
    for part in ("train", "test"):
        if f"x_{part}" in arrays:
            x = arrays[f"x_{part}"]
            y = arrays.get(f"y_{part}")
            labels = np.zeros(len(x), np.int64) if y is None else y
            pool = _pool(setting, part, x, labels, task, layout)
            own_labels = None if y is None else pool.labels
            parts[part] = pool.read_all(), own_labels
    return parts


def site(root: str, task: Task) -> tuple[dict[str, tuple[ndarray, ndarray]], ndarray | None]:
    """One site's samples and labels by part (`train`, `validation` and `test`, of which the last
    two may be empty), and the public samples where the file has any. A file with the key `raw` has
    its axes as clients train on them."""
    setting = Setting("data", root)
    names = [f"{kind}_{part}" for part in ("train", "validation", "test") for kind in "xy"]
    with _opened(setting) as archive:
        content = _arrays(archive, [*names, "x_public", *SHAPED])
    layout = _layout(setting, content)
    public = content.get("x_public")
    parts: dict[str, tuple[ndarray, ndarray]] = {}
    for part in ("train", "validation", "test"):
        has_both = (f"x_{part}" in content) == (f"y_{part}" in content)
        setting.check(has_both, f"it must hold x_{part} and y_{part} together")
        x = content.get(f"x_{part}", np.zeros(0))
        if len(x):
            pool = _pool(
                setting,
                part,
                x,
                content[f"y_{part}"],
                task,
                layout,
            )
            parts[part] = pool.read_all(), pool.labels
    setting.check(bool(parts) or public is not None, "it must hold x_train and y_train")
    for x, y in [*parts.values()][:1]:
        nothing = x[:0], y[:0]
        parts = {part: parts.get(part, nothing) for part in ("train", "validation", "test")}
    if public is None:
        return parts, None
    kind = np.float32 if task == "regression" else np.int64
    labels = np.zeros(len(public), kind)
    pool = _pool(setting, "public", public, labels, task, layout)
    return parts, pool.read_all()


@contextlib.contextmanager
def _opened(setting: Setting) -> Iterator[Mapping[str, ndarray]]:
    """The archive that the setting names; `Absent` if there is none, `BadInput` if it is broken
    where it is read."""
    path = Path(str(setting.value)).expanduser()
    if not path.is_file():
        raise Absent(setting.key, setting.value, "there is no such file")
    requirement = "it cannot be read: it is no .npz archive, which numpy.savez writes"
    setting.check(is_zipfile(path), requirement)
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            yield archive
    # numpy raises half a dozen types for files that are no archive, are cut short or hold objects.
    except Exception as error:
        problem = f"it cannot be read as an .npz archive ({first_line(error)})"
        raise setting.error(problem) from error


def _arrays(
    archive: Mapping[str, ndarray],
    names: Iterable[str],
) -> dict[str, ndarray]:
    """Those of `names` that it holds."""
    return {name: archive[name] for name in names if name in archive}


def _layout(
    setting: Setting,
    arrays: Mapping[str, ndarray],
) -> Layout:
    """How the samples of a file lie: what it says itself, else `unsaid`."""
    if "raw" in arrays:
        return "raw"
    if "channels" not in arrays:
        return "unsaid"
    layout = str(arrays["channels"])
    problem = f"channels holds {layout!r}, and must be first or last"
    setting.check(layout in ("first", "last"), problem)
    return cast(Layout, layout)


def _pool(
    setting: Setting,
    part: str,
    x: ndarray,
    y: ndarray,
    task: Task = "classification",
    layout: Layout = "unsaid",
) -> SamplePool:
    """The samples of a part, checked, with their channels first."""
    is_filled = min(x.ndim, y.ndim, x.size, y.size) > 0
    setting.check(is_filled, f"x_{part} or y_{part} is empty")
    if y.shape == (len(y), 1):
        y = y[:, 0]
    problem = f"x_{part} holds {len(x)} samples but y_{part} has the shape {y.shape}"
    setting.check(y.shape == (len(x),), problem)
    if task == "regression":
        are_numbers = y.dtype.kind in "iuf" and bool(np.isfinite(y).all())
        setting.check(are_numbers, f"y_{part} must hold finite numbers")
        say_merged([f"y_{part}"], y[:, None])
        y = y.astype(np.float32)
    else:
        problem = f"y_{part} holds {y.dtype} but must hold whole numbers (classes from 0)"
        setting.check(y.dtype.kind in "iu", problem)
        problem = f"y_{part} holds the negative label {y.min()} (sample {1 + (y < 0).argmax()})"
        setting.check(y.min() >= 0, problem)
    setting.check(x.dtype.kind in "iufb", f"x_{part} holds {x.dtype} but must hold numbers")
    is_raw = layout == "raw"
    are_tokens = is_raw and x.dtype == np.int64
    if x.dtype != np.uint8 and not are_tokens:
        stored = x.astype(np.float32)
        rows = stored.reshape(len(x), -1)
        is_finite = np.isfinite(rows).all(1)
        first = 1 + is_finite.argmin()
        problem = f"x_{part} holds values that are not finite (sample {first})"
        setting.check(bool(is_finite.all()), problem)
        say_merged_samples(f"x_{part}", x)
        x = stored
    if not is_raw:
        x = _channels_first(setting, part, x, layout)
    return SamplePool.of(x, y)


def _channels_first(
    setting: Setting,
    part: str,
    x: ndarray,
    layout: Layout,
) -> ndarray:
    if x.ndim == 2:
        return x
    if x.ndim == 3:
        return x[:, None]
    setting.check(x.ndim == 4, f"x_{part} has the shape {x.shape}; it must be {LAYOUT}")
    place = channels_of(x.shape) if layout == "unsaid" else layout
    shown = f"x_{part} of shape {x.shape}"
    remedy = "say so in the file, numpy.savez(..., channels='first')"
    problem = f"{shown} may have its channels first or last: {remedy} or 'last'"
    setting.check(place != "unsaid", problem)
    problem = f"{shown} seems to have its channels first: put them last, or {remedy}"
    setting.check(place == "last" or layout != "unsaid", problem)
    return x if place == "first" else x.transpose(0, 3, 1, 2)


def channels_of(shape: tuple[int, ...]) -> Layout:
    """Where images (n, a, b, c) have their channels, as far as their shape tells: on the side with
    at most four, else where one side of a square is not."""
    _, a, b, c = shape
    if (a <= MOST_CHANNELS) != (c <= MOST_CHANNELS):
        return "first" if a <= MOST_CHANNELS else "last"
    if c <= MOST_CHANNELS:
        return "last"
    if (a == b) != (b == c):
        return "last" if a == b else "first"
    return "unsaid"
