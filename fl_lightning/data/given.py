"""Data that a script hands over: kept in one file, which a run's configuration names as its source
and reads again."""

import hashlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from fl_lightning.configuration.config import check
from fl_lightning.data import loaders
from fl_lightning.data.arrays import channels_of
from fl_lightning.data.columns import say_merged_samples
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.files import write_whole
from fl_lightning.foundation.named import composed

FILE = "given.npz"
LAYOUT = (
    "give (x, y), (x, y, client) or (x, y, client, unit), a Dataset of such samples, or a "
    "LightningDataModule"
)


def keep(data: Any, folder: Path) -> tuple[Path, dict[str, Any]]:
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


def _arrays(data: Any) -> dict[str, np.ndarray]:
    """What the file holds: x (`raw`: with axes as clients train on them), y and client of each
    part, and where they are known class names and vocabulary."""
    names: Any = None
    owner = loaders.Owner("data", type(data).__name__)
    if isinstance(data, LightningDataModule):
        train, test = loaders.parts_of(owner, data)
        columns = {"train": _columns(train)} | ({} if test is None else {"test": _columns(test)})
        names = getattr(data, "class_names", None)
    elif isinstance(data, Dataset):
        loaders.check_data_set(owner, data)
        columns = {"train": _columns(loaders.of_data_set(owner, data))}
    else:
        valid = isinstance(data, tuple | list) and len(data) in (2, 3, 4)
        valid = valid and not any(isinstance(part, Dataset | DataLoader) for part in data)
        check("data", type(data).__name__, valid, LAYOUT)
        columns = {"train": [_x(np.asarray(data[0])), *(np.asarray(each) for each in data[1:])]}
    arrays: dict[str, np.ndarray] = {}
    tokens = getattr(data, "vocabulary", None)
    for part, (x, y, *names_of) in columns.items():
        lengths = sorted({len(each) for each in (x, y, *names_of)})
        requirement = f"x, y, client and unit must have one length, not {lengths}"
        check("data", part, len(lengths) == 1, requirement)
        whole = np.issubdtype(x.dtype, np.integer) and x.dtype != np.uint8
        if x.dtype != np.uint8 and not (whole and tokens):
            say_merged_samples(f"x ({part})", x)
        x = x.astype(np.int64 if whole and tokens else np.float32) if x.dtype != np.uint8 else x
        arrays |= {f"x_{part}": x, f"y_{part}": y}
        # Whole numbers stay numbers: as text, 10 would come before 2.
        arrays |= {
            f"{kind}_{part}": values if values.dtype.kind in "iu" else _text(kind, values)
            for kind, values in zip(("client", "unit"), names_of, strict=False)
        }
    counted = {"vocabulary": np.array(int(tokens))} if tokens else {}
    return _numbered(arrays, names) | {"raw": np.ones(1)} | counted


def _columns(samples: Sequence[Any]) -> list[np.ndarray]:
    """Samples side by side."""
    pairs = all(isinstance(sample, tuple | list) for sample in samples)
    check("data", "samples", pairs, LAYOUT)
    rows = [tuple(sample) for sample in samples]
    widths = {len(row) for row in rows}
    valid = len(widths) == 1 and widths <= {2, 3, 4}
    check("data", f"{len(rows)} samples", valid, LAYOUT)
    try:
        return [
            np.stack([np.asarray(cell) for cell in column]) for column in zip(*rows, strict=True)
        ]
    except ValueError as error:
        raise BadInput(
            "data", f"{len(rows)} samples", f"they do not fit together: {error}"
        ) from None


def _x(x: np.ndarray) -> np.ndarray:
    """Arrays in numpy's layout as torch has them: (n, features), or (n, channels, height,
    width)."""
    valid = x.ndim in (2, 3, 4) and (np.issubdtype(x.dtype, np.number) or x.dtype == bool)
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
    return x if x.ndim == 2 else x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)


def _text(what: str, values: np.ndarray) -> np.ndarray:
    """Names as text; a missing one (None, NaN) is refused, since it would be a name of its own."""
    from pandas import isna

    if len(absent := np.flatnonzero(isna(values))):
        raise BadInput(
            "data", what, f"sample {1 + absent[0]} has none (None or NaN); every sample needs one"
        )
    texts = np.char.decode(values, "utf-8") if values.dtype.kind == "S" else values.astype(str)
    return (
        texts
        if texts.size == 0
        else np.array([composed(text) for text in texts.ravel()]).reshape(texts.shape)
    )


def _numbered(arrays: Mapping[str, np.ndarray], names: Any) -> dict[str, np.ndarray]:
    """The arrays with class numbers in place of names, and `class_names` where they are known."""
    labels = {part: y for part, y in arrays.items() if part.startswith("y_")}
    numbered = dict(arrays)
    if all(y.dtype.kind in "USO" for y in labels.values()):
        every, numbers = np.unique(
            np.concatenate([_text("y", y) for y in labels.values()]), return_inverse=True
        )
        ends = np.cumsum([len(y) for y in labels.values()])[:-1]
        numbered |= dict(
            zip(
                labels,
                np.split(numbers.astype(np.int64), ends),
                strict=True,
            )
        )
        return numbered | {"class_names": every}
    for part, y in labels.items():
        valid = y.dtype.kind in "iub" and y.ndim == 1 and (len(y) == 0 or y.min() >= 0)
        requirement = (
            "y must hold class numbers from 0 or class names (for a regression: data.source table "
            "or arrays)"
        )
        check("data", f"y: {y.dtype}, shape {y.shape}", valid, requirement)
        numbered[part] = y.astype(np.int64)
    return numbered | (
        {"class_names": np.array([str(name) for name in names])} if names is not None else {}
    )
