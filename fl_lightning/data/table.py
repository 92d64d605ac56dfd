"""The user's own table: a CSV file whose columns are features, or name image files beside it."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from fl_lightning.configuration.config import FLOAT32, DataConfig, check
from fl_lightning.data import text
from fl_lightning.data.columns import EMPTY, Columns, columns_of, number, say_merged
from fl_lightning.data.images import decoder, marks, opened
from fl_lightning.data.named import composed
from fl_lightning.data.source import Pool, Reading, Source, at_root, source_of
from fl_lightning.foundation.errors import BadInput

LAYOUT = "a CSV file with a line of column names, then a sample a line"


def load(data: DataConfig) -> Source:
    """Read the table `data.root`: features [n, columns] float32, or images [n, 3, 32, 32] where a
    column names files.

    Classes and groups are numbered in the order of their values, as numbers where all of them are.
    A table has no test part: a fifth of each group (of each class, without groups) is one, drawn
    from `data.test_seed`.

    Columns that `data.one_hot` names become a feature for each value.

    Raises:
        BadInput: no such file (then `Absent`) or column, a cell that is no number, or is empty.
    """
    cells = read(data)
    label, group, chosen = columns_of(data, list(cells))
    if data.task == "regression":
        class_names: list[str] = []
        labels = _features(replace(data, impute=None), cells, Columns([label], {}))[:, 0]
    else:
        class_names, labels = _numbered(cells[label], label, data.root)
    groups = None
    group_names = list[str]()
    if group is not None:
        group_names, groups = _numbered(cells[group], group, data.root)
    unit = None
    if data.unit_column is not None:
        unit = _numbered(cells[data.unit_column], data.unit_column, data.root)[1]
    words = set(data.one_hot or [])
    features = {
        name: [composed(cell) for cell in cells[name]] if name in words else cells[name]
        for name in chosen
    }
    columns = Columns.of(features, data.one_hot or [])
    first = features[chosen[0]]
    filled = next((cell for cell in first if cell.lower() not in EMPTY), "0")
    images = len(chosen) == 1 and not columns.values and not _is_number(filled)
    if data.tokens is not None:
        check(
            "data.columns",
            chosen,
            len(chosen) == 1,
            "tokens (data.tokens) are of one column of texts: name it",
        )
        places = Pool(labels, lambda index: index, groups, units=unit)
        return text.as_tokens(source_of(data, places, None, class_names, group_names), first, data)
    if images:
        beside = Path(data.root or "").expanduser().parent
        files = [beside / cell for cell in first]
        reads = decoder(
            lambda index: opened(files[index]),
            data.root,
            lambda index: f"column {chosen[0]!r} of sample {index + 1}, {files[index].name}",
        )
    else:
        absent = next((name for name in data.one_hot or [] if name not in chosen), None)
        check(
            "data.one_hot",
            absent,
            absent is None,
            "it must name columns of features (data.columns)",
        )
        reads = Pool.of(_features(data, features, columns), labels).read
    mark = marks(files, beside) if images else None
    pool = Pool(labels, reads, groups, units=unit, mark=mark)
    source = source_of(data, pool, None, class_names, group_names)
    return replace(source, reading=Reading(columns=None if images else columns))


def read(data: DataConfig) -> dict[str, list[str]]:
    """The cells by column."""
    root, path = at_root(data, f"the path of {LAYOUT}", Path.is_file)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            head, *rows = [
                [cell.strip() for cell in row] for row in csv.reader(file, strict=True) if row
            ]
        head = [composed(name) for name in head]
    except (csv.Error, OSError, ValueError) as error:  # undecodable bytes, no line at all
        raise BadInput(
            "data.root", root, f"it must be {LAYOUT} ({str(error).splitlines()[0]})"
        ) from error
    twice = [name for name, count in Counter(head).items() if count > 1]
    if twice:
        raise BadInput("data.root", root, f"two of its columns are called {twice[0]!r}")
    check("data.root", root, bool(rows), f"it must be {LAYOUT}, but holds no sample")
    for place, row in enumerate(rows, 1):
        check(
            "data.root",
            root,
            len(row) == len(head),
            f"sample {place} has {len(row)} cells for {len(head)} columns",
        )
    return dict(
        zip(
            head,
            map(list, zip(*rows, strict=True)),
            strict=True,
        )
    )


def _numbered(
    cells: list[str],
    column: str,
    root: str | None,
) -> tuple[list[str], np.ndarray]:
    """The values of a column in order, and each cell's place among them, int64 [n]."""
    cells = [composed(cell) for cell in cells]
    empty = next((sample for sample, cell in enumerate(cells, 1) if cell.lower() in EMPTY), None)
    if empty is not None:
        cell = f" ({cells[empty - 1]})" if cells[empty - 1] else ""
        raise BadInput("data.root", root, f"column {column!r} of sample {empty} is empty{cell}")
    values = set(cells)
    numbers = all(_is_number(value) for value in values)
    names = sorted(values, key=lambda value: (float(value) if numbers else 0.0, value))
    same = [pair for pair in pairwise(names) if numbers and float(pair[0]) == float(pair[1])]
    if same:
        raise BadInput(
            "data.root",
            root,
            f"column {column!r} holds {same[0][0]!r} and {same[0][1]!r}, one number",
        )
    places = {name: place for place, name in enumerate(names)}
    return names, np.array([places[cell] for cell in cells], np.int64)


def _is_number(cell: str) -> bool:
    return abs(number(cell)) < FLOAT32


def _features(
    data: DataConfig,
    cells: Mapping[str, Sequence[str]],
    columns: Columns,
) -> np.ndarray:
    """The cells of `columns` as features; an empty one is NaN where `data.impute` fills it."""
    features = columns.encoded(cells)
    valid = (np.abs(features) < FLOAT32) | (np.isnan(features) & (data.impute is not None))
    if valid.all():
        numeric = np.flatnonzero(columns.numeric)
        say_merged(
            [f"column {columns.features[place]!r}" for place in numeric], features[:, numeric]
        )
        return features.astype(np.float32)
    sample, place = np.argwhere(~valid)[0]
    name = columns.features[place]
    cell = cells[name][sample]
    way = "leave it out with data.columns, or list it in data.one_hot"
    way = "data.impute fills it" if cell.lower() in EMPTY else way
    problem = (
        f"column {name!r} of sample {sample + 1} holds {cell!r}, which is not a number (of 32 "
        f"bits); {way}"
    )
    raise BadInput("data.root", data.root, problem)
