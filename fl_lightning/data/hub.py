"""Hugging Face data sets on disk: saved by `save_to_disk`, or parquet files. Nothing is
downloaded."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from fl_lightning.configuration.config import FLOAT32, DataConfig, check
from fl_lightning.configuration.tables import columns_of
from fl_lightning.data import text
from fl_lightning.data.columns import say_merged
from fl_lightning.data.images import decoder
from fl_lightning.data.source import Absent, SamplePool, Source, source_of
from fl_lightning.foundation.errors import BadInput, first_line
from fl_lightning.foundation.extras import install_hint
from fl_lightning.foundation.named import composed, entries

LAYOUT = (
    "a folder made by save_to_disk, a .parquet file, or a folder with *.parquet (train* and test*, "
    "or one part)"
)


def load(data: DataConfig) -> Source:
    """Read images (3, 32, 32), texts as tokens, or columns of numbers [n, features], with classes
    and natural groups.

    The classes are those of a ClassLabel, else the sorted values of the column. Without a part
    called `test` (or `validation`), a fifth of the samples becomes the test part, drawn from
    `data.test_seed`.

    Raises:
        Absent: there is no data set.
        BadInput: there is no such column, or a cell cannot be used; the error names row and column.
    """
    parts = _parts(data.root)
    train = parts["train"]
    unread_test = None if data.reads_test else parts.pop("test", None)
    label, group, columns = columns_of(data, train.column_names)
    for name in filter(None, (label, group, *columns)):
        for part in parts.values():
            problem = f"its part test lacks the column {name!r} of train: add it"
            check("data.root", data.root, name in part.column_names, problem)
    names: list[str] = []
    if data.task == "regression":
        targets = _numbers(parts, [label])
        labels = {name: column[:, 0] for name, column in targets.items()}
    else:
        labels, names = _numbered(parts, label, _names(train, label))
    groups: dict[str, ndarray] = {}
    group_names: list[str] = []
    if group is not None:
        groups, group_names = _numbered(parts, group)
    units: dict[str, ndarray] = {}
    if data.unit_column is not None:
        units, _ = _numbered(parts, data.unit_column)
    pools = {
        name: SamplePool(labels[name], lambda index: index, groups.get(name), units=units.get(name))
        for name in parts
    }
    first = train.features[columns[0]]
    texts = None
    if len(columns) == 1 and type(first).__name__ == "Image":
        for name, part in parts.items():
            read = _images(part, name, columns[0], data.root)
            mark = _marks(part, columns[0])
            pools[name] = replace(pools[name], read=read, mark=mark)
    elif len(columns) == 1 and getattr(first, "dtype", "") in ("string", "large_string"):
        texts = [text or "" for part in parts.values() for text in part[columns[0]]]
        if "test" in pools:  # a sample is an index into the texts of both parts
            pools["test"] = replace(pools["test"], read=lambda index: index + len(train))
    else:
        for name, numbers in _numbers(parts, columns).items():
            read = SamplePool.of(numbers, labels[name]).read
            pools[name] = replace(pools[name], read=read)
    test = pools.get("test") if unread_test is None else pools["train"]
    source = source_of(data, pools["train"], test, names, group_names)
    return source if texts is None else text.as_tokens(source, texts, data)


def _images(
    part: Any,
    name: str,
    column: str,
    root: str | None,
) -> Callable[[ndarray], ndarray]:
    def where(index: int) -> str:
        return f"column {column!r} of row {index + 1} of {name}"

    return decoder(lambda index: part[index][column], root, where)


def _marks(
    part: Any,
    column: str,
) -> Callable[[ndarray], list[bytes]]:
    """Return a function that identifies pictures by the content of their files, or by their
    paths."""
    import datasets

    files = part.select_columns([column]).cast_column(column, datasets.Image(decode=False))

    def mark(indices: ndarray) -> list[bytes]:
        cells = files[indices.tolist()][column]
        marks = []
        for cell in cells:
            content = {"bytes": b""} if cell is None else cell
            marks.append(content["bytes"] or str(content.get("path", "")).encode())
        return marks

    return mark


def _parts(root: str | None) -> dict[str, Any]:
    """Read the part `train`, and `test` if the data set has one."""
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
                    [datasets.Dataset(parquet.read_table(file)) for file in files_of_part]
                )
                for name, files_of_part in by_part.items()
            }
        else:
            saved = datasets.load_from_disk(str(path))
            parts = dict(saved) if isinstance(saved, datasets.DatasetDict) else {"train": saved}
    except Exception as error:  # arrow and datasets raise many types for a broken file
        requirement = f"it must be {LAYOUT} ({first_line(error)})"
        raise BadInput("data.root", root, requirement) from error
    test = parts.get("test", parts.get("validation"))
    if "train" not in parts or not len(parts["train"]):
        raise BadInput(
            "data.root", root, f"it has no part train, only {', '.join(parts)}: rename one"
        )
    train_and_test = {"train": parts["train"]}
    if test is not None:
        train_and_test["test"] = test
    return {name: _renamed(part) for name, part in train_and_test.items()}


def _renamed(part: Any) -> Any:
    """Return the part with its column names in composed Unicode form."""
    names = {name: composed(name) for name in part.column_names if composed(name) != name}
    return part.rename_columns(names) if names else part


def _by_name(files: list[Path]) -> dict[str, list[Path]]:
    """Sort files into parts by the beginnings of their names; if none begins with train, all are
    `train`."""
    by_part: dict[str, list[Path]] = {"train": []}
    for file in files:
        for part in ("train", "test", "validation"):
            if file.stem.startswith(part):
                by_part.setdefault(part, []).append(file)
    return by_part if by_part["train"] else {"train": files}


def _names(part: Any, column: str) -> list[str]:
    """Return the class names of a ClassLabel column; empty for other columns."""
    names = getattr(part.features[column], "names", None)
    return [composed(name) for name in names or []]


def _cells(
    part: Any,
    column: str,
    names: list[str],
) -> list[Any]:
    """Return the cells of a column, NaN as None.

    The numbers of a ClassLabel are translated to the order of `names`, the classes of the training
    part.
    """
    cells: list[Any] = [None if cell != cell else cell for cell in part[column]]
    cells = [composed(cell) if isinstance(cell, str) else cell for cell in cells]
    part_names = _names(part, column)
    if not names or part_names == names:
        return cells
    if part_names:
        cells = [part_names[c] if c is not None and c >= 0 else c for c in cells]
    return [names.index(cell) if cell in names else cell for cell in cells]


def _numbered(
    parts: dict[str, Any],
    column: str,
    names: list[str] | None = None,
) -> tuple[dict[str, ndarray], list[str]]:
    """Number the classes or groups of a column.

    Returns int64 [n] for each part, and their names: `names` if a ClassLabel has some, else the
    sorted values of the training part.
    """
    class_names = _names(parts["train"], column)
    cells = {name: _cells(part, column, class_names) for name, part in parts.items()}
    for name, rows in cells.items():
        for row, cell in enumerate(rows, 1):
            where = f"column {column!r} of row {row} of {name}"
            check(
                "data.root",
                column,
                cell is not None,
                f"{where} is empty: fill it, or leave the row out",
            )
            problem = f"{where} holds several values: give one class or group"
            check("data.root", column, not isinstance(cell, list | dict), problem)
    values = list(range(len(names))) if names else sorted(set(cells["train"]))
    places = {value: place for place, value in enumerate(values)}
    for name, rows in cells.items():
        for row, cell in enumerate(rows, 1):
            where = f"column {column!r} of row {row} of {name}"
            problem = (
                f"{where} holds {cell!r}, which no training row does: correct the cell, or move a "
                f"row with it to train"
            )
            check("data.root", column, cell in places, problem)
    numbers = {}
    for name, rows in cells.items():
        numbers[name] = np.array([places[cell] for cell in rows], np.int64)
    return numbers, names or [str(value) for value in values]


def _numbers(
    parts: dict[str, Any],
    columns: list[str],
) -> dict[str, ndarray]:
    """Read columns as float32 [n, features]; a list of numbers becomes as many features."""
    features: dict[str, list[ndarray]] = {name: [] for name in parts}
    for column in columns:
        width = None
        for name, part in parts.items():
            rows: list[ndarray] = []
            for row, cell in enumerate(part[column], 1):
                shown = f"column {column!r} of row {row} of {name} holds {str(cell)[:40]!r}"
                try:
                    numbers = np.asarray(cell, np.float64).ravel()
                    are_numbers = bool((np.abs(numbers) < FLOAT32).all())
                except (TypeError, ValueError):
                    are_numbers = False
                problem = f"{shown}: give numbers that fit 32 bits"
                check("data.columns", column, are_numbers, problem)
                width = len(numbers) if width is None else width
                problem = f"{shown}, {len(numbers)} numbers: give {width}, as in row 1 of train"
                check("data.columns", column, len(numbers) == width, problem)
                rows.append(numbers)
            exact = np.array(rows)
            places = [f", number {k}" for k in range(width or 0)] if width != 1 else [""]
            say_merged([f"column {column!r}{place}" for place in places], exact)
            features[name].append(exact.astype(np.float32))
    return {name: np.concatenate(parts, axis=1) for name, parts in features.items()}
