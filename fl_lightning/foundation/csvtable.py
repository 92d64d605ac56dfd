"""Tables of numbers as CSV files, written so that a crash spares them: a row is one write, all else
is renamed."""

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
    """A header and a line for each row, every digit; an unknown value (None) is an empty cell."""
    header = list(dict.fromkeys(name for row in rows for name in row))
    return _encode([header, *_lines(header, rows)]).decode()


class CsvTable:
    """A CSV file of numbers and words whose header may grow. Integers stay integers, floats keep
    every digit."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, rows: Sequence[Mapping[str, float | str]], durable: bool = True) -> None:
        """Make the file hold `rows` and nothing else."""
        write_whole(self.path, as_csv(rows), durable)

    def append(self, rows: Sequence[Mapping[str, float | str]], always: Iterable[str] = ()) -> None:
        """Add `rows` in one write; columns that are new are added to all of it, `always` even if
        empty."""
        header = self.header()
        names = [name for row in rows for name in row]
        new = list(dict.fromkeys(name for name in [*names, *always] if name not in header))
        lines = _lines(header + new, rows)
        if new:
            # Rows that are there may have been flushed: they stay on the disk.
            self._rewrite(header + new, self._read()[1] + lines, durable=bool(header))
            return
        with writing(self.path), self.path.open("ab") as file:
            file.write(_encode(lines))

    def truncate(self, round: int) -> None:
        """Keep the whole rows of rounds up to `round`; `Damaged` where a row is of none."""
        header, lines = self._read()
        if header:
            try:
                at = header.index("round")
                kept = [line for line in lines if int(line[at]) <= round]
            except ValueError:
                raise Damaged(
                    "run", str(self.path.parent), f"its {self.path.name} is damaged"
                ) from None
            self._rewrite(header, kept)
        elif self.path.exists():
            self.path.unlink()

    def read(self, words: Collection[str] = (), numbered: bool = False) -> list[Row]:
        """The whole rows as numbers, but for the columns of `words`; empty cells are absent.

        Raises:
            Damaged: a cell is no number, or (`numbered`) a row is of no round.
        """
        damaged = Damaged("run", str(self.path.parent), f"its {self.path.name} is damaged")
        try:
            header, lines = self._read()
            cells = ([(n, c) for n, c in zip(header, line, strict=True) if c] for line in lines)
            rows = [
                {name: cell if name in words else _number(cell) for name, cell in row}
                for row in cells
            ]
        except (ValueError, csv.Error):
            raise damaged from None
        if numbered and not all(float(row.get("round", math.nan)).is_integer() for row in rows):
            raise damaged
        return rows

    def header(self) -> list[str]:
        """Names of the columns, from the first line alone: the cost of a round must not grow with
        their number."""
        if not self.path.exists():
            return []
        with self.path.open(encoding="utf-8") as file:
            first = file.readline()
        return next(csv.reader([first])) if first.endswith("\n") else []

    def _read(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows; what a crash cut short is left out."""
        if not self.path.exists():
            return [], []
        text = self.path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        header, *lines = [*csv.reader(io.StringIO(whole))] or [[]]
        return header, [line for line in lines if len(line) == len(header)]

    def _rewrite(self, header: list[str], lines: list[list[str]], durable: bool = True) -> None:
        padded = [line + [""] * (len(header) - len(line)) for line in lines]
        write_whole(self.path, _encode([header, *padded]), durable)


def _lines(header: list[str], rows: Sequence[Mapping[str, float | str]]) -> list[list[str]]:
    return [[_text(row.get(name)) for name in header] for row in rows]


def _encode(lines: list[list[str]]) -> bytes:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(lines)
    return buffer.getvalue().encode()


def _text(value: float | str | None) -> str:
    """`value` with every digit, nothing of None; numpy's and torch's numbers included."""
    return "" if value is None else str(value.item() if hasattr(value, "item") else value)


def _number(cell: str) -> float:
    try:
        return int(cell)
    except ValueError:
        return float(cell)
