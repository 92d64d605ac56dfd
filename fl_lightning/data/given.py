"""Data that a script hands over: kept in one file, which a run's configuration names as its source
and reads again."""

import hashlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lightning import LightningDataModule
from numpy import ndarray
from torch.utils.data import DataLoader, Dataset

from fl_lightning.configuration.config import check
from fl_lightning.data import loaders
from fl_lightning.data.arrays import channels_of
from fl_lightning.data.columns import say_merged_samples
from fl_lightning.data.source import Setting
from fl_lightning.foundation.files import write_whole
from fl_lightning.foundation.named import composed

FILE = "given.npz"
LAYOUT = (
    "give (x, y), (x, y, client) or (x, y, client, unit), a Dataset of such samples, or a "
    "LightningDataModule"
)


def keep(
    data: Any,
    folder: Path,
) -> tuple[Path, dict[str, Any]]:
    """Write `data` to a folder in `folder` that is named by its content.

    Args:
        data: (x, y), (x, y, client) or (x, y, client, unit), arrays of one length: x in the layout
            of `.npz` files, y class numbers from 0 or class names, client the names of the clients,
            unit whom a sample is of (as `data.unit_column`); or a Dataset of
            such samples, x as torch has it; or a LightningDataModule.
        folder: where the data of scripts are kept.

    Returns:
        The data's folder, and the settings that a run with these data begins with: source and root,
        and where clients are named the natural partition and their number.

    Raises:
        BadInput: the data are something else, or do not fit together.
    """
    arrays = _arrays(data)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    place = folder / digest.hexdigest()[:16]
    if not (place / FILE).is_file():
        place.mkdir(parents=True, exist_ok=True)
        write_whole(place / FILE, buffer.getvalue())
    settings: dict[str, Any] = {
        "data": {
            "source": "arrays",
            "root": str(place / FILE),
        }
    }
    if "client_train" in arrays:
        settings["data"]["partition"] = "natural"
        settings["federation"] = {"clients": len(np.unique(arrays["client_train"]))}
    return place, settings


def _arrays(data: Any) -> dict[str, ndarray]:
    """What the file holds."""
    setting = Setting("data", type(data).__name__)
    if isinstance(data, LightningDataModule):
        train, test = loaders.parts_of(setting, data)
        parts = {"train": train} if test is None else {"train": train, "test": test}
        return of_samples(setting, data, parts)
    if isinstance(data, Dataset):
        loaders.check_data_set(setting, data)
        return of_samples(setting, data, {"train": loaders.of_data_set(setting, data)})
    is_layout = isinstance(data, tuple | list) and len(data) in (2, 3, 4)
    is_layout = is_layout and not any(isinstance(part, Dataset | DataLoader) for part in data)
    setting.check(is_layout, LAYOUT)
    x, *columns = map(np.asarray, data)
    return _of_columns(setting, {"train": [_x(x), *columns]}, None, None)


def of_samples(
    setting: Setting,
    owner: Any,
    parts: Mapping[str, Sequence[Any]],
) -> dict[str, ndarray]:
    """Returns the arrays of samples by part, as `as_source` takes them.

    Args:
        setting: for messages.
        owner: a module or data set, which may say `class_names` and `vocabulary`.
        parts: samples (x, y), (x, y, client) or (x, y, client, unit) for `train` and `test`.
    """
    columns = {part: _columns(setting, samples) for part, samples in parts.items()}
    names, vocabulary = (getattr(owner, name, None) for name in ("class_names", "vocabulary"))
    return _of_columns(setting, columns, names, vocabulary)


def _of_columns(
    setting: Setting,
    columns: Mapping[str, Sequence[ndarray]],
    class_names: Any,
    vocabulary: Any,
) -> dict[str, ndarray]:
    """Returns x (`raw`: with axes as clients train on them), y, client and unit of each part, and
    where they are known class names and vocabulary."""
    arrays: dict[str, ndarray] = {}
    for part, (x, y, *names) in columns.items():
        lengths = sorted({len(column) for column in columns[part]})
        requirement = f"x, y, client and unit must have one length, not {lengths}"
        check(setting.key, part, len(lengths) == 1, requirement)
        are_tokens = vocabulary and x.dtype.kind in "iu"
        if x.dtype != np.uint8 and not are_tokens:
            say_merged_samples(f"x ({part})", x)
        if x.dtype != np.uint8:
            x = x.astype(np.int64 if are_tokens else np.float32)
        arrays |= {f"x_{part}": x, f"y_{part}": y}
        for kind, values in zip(("client", "unit"), names, strict=False):
            # Whole numbers stay numbers: as text, 10 would come before 2.
            is_number = values.dtype.kind in "iu"
            arrays[f"{kind}_{part}"] = values if is_number else _text(kind, values)
    arrays = _numbered(setting, arrays, class_names) | {"raw": np.ones(1)}
    return arrays | {"vocabulary": np.array(int(vocabulary))} if vocabulary else arrays


