"""The user's own table: a CSV file whose columns are features, or name image files beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from fl_lightning.configuration.config import FLOAT32, DataConfig, check
from fl_lightning.configuration.tables import columns_of, form_of, numbers
from fl_lightning.configuration.tables import read as read
from fl_lightning.data import text
from fl_lightning.data.columns import Columns, say_merged
from fl_lightning.data.images import decoder, marks, opened
from fl_lightning.data.source import Pool, Reading, Source, source_of
from fl_lightning.foundation.cells import is_empty, number
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.named import composed


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
        class_names, labels = _numbered(cells[label], label, data)
    groups = None
    group_names = list[str]()
    if group is not None:
        group_names, groups = _numbered(cells[group], group, data)
    unit = None
    if data.unit_column is not None:
        unit = _numbered(cells[data.unit_column], data.unit_column, data)[1]
    words = set(data.one_hot or [])
    features = {
        name: [composed(cell) for cell in cells[name]] if name in words else cells[name]
        for name in chosen
    }
    columns = Columns.of(features, data)
    first = features[chosen[0]]
    filled = next((cell for cell in first if not is_empty(cell)), "0")
    is_number = chosen[0] in columns.form["dates"] or _number(filled, chosen[0], data) is not None
    images = len(chosen) == 1 and not columns.values and not is_number
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
        reads = Pool.of(_features(data, features, columns), labels).read
    mark = marks(files, beside) if images else None
    lines = np.arange(len(labels))
    pool = Pool(labels, reads, groups, units=unit, lines=lines, mark=mark)
    source = source_of(data, pool, None, class_names, group_names)
    return replace(source, reading=Reading(columns=None if images else columns))


def _numbered(cells: list[str], column: str, data: DataConfig) -> tuple[list[str], np.ndarray]:
    """The values of a column in order, and each cell's place among them, int64 [n]."""
    cells = [composed(cell) for cell in cells]
    empty = next((sample for sample, cell in enumerate(cells, 1) if is_empty(cell)), None)
    if empty is not None:
        cell = f" ({cells[empty - 1]})" if cells[empty - 1] else ""
        raise BadInput(
            "data.root", data.root, f"column {column!r} of sample {empty} is empty{cell}"
        )
    values = set(cells)
    order = {value: _number(value, column, data) for value in values}
    are_numbers = None not in order.values()
    names = sorted(values, key=lambda value: ((are_numbers and order[value]) or 0.0, value))
    same = [pair for pair in pairwise(names) if are_numbers and order[pair[0]] == order[pair[1]]]
    if same:
        raise BadInput(
            "data.root",
            data.root,
            f"column {column!r} holds {same[0][0]!r} and {same[0][1]!r}, one number",
        )
    places = {name: place for place, name in enumerate(names)}
    return names, np.array([places[cell] for cell in cells], np.int64)


def _number(cell: str, column: str, data: DataConfig) -> float | None:
    """The number in a cell; None: it holds something else, or none of 32 bits."""
    try:
        value = number(column, cell, form_of(data))
    except ValueError:
        return None
    return value if abs(value) < FLOAT32 else None


def _features(data: DataConfig, cells: Mapping[str, Sequence[str]], columns: Columns) -> np.ndarray:
    """The cells of `columns` as float32 (n, features); an empty one is NaN where `data.impute`
    fills it, and 0 in all values of a column of words."""
    parts = []
    for name in columns.names:
        words = columns.values.get(name)
        if words is None:
            parts.append(np.array(numbers(data, name, cells[name]))[:, None])
        else:
            parts.append(
                np.array([[cell == word for word in words] for cell in cells[name]], float)
            )
    features = np.concatenate(parts, axis=1)
    numeric = np.flatnonzero(columns.numeric)
    say_merged([f"column {columns.features[place]!r}" for place in numeric], features[:, numeric])
    return features.astype(np.float32)
