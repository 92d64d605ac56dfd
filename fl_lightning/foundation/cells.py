"""Reads a table's cells as numbers, in plain Python: this file is also copied next to exported
models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

EMPTY = ("", "na", "nan", "null")
"""Contents of an empty cell, in lower case."""
SEPARATORS = {",": ",", ";": ";", "tab": "\t", "|": "|"}
"""Characters by `data.separator`."""
SWAPPED = str.maketrans(",.", ".,")


def is_empty(cell: str) -> bool:
    """Return whether a cell is empty."""
    return cell.lower() in EMPTY


def number(column: str, cell: str, form: Mapping[str, Any]) -> float:
    """Return the number in a cell; for a date the days since `day_zero`, for an empty cell NaN.

    Args:
        column: name of the cell's column.
        cell: its text, without spaces around it.
        form: the table's format: `decimal`, `dates`, `date_format`, `day_zero` of `data`.

    Raises:
        ValueError: the cell is not a number or, in a column of `dates`, not a date.
    """
    if is_empty(cell):
        return math.nan
    if column in form["dates"]:
        return days(cell, form)
    if "_" in cell:  # Python would read 3_4 as 34
        raise ValueError(cell)
    return float(cell if form["decimal"] == "." else cell.translate(SWAPPED))


def days(cell: str, form: Mapping[str, Any]) -> float:
    """Return the days from `form["day_zero"]` to the date in a cell; a time of day is a
    fraction."""
    date_format = form["date_format"]
    moment = (
        datetime.fromisoformat(cell)
        if date_format is None
        else datetime.strptime(cell, date_format)
    )
    begin = datetime.fromisoformat(form["day_zero"])
    return (moment.replace(tzinfo=None) - begin) / timedelta(days=1)
