"""Data passed from Python: stored in a file that a run's configuration names as its source."""

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
from fl_lightning.data.arrays import channel_axis
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
    """Store `data` in a folder that is named by a digest of its content.

    Args:
        data: (x, y), (x, y, client) or (x, y, client, unit), arrays of one length; or a Dataset of
            such samples; or a LightningDataModule. x has the layout of `.npz` files, in a Dataset
            that of torch; y holds class numbers from 0, or class names; client names each sample's
            client; unit is as in `data.unit_column`.
        folder: parent of the new folder.

    Returns:
        The new folder, and the settings of a run on these data: source and root, and, if samples
            name clients, the natural partition and the number of clients.

    Raises:
        BadInput: `data` is something else, or its parts do not fit together.
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
    """Convert data into the arrays of the file."""
    setting = Setting("data", type(data).__name__)
    if isinstance(data, LightningDataModule):
        train, test = loaders.samples_of_module(setting, data)
        parts = {"train": train} if test is None else {"train": train, "test": test}
        return of_samples(setting, data, parts)
    if isinstance(data, Dataset):
        loaders.check_data_set(setting, data)
        return of_samples(setting, data, {"train": loaders.samples_of_data_set(setting, data)})
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
    """Convert samples into arrays, as `arrays.as_source` takes them.

    Args:
        setting: the key and value that errors name.
        owner: the module or data set of the samples; its attributes `class_names` and `vocabulary`
            are used if it has them.
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
    """Convert each part's columns (x, y, client, unit) into named arrays, with class names and
    vocabulary if they are known.

    The key `raw` marks that the samples have the axes of the model's inputs.
    """
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
            # whole numbers stay numbers: as text, 10 would come before 2
            is_number = values.dtype.kind in "iu"
            arrays[f"{kind}_{part}"] = values if is_number else _text(kind, values)
    arrays = _numbered(setting, arrays, class_names) | {"raw": np.ones(1)}
    return arrays | {"vocabulary": np.array(int(vocabulary))} if vocabulary else arrays


def _columns(
    setting: Setting,
    samples: Sequence[Any],
) -> list[ndarray]:
    """Stack samples into columns: x, y, and client and unit if the samples have them."""
    setting.check(bool(samples), f"it has no samples: {LAYOUT}")
    rows = [sample if isinstance(sample, tuple | list) else () for sample in samples]
    shapes = [[np.shape(cell) for cell in row] for row in rows]
    for number, shape in enumerate(shapes):
        fits = shape == shapes[0] and len(shape) in (2, 3, 4)
        setting.check(fits, f"its sample {number} has another form than sample 0: {LAYOUT}")
    return [np.stack(cells) for cells in zip(*rows, strict=True)]


def _x(x: ndarray) -> ndarray:
    """Convert x from numpy's layout to torch's: (n, features), or (n, channels, height, width)."""
    valid = x.ndim in (2, 3, 4) and x.dtype.kind in "iufcb"
    requirement = (
        "x must hold numbers, (n, features), (n, height, width) or (n, height, width, channels)"
    )
    check("data", f"x of shape {x.shape}, {x.dtype}", valid, requirement)
    valid = x.ndim != 4 or channel_axis(x.shape) == "last"
    requirement = (
        "its channels may be first: put them last, or give a Dataset, whose samples have them "
        "first as in torch"
    )
    check("data", f"x of shape {x.shape}", valid, requirement)
    if x.ndim == 4:
        return x.transpose(0, 3, 1, 2)
    return x[:, None] if x.ndim == 3 else x


def _text(column: str, values: ndarray) -> ndarray:
    """Convert names to text; a missing one (None, NaN) is refused, since it would become a name."""
    if values.dtype.kind not in "US":
        from pandas import isna

        missing = np.flatnonzero(isna(values))
        problem = (
            f"sample {1 + missing[:1].sum()} has no {column} (None or NaN): give every sample one"
        )
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
    """Replace class names by class numbers; add `class_names` if they are known."""
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
