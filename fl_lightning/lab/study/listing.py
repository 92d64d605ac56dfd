"""Tables as text: for the terminal, and as CSV, LaTeX (booktabs), JSON and an HTML page."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pandas import DataFrame

from fl_lightning.configuration.catalogue import did_you_mean
from fl_lightning.configuration.config import check

WIDTH = 180
"""Columns of a table that is not printed to a terminal."""


@dataclass(frozen=True)
class Listing:
    """A table: its numbers, its rows as texts in blocks with a title each, and notes."""

    mark: str
    """The command that made it, written to every file."""
    numbers: DataFrame
    """Unrounded numbers, for CSV and JSON."""
    words: DataFrame
    """Texts, a column for each key of the command line. The index is the title of a row's block;
    the first column names the row."""
    heads: Mapping[str, str]
    """Heads of the columns, by key."""
    notes: list[str]
    """Lines below the table."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the JSON and their values, such as notes."""
    title: str = ""
    """Line above the table."""
    best: Sequence[int] = ()
    """Rows of `words` whose `mean` is bold in LaTeX."""
    pictures: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Figures of the page by name, each with its caption."""
    caption: str = ""
    label: str = ""
    """Caption and label of LaTeX's table environment; without both there is only a tabular."""

    def blocks(self) -> Iterator[tuple[str, DataFrame]]:
        """Yield the title and rows of each block."""
        yield from self.words.groupby(level=0, sort=False)


def choose_columns(listing: Listing, columns: str) -> Listing:
    """The listing with the first column and `columns`, in this order.

    Args:
        columns: keys with commas.

    Raises:
        BadInput: there is no such column.
    """
    keys = list(listing.words)
    chosen = dict.fromkeys([keys[0], *_split(columns, keys)])
    for word in chosen:
        check(
            "columns",
            word,
            word in keys,
            f"no such column{did_you_mean(word, keys)}; columns: {', '.join(keys)}",
        )
    return replace(listing, words=listing.words[list(chosen)])


def _split(columns: str, keys: Sequence[str]) -> list[str]:
    """Split text at commas, except for commas within one of `keys` (a method's label may contain
    some)."""
    longest_first = sorted(map(re.escape, keys), key=len, reverse=True)
    spaced = (key.replace(",\\ ", ",\\s*") for key in longest_first)
    words = re.findall(rf"\s*({'|'.join(spaced)}|[^,]*?)\s*(?:,|$)", columns)
    return [word for word in words if word] or [columns]


def table(listing: Listing, width: int | None = WIDTH) -> str:
    """The tables of all blocks as text for the terminal.

    Args:
        listing: the table.
        width: greatest width in characters; None: the terminal's.
    """
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    text = io.StringIO()
    console = Console(highlight=False, width=width, file=text)
    print(listing.mark, file=text)
    if listing.title:
        print(listing.title, file=text)
    for title, rows in listing.blocks():
        shown = Table(title=escape(title), title_justify="left", box=SIMPLE)
        for number, key in enumerate(rows):
            justify: Any = "right" if number else "left"
            shown.add_column(
                listing.heads[key],
                justify=justify,
                no_wrap=number == 0,
            )
        for row in rows.to_numpy():
            shown.add_row(*map(escape, row))
        console.print(shown)
    for note in listing.notes:
        print(note, file=text)
    return text.getvalue()


def as_csv(listing: Listing) -> str:
    """The unrounded numbers as CSV."""
    numbers = listing.numbers.copy()
    numbers.insert(0, "made_by", listing.mark)
    return str(numbers.to_csv(index=False, lineterminator="\n"))


def as_json(listing: Listing) -> str:
    """The unrounded numbers and `listing.more` (notes and ranks, for instance) as JSON."""
    rows = records(listing.numbers)
    content = {
        "made_by": listing.mark,
        "rows": rows,
        **listing.more,
    }
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def records(numbers: DataFrame) -> list[dict[str, Any]]:
    """The rows as dictionaries of plain values, with None for missing values."""
    plain = numbers.astype(object)
    return plain.where(plain.notna(), None).to_dict("records")


def as_latex(listing: Listing) -> str:
    r"""A tabular for \usepackage{booktabs}, in a table environment if there is a caption or a
    label. The notes are comments above it."""
    bold = (
        "bold: the best mean, where the interval of its paired difference to the next best lies "
        "above 0"
    )
    comments = [
        listing.mark,
        listing.title,
        bold if listing.best else "",
        *listing.notes,
    ]
    lines = [f"% {' '.join(line.split())}" for line in comments if line]
    floats = bool(listing.caption or listing.label)
    if floats:
        lines += [r"\begin{table}", r"\centering"]
    if listing.caption:
        lines.append(f"\\caption{{{_tex(listing.caption)}}}")
    if listing.label:
        lines.append(f"\\label{{{listing.label}}}")
    words = listing.words.map(_tex)
    for place in listing.best if "mean" in words else ():
        column = words.columns.get_loc("mean")
        words.iloc[place, column] = f"\\textbf{{{words.iloc[place, column]}}}"
    width = words.shape[1]
    lines += [f"\\begin{{tabular}}{{l{'r' * (width - 1)}}}", r"\toprule"]
    lines.append(_line(_tex(listing.heads[key]) for key in words))
    for title, rows in words.groupby(level=0, sort=False):
        lines += [
            r"\midrule",
            f"\\multicolumn{{{width}}}{{l}}{{\\emph{{{_tex(title)}}}}} \\\\",
        ]
        lines += map(_line, rows.to_numpy())
    lines += [r"\bottomrule", r"\end{tabular}"]
    if floats:
        lines.append(r"\end{table}")
    return "\n".join([*lines, ""])


def as_html(listing: Listing) -> str:
    """An HTML page without links to other files."""
    from markupsafe import Markup

    from fl_lightning.lab.report.page import template
    from fl_lightning.lab.report.vector import svg

    pictures = listing.pictures.items()
    words = listing.words.set_axis(range(len(listing.words)))
    return template("fl_lightning.lab.report", "page.listing.html.j2").render(
        mark=listing.mark,
        listing=listing,
        blocks=words.groupby(listing.words.index, sort=False),
        pictures=[(Markup(svg(name, figure)), words) for name, (figure, words) in pictures],
    )


FORMATS: dict[str, Callable[[Listing], str]] = {
    "table": table,
    "latex": as_latex,
    "json": as_json,
    "html": as_html,
    "csv": as_csv,
}


def _line(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


TEX: dict[str, Any] = {
    "\\": r"\textbackslash{}",
    "±": r"$\pm$",
    "–": "--",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\N{MINUS SIGN}": "$-$",
    "|": r"\textbar{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}
"""Characters that are special in LaTeX, and replacements that any font encoding has."""


def _tex(text: str) -> str:
    """`text` for LaTeX; a hyphen before a number becomes a minus."""
    minus = r"(?<![\w-])-(?=[.\d])|(?<=\de)-(?=\d)"
    return re.sub(minus, "\N{MINUS SIGN}", text).translate(str.maketrans(TEX))
