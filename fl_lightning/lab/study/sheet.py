"""A table as text: for the terminal, as CSV, as LaTeX (booktabs), as JSON, as an HTML page with its
intervals drawn."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any

from fl_lightning.configuration.catalogue import did_you_mean
from fl_lightning.configuration.config import check
from fl_lightning.foundation.csvtable import as_csv

WIDTH = 180  # a file or a pipe has no width to keep to
Span = tuple[float, float, float]
"""Of an interval: its low end, the value, its high end."""


@dataclass(frozen=True)
class Block:
    """Rows under one title; the first cell of a row heads it."""

    title: str
    rows: list[list[str]]
    spans: list[Span | None] = field(default_factory=list)
    """For each row its interval, where it has one; empty: nothing is drawn."""
    best: str = ""
    """The row whose `mean` is bold, by its first cell."""


@dataclass(frozen=True)
class Sheet:
    """A table in blocks that share a head."""

    mark: str
    """Which command made it; in all that is written."""
    head: list[str]
    blocks: list[Block]
    lines: list[str]
    """What is said below."""
    records: list[dict[str, Any]]
    """The rows with every digit, for CSV and JSON."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """What JSON has beside the rows."""
    title: str = ""
    keys: Sequence[str] = ()
    """What the columns of `head` are called on the command line."""
    pictures: Sequence[tuple[str, str]] = ()
    """For the page: SVG, and the words below it."""
    caption: str = ""
    label: str = ""
    """Of the floating table in LaTeX; both empty: a bare tabular."""

    def bold(self, block: Block, row: Sequence[str], column: int) -> bool:
        """Whether a cell is bold."""
        return bool(block.best) and row[0] == block.best and self.keys[column] == "mean"


def choose(sheet: Sheet, columns: str) -> Sheet:
    """The sheet with these columns alone (keys with commas), in this order behind the first.

    Raises:
        BadInput: it has no such column.
    """
    keys = [sheet.keys[0]]
    for word in _named(columns, sheet.keys):
        near = did_you_mean(word, sheet.keys)
        check(
            "columns",
            word,
            word in sheet.keys,
            f"no such column{near}; columns: {', '.join(sheet.keys)}",
        )
        keys += [word] if word not in keys else []
    places = [sheet.keys.index(key) for key in keys]
    blocks = [
        replace(block, rows=[[row[k] for k in places] for row in block.rows])
        for block in sheet.blocks
    ]
    return replace(sheet, keys=keys, head=[sheet.head[k] for k in places], blocks=blocks)


def _named(columns: str, keys: Sequence[str]) -> list[str]:
    """The words between the commas; where a key has commas itself (a method's label), all of it is
    one word."""
    parts, words = [part.strip() for part in columns.split(",")], []
    while parts:
        sizes = range(len(parts), 1, -1)
        size = next((n for n in sizes if {",".join(parts[:n]), ", ".join(parts[:n])} & {*keys}), 1)
        joined = ",".join(parts[:size])
        words.append(joined if joined in keys else ", ".join(parts[:size]))
        parts = parts[size:]
    return words


def table(sheet: Sheet, width: int | None = WIDTH) -> str:
    """For the terminal: a table for each block. `width` None: the terminal's."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    screen = io.StringIO()
    console = Console(highlight=False, width=width, file=screen)
    print(sheet.mark, file=screen)
    if sheet.title:
        print(sheet.title, file=screen)
    for block in sheet.blocks:
        shown = Table(title=escape(block.title), title_justify="left", box=SIMPLE)
        for number, name in enumerate(sheet.head):
            shown.add_column(name, justify="right" if number else "left", no_wrap=number == 0)
        for row in block.rows:
            shown.add_row(*map(escape, row))
        console.print(shown)
    for line in sheet.lines:
        print(line, file=screen)
    return screen.getvalue()


def as_json(sheet: Sheet) -> str:
    """Rows as in CSV, and what else there is."""
    content = {"made_by": sheet.mark, "rows": sheet.records, **sheet.more}
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def as_latex(sheet: Sheet) -> str:
    r"""A tabular for \usepackage{booktabs}, in a table where there is a caption or a label; the
    lines below the table are comments above it."""
    bold = (
        "bold: the best mean, where the interval of its paired difference to the next best lies "
        "above 0"
    )
    words = [
        sheet.mark,
        sheet.title,
        *([bold] if any(block.best for block in sheet.blocks) else []),
        *sheet.lines,
    ]
    comments = "".join(f"% {' '.join(line.split())}\n" for line in filter(None, words))
    text = [
        f"\\begin{{tabular}}{{l{'r' * (len(sheet.head) - 1)}}}",
        r"\toprule",
        _line(map(_tex, sheet.head)),
    ]
    for block in sheet.blocks:
        text += [
            r"\midrule",
            f"\\multicolumn{{{len(sheet.head)}}}{{l}}{{\\emph{{{_tex(block.title)}}}}} \\\\",
        ]
        for row in block.rows:
            cells = [
                f"\\textbf{{{_tex(c)}}}" if sheet.bold(block, row, k) else _tex(c)
                for k, c in enumerate(row)
            ]
            text.append(_line(cells))
    text += [r"\bottomrule", r"\end{tabular}"]
    if sheet.caption or sheet.label:
        named = [f"\\caption{{{_tex(sheet.caption)}}}"] * bool(sheet.caption)
        named += [f"\\label{{{sheet.label}}}"] * bool(sheet.label)
        text = [r"\begin{table}", r"\centering", *named, *text, r"\end{table}"]
    return comments + "\n".join([*text, ""])


def as_html(sheet: Sheet) -> str:
    """A page of its own that needs no network; each row's interval is drawn beside it."""
    from markupsafe import Markup

    from fl_lightning.lab.report.page import template

    return template("fl_lightning.lab.report", "page.sheet.html.j2").render(
        sheet=sheet,
        pictures=[(Markup(svg), words) for svg, words in sheet.pictures],
        style=Markup(
            files("fl_lightning.lab.report").joinpath("page.css").read_text(encoding="utf-8")
        ),
        place=_places([span for block in sheet.blocks for span in block.spans]),
    )


FORMATS: dict[str, Callable[[Sheet], str]] = {
    "table": table,
    "latex": as_latex,
    "json": as_json,
    "html": as_html,
    "csv": lambda sheet: as_csv([{"made_by": sheet.mark, **record} for record in sheet.records]),
}


def _places(spans: Sequence[Span | None]) -> Callable[[float], float]:
    """Where a value lies in a picture that holds all intervals and 0, from 0 to 100."""
    ends = [0.0, *(end for span in spans if span is not None for end in span)]
    low, width = min(ends), (max(ends) - min(ends)) or 1.0
    return lambda value: round(2 + 96 * (value - low) / width, 2)


def _line(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def _tex(text: str) -> str:
    """`text` with what LaTeX takes for its own made plain, in any font encoding; negative numbers
    have a minus."""
    text = re.sub(r"(?<![\w-])-(?=[.\d])|(?<=\de)-(?=\d)", "\N{MINUS SIGN}", text)
    plain = {
        "\\": r"\textbackslash{}",
        "±": r"$\pm$",
        "–": "--",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
    }
    plain |= {
        "\N{MINUS SIGN}": "$-$",
        "|": r"\textbar{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
    }
    plain |= {character: f"\\{character}" for character in "&%$#_{}"}
    return "".join(plain.get(character, character) for character in text)
