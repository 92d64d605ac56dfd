"""Tables of numbers as CSV files that a crash spares: rows are added in one write, all else is
renamed."""

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
"""Numbers by column; text in columns of words."""


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a header and a line for each row, with every digit; None is an empty cell."""
    header = list(dict.fromkeys(name for row in rows for name in row))
    return _encode([header, *_lines(header, rows)]).decode()


class CsvTable:
    """A CSV file of numbers and words whose header may grow. Integers stay integers, floats keep
    every digit."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(
        self,
        rows: Sequence[Mapping[str, float | str]],
        durable: bool = True,
    ) -> None:
        """Make the file hold `rows` and nothing else."""
        write_whole(self.path, as_csv(rows), durable)

    def append(
        self,
        rows: Sequence[Mapping[str, float | str]],
        always: Iterable[str] = (),
    ) -> None:
        """Add `rows` in one write. Their new columns, and `always` even if empty, are added to the
        table."""
        header = self.header()
        names = [name for row in rows for name in row]
        new = [name for name in dict.fromkeys([*names, *always]) if name not in header]
        lines = _lines(header + new, rows)
        if new:
            # rows that are there may have been flushed: they stay on the disk
            self._rewrite(
                header + new,
                self._read()[1] + lines,
                durable=bool(header),
            )
            return
        with writing(self.path), self.path.open("ab") as file:
            file.write(_encode(lines))

    def truncate(self, round: int) -> None:
        """Keep the complete rows of rounds up to `round`; `Damaged` where a row has none."""
        header, lines = self._read()
        if not header:
            self.path.unlink(missing_ok=True)
            return
        try:
            column = header.index("round")
            kept = [line for line in lines if int(line[column]) <= round]
        except ValueError:
            raise self._damaged() from None
        self._rewrite(header, kept)

    def read(
        self,
        words: Collection[str] = (),
        numbered: bool = False,
    ) -> list[Row]:
        """Return the complete rows as numbers, columns of `words` as text; empty cells are absent.

        Raises:
            Damaged: a cell is no number, or (`numbered`) a row is of no round.
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
        """Names of the columns, from the first line alone: the cost of a round must not grow with
        their number."""
        if not self.path.exists():
            return []
        with self.path.open(encoding="utf-8") as file:
            first = file.readline()
        return next(csv.reader([first])) if first.endswith("\n") else []

    def _read(self) -> tuple[list[str], list[list[str]]]:
        """Return header and rows, without a line that a crash cut short."""
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
    """Return `value` with every digit, "" for None; numpy's and torch's numbers included."""
    if value is None:
        return ""
    return str(value.item() if hasattr(value, "item") else value)


def _number(cell: str) -> float:
    try:
        return int(cell)
    except ValueError:
        return float(cell)
