"""The user's own table: a CSV file whose columns are features, or name image files in its
folder."""

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
from fl_lightning.data.images import decoder, marks, open_picture
from fl_lightning.data.source import Reading, SamplePool, Setting, Source, source_of
from fl_lightning.foundation.cells import is_empty, number
from fl_lightning.foundation.named import composed


def load(data: DataConfig) -> Source:
    """Read the table `data.root`: features [n, columns] float32; images [n, 3, 32, 32] if the
    column names files; or tokens.

    Classes and groups are numbered in the order of their values, as numbers if all of them are. A
    column of `data.one_hot` becomes a feature for each value. A fifth of each group (without
    groups: of each class) is the test part, drawn from `data.test_seed`.

    Raises:
        Absent: there is no such file.
        BadInput: there is no such column, or a cell is empty or no number.
    """
    cells = read(data)
    label, group, chosen = columns_of(data, list(cells))
    if data.task == "regression":
        class_names: list[str] = []
        without_imputing = replace(data, impute=None)
        labels = _features(without_imputing, cells, Columns([label], {}))[:, 0]
    else:
        class_names, labels = _numbered(cells[label], label, data)
    groups = unit = None
    group_names = list[str]()
    if group is not None:
        group_names, groups = _numbered(cells[group], group, data)
    if data.unit_column is not None:
        _, unit = _numbered(cells[data.unit_column], data.unit_column, data)
    for name in data.one_hot or []:
        cells[name] = [composed(cell) for cell in cells[name]]
    columns = Columns.of({name: cells[name] for name in chosen}, data)
    pool = SamplePool(
        labels,
        lambda index: index,
        groups,
        units=unit,
    )
    first = cells[chosen[0]]
    if data.tokens is not None:
        requirement = "data.tokens needs one column of texts: name only that"
        check("data.columns", chosen, len(chosen) == 1, requirement)
        source = source_of(data, pool, None, class_names, group_names)
        return text.as_tokens(source, first, data)
    pool = replace(pool, lines=np.arange(len(labels)))
    filled = next((cell for cell in first if not is_empty(cell)), "0")
    is_number = _number(filled, chosen[0], data) is not None
    is_number = is_number or chosen[0] in columns.form["dates"]
    if len(chosen) > 1 or columns.values or is_number:
        features = SamplePool.of(_features(data, cells, columns), labels)
        pool = replace(pool, read=features.read)
        source = source_of(data, pool, None, class_names, group_names)
        return replace(source, reading=Reading(columns=columns))
    folder = Path(data.root or "").expanduser().parent
    files = [folder / cell for cell in first]
    read_files = decoder(
        lambda index: open_picture(files[index]),
        data.root,
        lambda index: f"column {chosen[0]!r} of sample {index + 1}, {files[index].name}",
    )
    pool = replace(pool, read=read_files, mark=marks(files, folder))
    return source_of(data, pool, None, class_names, group_names)


def _numbered(
    cells: list[str],
    column: str,
    data: DataConfig,
) -> tuple[list[str], np.ndarray]:
    """Return the sorted values of a column, and each cell's index among them, int64 [n]."""
    setting = Setting("data.root", data.root)
    cells = [composed(cell) for cell in cells]
    for sample, cell in enumerate(cells, 1):
        shown = f" ({cell})" if cell else ""
        setting.check(
            not is_empty(cell),
            f"column {column!r} of sample {sample} is empty{shown}: fill it, or leave the row out",
        )
    order = {value: _number(value, column, data) for value in set(cells)}
    are_numbers = None not in order.values()
    names = sorted(order)
    if are_numbers:
        names.sort(key=lambda value: order[value] or 0.0)
    for first, second in pairwise(names):
        is_same = are_numbers and order[first] == order[second]
        problem = f"column {column!r} writes one number as {first!r} and {second!r}: use one form"
        setting.check(not is_same, problem)
    places = {name: place for place, name in enumerate(names)}
    return names, np.array([places[cell] for cell in cells], np.int64)


def _number(
    cell: str,
    column: str,
    data: DataConfig,
) -> float | None:
    """Return the number in a cell; None if it holds none, or one that is too large for 32 bits."""
    try:
        value = number(column, cell, form_of(data))
    except ValueError:
        return None
    return value if abs(value) < FLOAT32 else None


def _features(
    data: DataConfig,
    cells: Mapping[str, Sequence[str]],
    columns: Columns,
) -> np.ndarray:
    """Convert the cells of `columns` to float32 (n, features).

    An empty cell becomes NaN if `data.impute` fills it; in a one-hot column it is 0 in all values.
    """
    parts = []
    for name, word in columns.pairs:
        if word is None:
            parts.append(numbers(data, name, cells[name]))
        else:
            parts.append([float(cell == word) for cell in cells[name]])
    features = np.ascontiguousarray(np.array(parts).T)
    numeric = np.flatnonzero(columns.numeric)
    say_merged([f"column {columns.features[place]!r}" for place in numeric], features[:, numeric])
    return features.astype(np.float32)
