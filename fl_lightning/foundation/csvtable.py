"""Keeps tables of numbers in CSV files that survive a crash: rows are appended in one write, other
changes write a new file and rename it."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_lightning.foundation.errors import Damaged
from fl_lightning.foundation.files import write_whole, writing

Row = dict[str, Any]
"""Numbers by column, and text in columns of words."""


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a CSV file with a header and all digits; None and absent columns become
    empty cells."""
    header = list(dict.fromkeys(name for row in rows for name in row))
    return _encode([header, *_lines(header, rows)]).decode()


class CsvTable:
    """A CSV file of numbers and words that can get further columns. Integers stay integers, floats
    keep all digits."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(
        self,
        rows: Sequence[Mapping[str, float | str]],
        durable: bool = True,
    ) -> None:
        """Replace the file's content by `rows`. `durable`: wait until they are on the disk."""
        write_whole(self.path, as_csv(rows), durable)

    def append(
        self,
        rows: Sequence[Mapping[str, float | str]],
        always: Iterable[str] = (),
    ) -> None:
        """Append `rows` in one write. Their new columns, and those of `always` even if they stay
        empty, are added to the header."""
        header = self.header()
        names = [name for row in rows for name in row]
        new = [name for name in dict.fromkeys([*names, *always]) if name not in header]
        lines = _lines(header + new, rows)
        if new:
            # the old rows may have been flushed, so the new file must be, too
            self._rewrite(
                header + new,
                self._read()[1] + lines,
                durable=bool(header),
            )
            return
        with writing(self.path), self.path.open("ab") as file:
            file.write(_encode(lines))

    def truncate(self, round: int) -> None:
        """Delete the rows of rounds after `round`, and an incomplete last line.

        Raises:
            Damaged: a row has no number in the column `round`.
        """
        header, lines = self._read()
        if not header:
            self.path.unlink(missing_ok=True)
            return
        try:
            column = header.index("round")
            remaining = [line for line in lines if int(line[column]) <= round]
        except ValueError:
            raise self._damaged() from None
        self._rewrite(header, remaining)

    def read(
        self,
        words: Collection[str] = (),
        numbered: bool = False,
    ) -> list[Row]:
        """Return the complete rows as dicts of numbers, without empty cells.

        Args:
            words: columns whose cells are text.
            numbered: whether each row must have a number in the column `round`.

        Raises:
            Damaged: a cell is not a number, or a row has no round.
        """
        rows: list[Row] = []
        try:
            header, lines = self._read()
            for line in lines:
                cells = zip(header, line, strict=True)
                filled = {name: cell for name, cell in cells if cell}
                rows.append({n: c if n in words else _number(c) for n, c in filled.items()})
        except (ValueError, csv.Error):
            raise self._damaged() from None
        if numbered and not all(float(row.get("round", math.nan)).is_integer() for row in rows):
            raise self._damaged()
        return rows

    def _damaged(self) -> Damaged:
        return Damaged("run", str(self.path.parent), f"its {self.path.name} is damaged")

    def header(self) -> list[str]:
        """Return the names of the columns. Only the first line is read, so the cost does not grow
        with the number of rows."""
        if not self.path.exists():
            return []
        with self.path.open(encoding="utf-8") as file:
            first = file.readline()
        return next(csv.reader([first])) if first.endswith("\n") else []

    def _read(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and the complete rows; a crash may have cut the last line short."""
        if not self.path.exists():
            return [], []
        text = self.path.read_text(encoding="utf-8")
        complete_lines = text[: text.rfind("\n") + 1]
        rows = list(csv.reader(io.StringIO(complete_lines)))
        if not rows:
            return [], []
        header = rows[0]
        return header, [row for row in rows[1:] if len(row) == len(header)]

    def _rewrite(
        self,
        header: list[str],
        lines: list[list[str]],
        durable: bool = True,
    ) -> None:
        padded = [line + [""] * (len(header) - len(line)) for line in lines]
        write_whole(self.path, _encode([header, *padded]), durable)


def _lines(header: list[str], rows: Sequence[Mapping[str, float | str]]) -> list[list[str]]:
    return [[_text(row.get(name)) for name in header] for row in rows]


def _encode(lines: list[list[str]]) -> bytes:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(lines)
    return buffer.getvalue().encode()


def _text(value: Any) -> str:
    """Return a number (of Python, numpy or torch) with all its digits, or text; "" for None."""
    if value is None:
        return ""
    return str(value.item() if hasattr(value, "item") else value)


def _number(cell: str) -> float:
    try:
        return int(cell)
    except ValueError:
        return float(cell)
