"""The user's own arrays, in one `.npz` file."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast
from zipfile import is_zipfile

import numpy as np

from fl_lightning.configuration.config import DataConfig, check
from fl_lightning.data.columns import say_merged, say_merged_samples
from fl_lightning.data.source import Absent, Pool, Source, check_class_names, source_of
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.metric import Task
from fl_lightning.foundation.named import composed

Layout = Literal["first", "last", "unsaid", "raw"]
KEYS = ("x_train", "y_train", "x_test", "y_test")
SHAPED = ("channels", "raw")
"""What a file may hold to say how its samples lie: `channels` (first, last), or `raw`: as clients
train on them."""
FEW = 4
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
    task = data.task
    if root is None or not root.lower().endswith(".npz"):
        raise Absent(
            "data.root", root, f"the source arrays wants the path of an .npz file: {LAYOUT}"
        )
    parts = ["train", "test"] if data.reads_test else ["train"]
    names = [f"{letter}_{part}" for part in parts for letter in ("x", "y", "client")]
    names += [f"unit_{part}" for part in parts]
    names += ["class_names", "client_names", "vocabulary", *SHAPED]
    with _opened("data.root", root) as archive:
        missing = [key for key in KEYS if key not in archive]
        arrays = _arrays(archive, names)
    raw = "raw" in arrays
    whole = raw and missing == ["x_test", "y_test"]
    check(
        "data.root",
        root,
        whole or not missing,
        f"it lacks {', '.join(missing)}; it must hold {LAYOUT}",
    )
    parts = ["train"] if whole else parts
    layout = _layout("data.root", root, arrays)
    pools = {
        p: _pool("data.root", root, p, arrays[f"x_{p}"], arrays[f"y_{p}"], task, layout)
        for p in parts
    }
    pools, group_names = _grouped(root, _with_units(root, pools, arrays), arrays)
    ours, theirs = (arrays[f"x_{part}"].shape[1:] for part in ("train", parts[-1]))
    check(
        "data.root", root, ours == theirs, f"x_train and x_test differ in shape: {ours}, {theirs}"
    )
    class_names: list[Any] = []
    if task == "classification":
        classes = 1 + max(int(pool.labels.max()) for pool in pools.values())
        samples = len(pools["train"].labels)
        problem = f"label {classes - 1} is above {samples} training samples: number from 0"
        check("data.root", root, classes <= samples, problem)
        class_names = (
            arrays["class_names"].tolist()
            if "class_names" in arrays
            else [str(k) for k in range(classes)]
        )
        class_names = [composed(name) if isinstance(name, str) else name for name in class_names]
        check_class_names("data.root", root, class_names, classes)
    source = source_of(
        data, pools["train"], None if whole else pools[parts[-1]], class_names, group_names
    )
    return replace(source, vocabulary=int(arrays.get("vocabulary", 0)))


def _grouped(
    root: str, pools: dict[str, Pool], arrays: dict[str, np.ndarray]
) -> tuple[dict[str, Pool], list[str]]:
    """The pools with each sample's client, and the clients' names: `client_names`, or the values in
    order."""
    if "client_train" not in arrays:
        return pools, []
    clients = _clients(arrays["client_train"])
    values: list[object] = sorted({*clients}, key=lambda v: (isinstance(v, str), v))
    if "client_names" in arrays:
        values = list(range(arrays["client_names"].size))
    places = {value: place for place, value in enumerate(values)}
    grouped = {}
    for part, pool in pools.items():
        own = _clients(arrays.get(f"client_{part}", np.zeros(0)))
        valid = len(own) == len(pool.labels)
        check(
            "data.root",
            root,
            valid,
            f"client_{part} holds {len(own)} clients of {len(pool.labels)} samples",
        )
        stranger = next((value for value in own if value not in places), None)
        check(
            "data.root",
            root,
            stranger is None,
            f"client_{part} holds {stranger!r}, which no name or training sample has",
        )
        grouped[part] = replace(pool, groups=np.array([places[value] for value in own], np.int64))
    names = (
        arrays["client_names"].ravel().tolist()
        if "client_names" in arrays
        else [str(value) for value in values]
    )
    stranger = next((name for name in names if not isinstance(name, str)), None)
    check("data.root", root, stranger is None, f"client_names holds {stranger!r}, which is no text")
    return grouped, [composed(name) for name in names]


def _with_units(
    root: str, pools: dict[str, Pool], arrays: dict[str, np.ndarray]
) -> dict[str, Pool]:
    """The pools with the unit of each sample, where the file has `unit_train`."""
    if "unit_train" not in arrays:
        return pools
    columns = {part: arrays.get(f"unit_{part}", np.zeros(0)).ravel() for part in pools}
    for part, pool in pools.items():
        size = len(columns[part])
        requirement = f"unit_{part} holds {size} units of {len(pool.labels)} samples"
        check("data.root", root, size == len(pool.labels), requirement)
    numbers = np.unique(np.concatenate([*columns.values()]), return_inverse=True)[1]
    ends = np.cumsum([len(column) for column in columns.values()])[:-1]
    each = zip(pools.items(), np.split(numbers, ends), strict=True)
    return {part: replace(pool, units=own) for (part, pool), own in each}


def _clients(column: np.ndarray) -> list[Any]:
    """The client of each sample: its number, or its name."""
    return [
        composed(value) if isinstance(value, str) else value for value in column.ravel().tolist()
    ]


def public(key: str, path: str) -> Pool:
    """The samples without labels in the file at `path`: x_public, else x_train; `BadInput` for
    `key`."""
    with _opened(key, path) as archive:
        samples = next((archive[name] for name in ("x_public", "x_train") if name in archive), None)
        layout = _layout(key, path, _arrays(archive, ["channels"]))
    if samples is None:
        raise BadInput(key, path, "it must hold x_public or x_train")
    check(
        key,
        path,
        len(samples.shape) > 0 and len(samples) > 0,
        "it holds no samples",
    )
    return _pool(
        key,
        path,
        "public",
        samples,
        np.zeros(len(samples), np.int64),
        layout=layout,
    )


def newcomer(root: str, task: Task) -> dict[str, tuple[np.ndarray, np.ndarray | None]]:
    """A new client's `train` samples and labels (None: unlabelled), and its `test` samples where
    the file has any."""
    with _opened("data", root) as archive:
        arrays = _arrays(archive, [*KEYS, "channels"])
    layout = _layout("data", root, arrays)
    if "x_train" not in arrays or ("x_test" in arrays) != ("y_test" in arrays):
        raise BadInput(
            "data",
            root,
            "it must hold x_train, y_train where there are labels, and x_test with y_test",
        )
    parts: dict[str, tuple[np.ndarray, np.ndarray | None]] = {}
    for part in ("train", "test"):
        if f"x_{part}" not in arrays:
            continue
        x = arrays[f"x_{part}"]
        y = arrays.get(f"y_{part}")
        pool = _pool(
            "data", root, part, x, np.zeros(len(x), np.int64) if y is None else y, task, layout
        )
        parts[part] = (pool.read_all(), None if y is None else pool.labels)
    return parts


def site(
    root: str, task: Task
) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], np.ndarray | None]:
    """One site's samples and labels by part (`train`, `validation` and `test`, of which the last
    two may be empty), and the public samples where the file has any. A file with the key `raw` has
    its axes as clients train on them."""
    names = [f"{letter}_{part}" for part in ("train", "validation", "test") for letter in "xy"]
    with _opened("data", root) as archive:
        content = _arrays(archive, [*names, "x_public", *SHAPED])
    layout = _layout("data", root, content)
    public = content.get("x_public")

    def read(
        part: str,
        x: np.ndarray,
        y: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        pool = _pool("data", root, part, x, y, task, layout)
        return pool.read_all(), pool.labels

    parts: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for part in ("train", "validation", "test"):
        lacks = (f"x_{part}" in content) != (f"y_{part}" in content)
        check("data", root, not lacks, f"it must hold x_{part} and y_{part} together")
        if len(content.get(f"x_{part}", ())):
            parts[part] = read(part, content[f"x_{part}"], content[f"y_{part}"])
    check("data", root, bool(parts) or public is not None, "it must hold x_train and y_train")
    some = next(iter(parts.values()), None)
    if some is not None:
        nothing = some[0][:0], some[1][:0]
        parts = {part: parts.get(part, nothing) for part in ("train", "validation", "test")}
    if public is None:
        return parts, None
    return parts, read(
        "public", public, np.zeros(len(public), np.float32 if task == "regression" else np.int64)
    )[0]


@contextlib.contextmanager
def _opened(key: str, root: str) -> Iterator[Mapping[str, np.ndarray]]:
    """The archive at `root`; `Absent` for `key` if there is none, `BadInput` if it is broken where
    it is read."""
    path = Path(root).expanduser()
    if not path.is_file():
        raise Absent(key, root, "there is no such file")
    check(
        key,
        root,
        is_zipfile(path),
        "it cannot be read: it is no .npz archive, which numpy.savez writes",
    )
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            yield archive
    # numpy raises half a dozen types for files that are no archive, are cut short or hold objects.
    except Exception as error:
        reason = str(error).split("\n")[0]
        raise BadInput(key, root, f"it cannot be read as an .npz archive ({reason})") from error


def _arrays(archive: Mapping[str, np.ndarray], names: Iterable[str]) -> dict[str, np.ndarray]:
    """Those of `names` that it holds."""
    return {name: archive[name] for name in names if name in archive}


def _layout(
    key: str,
    root: str,
    arrays: Mapping[str, np.ndarray],
) -> Layout:
    """How the samples of a file lie: what it says itself, else `unsaid`."""
    if "raw" in arrays:
        return "raw"
    layout = str(arrays.get("channels", "unsaid"))
    valid = "channels" not in arrays or layout in ("first", "last")
    check(key, root, valid, f"channels holds {layout!r}, and must be first or last")
    return cast(Layout, layout)


def _pool(
    key: str,
    root: str,
    part: str,
    x: np.ndarray,
    y: np.ndarray,
    task: Task = "classification",
    layout: Layout = "unsaid",
) -> Pool:
    check(
        key,
        root,
        len(x.shape) > 0 and len(y.shape) > 0 and len(x) > 0,
        f"x_{part} or y_{part} is empty",
    )
    y = y.reshape(len(y)) if y.shape == (len(y), 1) else y
    check(
        key,
        root,
        y.shape == (len(x),),
        f"x_{part} holds {len(x)} samples but y_{part} has the shape {y.shape}",
    )
    if task == "regression":
        if not np.issubdtype(y.dtype, np.number) or np.iscomplexobj(y) or not np.isfinite(y).all():
            raise BadInput(key, root, f"y_{part} must hold finite numbers")
        say_merged([f"y_{part}"], y[:, None])
        y = y.astype(np.float32)
    elif not np.issubdtype(y.dtype, np.integer):
        raise BadInput(
            key, root, f"y_{part} holds {y.dtype} but must hold whole numbers (classes from 0)"
        )
    elif y.min() < 0:
        raise BadInput(
            key, root, f"y_{part} holds the negative label {y.min()} (sample {_first(y < 0)})"
        )
    if not (np.issubdtype(x.dtype, np.number) or x.dtype == np.bool_) or np.iscomplexobj(x):
        raise BadInput(key, root, f"x_{part} holds {x.dtype} but must hold numbers")
    raw = layout == "raw"
    if x.dtype == np.uint8 or (raw and x.dtype == np.int64):
        return Pool.of(x if raw else _channels_first(key, root, part, x, layout), y)
    stored = x.astype(np.float32)
    if not (finite := np.isfinite(stored)).all():
        raise BadInput(
            key, root, f"x_{part} holds values that are not finite (sample {_first(~finite)})"
        )
    say_merged_samples(f"x_{part}", x)
    return Pool.of(
        stored
        if raw
        else _channels_first(
            key,
            root,
            part,
            stored,
            layout,
        ),
        y,
    )


def _first(bad: np.ndarray) -> int:
    """The number, from 1, of the first sample of which something is so."""
    return 1 + int(np.argmax(bad.reshape(len(bad), -1).any(axis=1)))


def _channels_first(
    key: str,
    root: str,
    part: str,
    x: np.ndarray,
    layout: Layout,
) -> np.ndarray:
    if x.ndim == 2:
        return x
    if x.ndim == 3:
        return x[:, None]
    check(key, root, x.ndim == 4, f"x_{part} has the shape {x.shape}; it must be {LAYOUT}")
    where = channels_of(x.shape) if layout == "unsaid" else layout
    if where == "unsaid":
        problem = f"x_{part} of shape {x.shape} may have its channels first or last"
        raise BadInput(
            key,
            root,
            f"{problem}: say so in the file, numpy.savez(..., channels='first') or 'last'",
        )
    if where == "first" and layout == "unsaid":
        problem = f"x_{part} of shape {x.shape} seems to have its channels first"
        raise BadInput(
            key,
            root,
            f"{problem}: put them last, or say so in the file, numpy.savez(..., channels='first')",
        )
    return x if where == "first" else x.transpose(0, 3, 1, 2)


def channels_of(shape: tuple[int, ...]) -> Layout:
    """Where images (n, a, b, c) have their channels, as far as their shape tells: on the side with
    at most four, else where one side of a square is not."""
    _, a, b, c = shape
    if (a <= FEW) != (c <= FEW):
        return "first" if a <= FEW else "last"
    if c <= FEW:
        return "last"
    if (a == b) != (b == c):
        return "last" if a == b else "first"
    return "unsaid"
