"""Hugging Face data sets on disk: saved by `save_to_disk`, or parquet files. Nothing is asked of a
network."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.configuration.config import FLOAT32, DataConfig, check
from fl_lightning.configuration.tables import columns_of
from fl_lightning.data import text
from fl_lightning.data.columns import say_merged
from fl_lightning.data.images import decoder
from fl_lightning.data.source import Absent, Pool, Source, source_of
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.extras import install_hint
from fl_lightning.foundation.named import composed, entries

LAYOUT = (
    "a folder made by save_to_disk, a .parquet file, or a folder with *.parquet (train* and test*, "
    "or one part)"
)


def load(data: DataConfig) -> Source:
    """Images (3, 32, 32), texts as tokens, or columns of numbers [n, features], with classes and
    natural groups.

    Classes are those of a ClassLabel, else the values of the column in order. Without a part called
    `test` (or `validation`) a fifth is one, the same in every run.

    Raises:
        BadInput: there is nothing (then `Absent`), no such column, a cell that cannot be used (by
            row and column).
    """
    parts = _parts(data.root)
    whole = parts["train"]
    unread = None if data.reads_test else parts.pop("test", None)
    label, group, columns = columns_of(data, whole.column_names)
    for name in (label, *([] if group is None else [group]), *columns):
        if any(name not in part.column_names for part in parts.values()):
            raise BadInput(
                "data.root", data.root, f"its part test has no column {name!r}, which train has"
            )
    regression = data.task == "regression"
    labels, names = _labels(parts, label) if not regression else (_numbers(parts, [label]), [])
    groups, group_names = _numbered(parts, group) if group is not None else (None, [])
    units = None if data.unit_column is None else _numbered(parts, data.unit_column)[0]
    pools = {}
    texts = None
    for name in parts:
        own = labels[name][:, 0] if regression else labels[name]
        pools[name] = Pool(
            own,
            lambda index: index,
            None if groups is None else groups[name],
            units=None if units is None else units[name],
        )
    kind = type(whole.features[columns[0]]).__name__
    if len(columns) == 1 and kind == "Image":
        for name, part in parts.items():
            read = _images(part, name, columns[0], data.root)
            pools[name] = replace(
                pools[name],
                read=read,
                mark=_marks(part, columns[0]),
            )
    elif len(columns) == 1 and getattr(
        whole.features[columns[0]],
        "dtype",
        "",
    ) in (
        "string",
        "large_string",
    ):
        texts = [text or "" for part in parts.values() for text in part[columns[0]]]
        if "test" in pools:  # samples are places among all texts
            pools["test"] = replace(pools["test"], read=lambda index: index + len(whole))
    else:
        numbers = _numbers(parts, columns)
        pools = {
            n: replace(pool, read=Pool.of(numbers[n], pool.labels).read)
            for n, pool in pools.items()
        }
    test = pools["train"] if unread is not None else pools["test"] if "test" in parts else None
    source = source_of(data, pools["train"], test, names, group_names)
    return source if texts is None else text.as_tokens(source, texts, data)


def _images(
    part: Any, name: str, column: str, root: str | None
) -> Callable[[np.ndarray], np.ndarray]:
    def where(index: int) -> str:
        return f"column {column!r} of row {index + 1} of {name}"

    return decoder(lambda index: part[index][column], root, where)


def _marks(part: Any, column: str) -> Callable[[np.ndarray], list[bytes]]:
    """What tells pictures from others: their files' content, or where these lie."""
    import datasets

    files = part.select_columns([column]).cast_column(column, datasets.Image(decode=False))

    def mark(indices: np.ndarray) -> list[bytes]:
        cells = files[indices.tolist()][column]
        return [
            b"" if cell is None else cell["bytes"] or str(cell["path"]).encode() for cell in cells
        ]

    return mark


def _parts(root: str | None) -> dict[str, Any]:
    """`train`, and `test` where there is one."""
    try:
        import datasets
        import pyarrow.parquet as parquet
    except ImportError:
        raise Absent("data.source", "hf", install_hint("datasets")) from None
    path = Path(root or "").expanduser()
    if root is None or not path.exists():
        raise Absent("data.root", root, f"the source hf wants {LAYOUT}")
    try:
        if path.is_file() or (files := entries(path, "*.parquet")):
            by_part = {"train": [path]} if path.is_file() else _by_name(files)
            parts = {
                name: datasets.concatenate_datasets(
                    [datasets.Dataset(parquet.read_table(file)) for file in own]
                )
                for name, own in by_part.items()
            }
        else:
            saved = datasets.load_from_disk(str(path))
            parts = dict(saved) if isinstance(saved, datasets.DatasetDict) else {"train": saved}
    except Exception as error:  # arrow and datasets answer a broken file in a dozen types
        raise BadInput(
            "data.root", root, f"it must be {LAYOUT} ({str(error).splitlines()[0]})"
        ) from error
    other = parts.get("test", parts.get("validation"))
    if "train" not in parts or not len(parts["train"]):
        raise BadInput("data.root", root, f"it has no part called train, but {', '.join(parts)}")
    every = {"train": parts["train"]} | ({} if other is None else {"test": other})
    return {name: _renamed(part) for name, part in every.items()}


