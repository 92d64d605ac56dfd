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

Layout = Literal["first", "last", "unknown", "raw"]
KEYS = ("x_train", "y_train", "x_test", "y_test")
SHAPED = ("channels", "raw")
"""Keys that say how the samples of a file are laid out: `channels` (first or last), or `raw`, which
marks a file whose samples need no conversion: their axes are those of the model's inputs."""
MOST_CHANNELS = 4
"""Largest number of channels of an image; a longer axis is height or width."""
LAYOUT = (
    "x_train and x_test of shape (n, height, width), (n, height, width, channels) or (n, "
    "features); "
    "y_train and y_test of shape (n,), class numbers from 0 (for regression: numbers)"
)


def load(data: DataConfig) -> Source:
    """Read a user's `.npz` file with x_train, y_train, x_test and y_test.

    Samples that are vectors keep the shape (features,). The key `raw` marks a file into which
    data/given.py has stored data passed from Python: the axes of its samples are already in the
    order that models expect, and it may have no test part.
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
    """Build a source from arrays that are named as in an `.npz` file.

    Args:
        setting: the key and value that errors name.
        arrays: the training arrays, and the test arrays if they were read.
        data: tells what the targets are, and how a test part is drawn.
        has_test: whether the data have a test part, even if it was not read; if not, a fifth of the
            training samples becomes the test part.

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
    shape, *other_shapes = [arrays[f"x_{part}"].shape[1:] for part in pools]
    problem = f"x_train and x_test must have samples of one shape, not {shape} and {other_shapes}"
    setting.check(other_shapes in ([], [shape]), problem)
    class_names = _class_names(setting, pools, arrays) if data.task == "classification" else []
    test = pools.get("test", pools["train"]) if has_test else None
    source = source_of(data, pools["train"], test, class_names, group_names)
    return replace(source, vocabulary=int(arrays.get("vocabulary", 0)))


def _class_names(
    setting: Setting,
    pools: Mapping[str, SamplePool],
    arrays: Mapping[str, ndarray],
) -> list[str]:
    """Return `class_names`, after checking that they are different texts and at least one for each
    class; without them, the numbers of the classes."""
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
    setting.check(len(set(names)) == len(names), "class_names holds a name twice: rename one")
    return names


def _grouped(
    setting: Setting,
    pools: dict[str, SamplePool],
    arrays: Mapping[str, ndarray],
) -> tuple[dict[str, SamplePool], list[str]]:
    """Return the pools with the client of each sample, and the clients' names: `client_names`, or
    the sorted values of the client arrays."""
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
            problem = f"client_{part} holds {client!r}, which has no name or training sample"
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
    """Return the client of each sample of a part: a number, or a name."""
    column = arrays.get(f"client_{part}", np.zeros(0))
    values = column.ravel().tolist()
    return [composed(value) if isinstance(value, str) else value for value in values]


def _with_units(
    setting: Setting,
    pools: dict[str, SamplePool],
    arrays: Mapping[str, ndarray],
) -> dict[str, SamplePool]:
    """Return the pools with the unit of each sample, if the file has `unit_train`."""
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
    """Read the public samples in the file at `path`: its array x_public, or x_train if it has none.

    Raises:
        BadInput: the file is absent, malformed or empty; the error names `key`.
    """
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
    """Read a new client's `.npz` file.

    Returns the samples and labels of `train`, and of `test` if the file has it; the labels of
    `train` are None if it has none.

    Args:
        root: path of the file.
        task: task of the run; tells whether labels are classes or numbers.
    """
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
    """Read the `.npz` file of one site of a deployment.

    Returns samples and labels of `train`, `validation` and `test`, of which the last two may be
    empty, and the public samples (None without them). The key `raw` marks a file whose samples have
    their axes already in the order that models expect.

    Args:
        root: path of the file.
        task: task of the run; tells whether labels are classes or numbers.
    """
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
    setting.check(
        bool(parts) or public is not None, "it must hold x_train and y_train, or x_public"
    )
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
    """Open the archive that `setting` names; raise `Absent` without the file, `BadInput` if it is
    broken."""
    path = Path(str(setting.value)).expanduser()
    if not path.is_file():
        raise Absent(setting.key, setting.value, "there is no such file")
    requirement = "it is no .npz archive: write it with numpy.savez"
    setting.check(is_zipfile(path), requirement)
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            yield archive
    # numpy raises many types for files that are no archive, are cut short or hold objects
    except Exception as error:
        problem = f"it cannot be read as an .npz archive ({first_line(error)})"
        raise setting.error(problem) from error


def _arrays(
    archive: Mapping[str, ndarray],
    names: Iterable[str],
) -> dict[str, ndarray]:
    """Return the arrays of these names that the archive holds."""
    return {name: archive[name] for name in names if name in archive}


def _layout(
    setting: Setting,
    arrays: Mapping[str, ndarray],
) -> Layout:
    """Return the layout that the file declares; `unknown` if it declares none."""
    if "raw" in arrays:
        return "raw"
    if "channels" not in arrays:
        return "unknown"
    layout = str(arrays["channels"])
    problem = f"its array channels holds {layout!r}: it must hold first or last"
    setting.check(layout in ("first", "last"), problem)
    return cast(Layout, layout)


def _pool(
    setting: Setting,
    part: str,
    x: ndarray,
    y: ndarray,
    task: Task = "classification",
    layout: Layout = "unknown",
) -> SamplePool:
    """Check the samples of a part; return them as a pool, with channels first."""
    is_filled = min(x.ndim, y.ndim, x.size, y.size) > 0
    setting.check(is_filled, f"x_{part} or y_{part} is empty: give samples, or leave both out")
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
    place = channel_axis(x.shape) if layout == "unknown" else layout
    shown = f"x_{part} of shape {x.shape}"
    remedy = "say so in the file, numpy.savez(..., channels='first')"
    problem = f"{shown} may have its channels first or last: {remedy} or 'last'"
    setting.check(place != "unknown", problem)
    problem = f"{shown} seems to have its channels first: put them last, or {remedy}"
    setting.check(place == "last" or layout != "unknown", problem)
    return x if place == "first" else x.transpose(0, 3, 1, 2)


def channel_axis(shape: tuple[int, ...]) -> Layout:
    """Guess from the shape (n, a, b, c) of images whether their channels are first (a) or last (c).

    If only one of a and c is at most `MOST_CHANNELS`, it is the channels; if both are, c is. If
    neither is, but two neighbouring axes are equal (a square image), the third is the channels.
    Otherwise returns `unknown`.
    """
    _, a, b, c = shape
    if (a <= MOST_CHANNELS) != (c <= MOST_CHANNELS):
        return "first" if a <= MOST_CHANNELS else "last"
    if c <= MOST_CHANNELS:
        return "last"
    if (a == b) != (b == c):
        return "last" if a == b else "first"
    return "unknown"