def _columns(
    setting: Setting,
    samples: Sequence[Any],
) -> list[ndarray]:
    """Returns x, y, and as far as samples have them client and unit, of all samples."""
    setting.check(bool(samples), f"it has no samples; {LAYOUT}")
    rows = [sample if isinstance(sample, tuple | list) else () for sample in samples]
    shapes = [[np.shape(cell) for cell in row] for row in rows]
    for number, shape in enumerate(shapes):
        fits = shape == shapes[0] and len(shape) in (2, 3, 4)
        setting.check(fits, f"its sample {number} does not fit the others; {LAYOUT}")
    return [np.stack(cells) for cells in zip(*rows, strict=True)]


def _x(x: ndarray) -> ndarray:
    """Arrays in numpy's layout as torch has them: (n, features), or (n, channels, height,
    width)."""
    valid = x.ndim in (2, 3, 4) and x.dtype.kind in "iufcb"
    requirement = (
        "x must hold numbers, (n, features), (n, height, width) or (n, height, width, channels)"
    )
    check("data", f"x of shape {x.shape}, {x.dtype}", valid, requirement)
    valid = x.ndim != 4 or channels_of(x.shape) == "last"
    requirement = (
        "its channels may be first: put them last, or give a Dataset, whose samples have them "
        "first as in torch"
    )
    check("data", f"x of shape {x.shape}", valid, requirement)
    if x.ndim == 4:
        return x.transpose(0, 3, 1, 2)
    return x[:, None] if x.ndim == 3 else x


def _text(column: str, values: ndarray) -> ndarray:
    """Returns names as text; a missing one (None, NaN) is refused, since it would be a name of its
    own."""
    if values.dtype.kind not in "US":
        from pandas import isna

        missing = np.flatnonzero(isna(values))
        problem = f"sample {1 + missing[:1].sum()} has none (None or NaN); every sample needs one"
        check("data", column, not len(missing), problem)
    is_bytes = values.dtype.kind == "S"
    texts = np.char.decode(values, "utf-8") if is_bytes else values.astype(str)
    composed_texts = [composed(text) for text in texts.ravel()]
    return np.array(composed_texts, str).reshape(texts.shape)


def _numbered(
    setting: Setting,
    arrays: Mapping[str, ndarray],
    class_names: Any,
) -> dict[str, ndarray]:
    """Returns the arrays with class numbers in place of names, and `class_names` where they are
    known."""
    labels = {part: y for part, y in arrays.items() if part.startswith("y_")}
    if all(y.dtype.kind in "USO" for y in labels.values()):
        texts = np.concatenate([_text("y", y) for y in labels.values()])
        names, numbers = np.unique(texts, return_inverse=True)
        lengths = [len(y) for y in labels.values()]
        ends = np.cumsum(lengths)[:-1]
        parts = np.split(numbers.astype(np.int64), ends)
        numbered = dict(zip(labels, parts, strict=True))
        return {**arrays, **numbered, "class_names": names}
    numbered = dict(arrays)
    for part, y in labels.items():
        if y.size == len(y):
            y = y.reshape(len(y))
        are_numbers = y.dtype.kind in "iub" and y.ndim == 1
        are_classes = are_numbers and int(y.min(initial=0)) >= 0
        requirement = (
            "y must hold class numbers from 0 or class names (for a regression: data.source table "
            "or arrays)"
        )
        check(setting.key, f"y: {y.dtype}, shape {y.shape}", are_classes, requirement)
        numbered[part] = y.astype(np.int64)
    if class_names is not None:
        numbered["class_names"] = np.array([str(name) for name in class_names])
    return numbered