def _renamed(part: Any) -> Any:
    """The part with its columns' names composed."""
    names = {name: composed(name) for name in part.column_names if composed(name) != name}
    return part.rename_columns(names) if names else part


def _by_name(files: list[Path]) -> dict[str, list[Path]]:
    named = {
        part: [file for file in files if file.stem.startswith(part)]
        for part in ("train", "test", "validation")
    }
    return {part: own for part, own in named.items() if own} if named["train"] else {"train": files}


def _labels(parts: dict[str, Any], column: str) -> tuple[dict[str, np.ndarray], list[str]]:
    """Class numbers of each part, and the classes."""
    names = _names(parts["train"], column)
    if not names:
        return _numbered(parts, column)
    labels = {}
    for name, cells in _cells(parts, column).items():
        without = next(
            (row for row, cell in enumerate(cells, 1) if cell not in range(len(names))), None
        )
        check("data.label_column", column, without is None, f"row {without} of {name} has no class")
        labels[name] = np.array(cells, np.int64)
    return labels, list(names)


def _names(part: Any, column: str) -> list[str]:
    """Of the classes of a ClassLabel."""
    return [composed(name) for name in getattr(part.features[column], "names", None) or []]


def _cells(parts: dict[str, Any], column: str) -> dict[str, list[Any]]:
    """The cells of each part, NaN as None; a ClassLabel's numbers go by the names of training,
    whatever their order."""
    names = _names(parts["train"], column)
    cells = dict[str, list[Any]]()
    for name, part in parts.items():
        part_names = _names(part, column)
        filled: list[Any] = [None if cell != cell else cell for cell in part[column]]
        cells[name] = [composed(cell) if isinstance(cell, str) else cell for cell in filled]
        for row, cell in enumerate(cells[name] if names and part_names != names else []):
            text = part_names[cell] if part_names and cell is not None and cell >= 0 else cell
            if isinstance(text, str):
                problem = (
                    f"column {column!r} of row {row + 1} of {name} holds {text!r}, which is no "
                    f"class of training data"
                )
                check("data.root", column, text in names, problem)
                cells[name][row] = names.index(text)
    return cells


def _numbered(parts: dict[str, Any], column: str) -> tuple[dict[str, np.ndarray], list[str]]:
    """The place of each cell among the column's values of training, in order (int64 [n]), and these
    values."""
    cells = _cells(parts, column)
    for name, rows in cells.items():
        if None in rows:
            raise BadInput(
                "data.root",
                column,
                f"column {column!r} of row {rows.index(None) + 1} of {name} is empty",
            )
        nested_row = next(
            (row for row, cell in enumerate(rows, 1) if isinstance(cell, list | dict)), None
        )
        if nested_row is not None:
            problem = (
                f"column {column!r} of row {nested_row} of {name} holds several values: "
                f"classes and groups are one each"
            )
            raise BadInput("data.root", column, problem)
    values = sorted(set(cells["train"]))
    places = {value: place for place, value in enumerate(values)}
    for rows in cells.values():
        for row, cell in enumerate(rows, 1):
            if cell not in places:
                problem = (
                    f"column {column!r} of row {row} of test holds {cell!r}, which is nowhere in "
                    f"training data"
                )
                raise BadInput("data.root", column, problem)
    numbers = {
        name: np.array([places[cell] for cell in rows], np.int64) for name, rows in cells.items()
    }
    return numbers, [str(value) for value in values]


def _numbers(parts: dict[str, Any], columns: list[str]) -> dict[str, np.ndarray]:
    """Cells of columns as float32 [n, columns], of lists of numbers as so many features each."""
    features = {}
    widths = dict[str, int]()
    for name, part in parts.items():
        made = []
        for column in columns:
            rows: list[np.ndarray] = []
            for row, cell in enumerate(part[column], 1):
                try:
                    numbers = np.asarray(cell, np.float64).ravel()
                    valid = bool((np.abs(numbers) < FLOAT32).all())
                except (TypeError, ValueError):
                    valid = False
                if not valid:
                    problem = (
                        f"column {column!r} of row {row} of {name} holds {str(cell)[:40]!r}: no "
                        f"numbers, or too many"
                    )
                    raise BadInput("data.columns", column, problem)
                if (width := widths.setdefault(column, len(numbers))) != len(numbers):
                    problem = (
                        f"column {column!r} of row {row} of {name} holds {str(cell)[:40]!r}: "
                        f"{len(numbers)} numbers"
                    )
                    raise BadInput(
                        "data.columns", column, f"{problem}, where row 1 of train has {width}"
                    )
                rows.append(numbers)
            exact = np.array(rows)
            places = (
                [""] if exact.shape[1] == 1 else [f", number {k}" for k in range(exact.shape[1])]
            )
            say_merged([f"column {column!r}{place}" for place in places], exact)
            made.append(exact.astype(np.float32))
        features[name] = np.concatenate(made, axis=1)
    return features
