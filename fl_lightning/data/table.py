"""The user's own table: a CSV file whose columns are features, or name image files beside it."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

from fl_lightning.config import FLOAT32, DataConfig, check
from fl_lightning.data.columns import EMPTY, Columns
from fl_lightning.data.images import decoder
from fl_lightning.data.source import Absent, Pool, Reading, Source, source_of
from fl_lightning.errors import BadInput

LAYOUT = "a CSV file with a line of column names, then a sample a line"


def load(data: DataConfig) -> Source:
    """Read the table `data.root`: features [n, columns] float32, or images [n, 3, 32, 32] where a column names files.

    Classes and groups are numbered in the order of their values, as numbers where all of them are. A table has no test
    part: a fifth of each group (of each class, without groups) is one, drawn from `data.test_seed`.

    Columns that `data.one_hot` names become a feature for each value.

    Raises:
        BadInput: no such file (then `Absent`) or column, a cell that is no number, or is empty.
    """
    head, rows = _read(data.root)
    label = _place(head, "data.label_column", data.label_column)
    group = None if data.group_column is None else _place(head, "data.group_column", data.group_column)
    chosen = data.columns
    if chosen is None:
        chosen = [name for place, name in enumerate(head) if place not in (label, group)]
    places = [_place(head, "data.columns", name) for name in chosen]
    if label in places or not places:
        what = "it must name columns of features" if not places else "it must not hold the label itself"
        raise BadInput("data.columns", chosen, what)
    if data.task == "regression":
        class_names: list[str] = []
        labels = _features(replace(data, impute=None), head, rows, [label], Columns([head[label]], {}))[:, 0]
    else:
        class_names, labels = _numbered([row[label] for row in rows], head[label], data.root)
    groups, group_names = None, list[str]()
    if group is not None:
        group_names, groups = _numbered([row[group] for row in rows], head[group], data.root)
    if data.tokens is not None:
        from fl_lightning.data import text

        check("data.columns", chosen, len(places) == 1, "tokens (data.tokens) are of one column of texts: name it")
        texts = [row[places[0]] for row in rows]
        source = source_of(data, Pool(labels, lambda index: index, groups), None, class_names, group_names)
        return text.as_tokens(source, texts, data)
    columns = Columns.of(chosen, [[row[place] for place in places] for row in rows], data.one_hot or [])
    if len(places) == 1 and not columns.values and not _is_number(rows[0][places[0]]):
        from PIL import Image

        folder = Path(data.root or "").expanduser().parent
        files = [folder / row[places[0]] for row in rows]
        read = decoder(
            lambda index: Image.open(files[index]), data.root,
            lambda index: f"column {chosen[0]!r} of sample {index + 1}, {files[index].name}",
        )  # fmt: skip
        return source_of(data, Pool(labels, read, groups), None, class_names, group_names)
    absent = next((name for name in data.one_hot or [] if name not in chosen), None)
    check("data.one_hot", absent, absent is None, "it must name columns of features (data.columns)")
    read = Pool.of(_features(data, head, rows, places, columns), labels).read
    source = source_of(data, Pool(labels, read, groups), None, class_names, group_names)
    return replace(source, reading=Reading(columns=columns))


def _read(root: str | None) -> tuple[list[str], list[list[str]]]:
    if root is None or not Path(root).expanduser().is_file():
        raise Absent("data.root", root, f"the source table wants the path of {LAYOUT}")
    try:
        with Path(root).expanduser().open(newline="", encoding="utf-8-sig") as file:
            head, *rows = [[cell.strip() for cell in row] for row in csv.reader(file, strict=True) if row]
    except (csv.Error, OSError, ValueError) as error:  # undecodable bytes, no line at all
        raise BadInput("data.root", root, f"it must be {LAYOUT} ({str(error).splitlines()[0]})") from error
    twice = [name for name, count in Counter(head).items() if count > 1]
    if twice:
        raise BadInput("data.root", root, f"two of its columns are called {twice[0]!r}")
    check("data.root", root, bool(rows), f"it must be {LAYOUT}, but holds no sample")
    for number, row in enumerate(rows, 1):
        if len(row) != len(head):
            raise BadInput("data.root", root, f"sample {number} has {len(row)} cells for {len(head)} columns")
    return head, rows


def _place(head: list[str], key: str, name: str) -> int:
    if name not in head:
        shown = ", ".join(head[:10]) + (", ..." if len(head) > 10 else "")
        raise BadInput(key, name, f"the table has no such column, but {shown}")
    return head.index(name)


def _numbered(cells: list[str], column: str, root: str | None) -> tuple[list[str], np.ndarray]:
    """The values of a column in order, and each cell's place among them, int64 [n]."""
    if "" in cells:
        raise BadInput("data.root", root, f"column {column!r} of sample {cells.index('') + 1} is empty")
    values = set(cells)
    numbers = all(_is_number(value) for value in values)
    names = sorted(values, key=lambda value: (float(value) if numbers else 0.0, value))
    places = {name: place for place, name in enumerate(names)}
    return names, np.array([places[cell] for cell in cells], np.int64)


def _is_number(cell: str) -> bool:
    try:
        return abs(float(cell)) < FLOAT32
    except ValueError:
        return False


def _features(
    data: DataConfig, head: list[str], rows: list[list[str]], places: list[int], columns: Columns
) -> np.ndarray:
    """The cells at `places` as features; an empty one is NaN where `data.impute` fills it."""
    try:
        features = columns.encoded([[row[place] for place in places] for row in rows])
        if (np.abs(features) < FLOAT32).all() or (
            data.impute and (np.isnan(features) | (np.abs(features) < FLOAT32)).all()
        ):
            return features.astype(np.float32)
    except ValueError:
        pass
    numbers = [place for place in places if head[place] not in columns.values]
    empty = EMPTY if data.impute else ()
    number, place = next(
        (i, p)
        for i, row in enumerate(rows, 1)
        for p in numbers
        if not _is_number(row[p]) and row[p].lower() not in empty
    )
    cell = rows[number - 1][place]
    way = "data.impute fills it" if cell.lower() in EMPTY else "choose data.columns, or name it in data.one_hot"
    what = f"column {head[place]!r} of sample {number} holds {cell!r}, which is no number of 32 bits; {way}"
    raise BadInput("data.root", data.root, what)
