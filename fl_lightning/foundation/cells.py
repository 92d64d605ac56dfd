"""Cells of a table as numbers, in plain Python: exported beside a model, word for word."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

EMPTY = ("", "na", "nan", "null")
"""Contents of an empty cell, in small letters."""
SEPARATORS = {",": ",", ";": ";", "tab": "\t", "|": "|"}
"""`data.separator` by name."""
SWAPPED = str.maketrans(",.", ".,")


def is_empty(cell: str) -> bool:
    """Whether a cell holds nothing."""
    return cell.lower() in EMPTY


def number(column: str, cell: str, form: Mapping[str, Any]) -> float:
    """The number in a cell, of a date in days; NaN: it is empty.

    Args:
        column: of the cell.
        cell: without spaces around it.
        form: how the table is written: `decimal`, `dates`, `date_format`, `day_zero`.

    Raises:
        ValueError: it holds something else.
    """
    if is_empty(cell):
        return math.nan
    if column in form["dates"]:
        return days(cell, form)
    if "_" in cell:  # Python reads 3_4 as 34: here it is a name
        raise ValueError(cell)
    return float(cell if form["decimal"] == "." else cell.translate(SWAPPED))


def days(cell: str, form: Mapping[str, Any]) -> float:
    """The days from `form["day_zero"]` to the date in a cell; with a time of day a fraction."""
    date_format = form["date_format"]
    moment = (
        datetime.fromisoformat(cell)
        if date_format is None
        else datetime.strptime(cell, date_format)
    )
    begin = datetime.fromisoformat(form["day_zero"])
    return (moment.replace(tzinfo=None) - begin) / timedelta(days=1)
