"""A table as text: for the terminal, as CSV, as LaTeX (booktabs), as JSON, as an HTML page."""

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

WIDTH = 180  # a file or a pipe has no width to keep to


@dataclass(frozen=True)
class Listing:
    """A table's numbers, and its rows in words, in blocks that share a head."""

    mark: str
    """The command that made it; in all that is written."""
    numbers: DataFrame
    """Every digit, for CSV and JSON."""
    words: DataFrame
    """Texts, a column for each key of the command line; the index has the title of a row's block,
    the first column heads a row."""
    heads: Mapping[str, str]
    """The columns' heads by key."""
    notes: list[str]
    """Lines below the table."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """What JSON has beside the rows."""
    title: str = ""
    best: Sequence[int] = ()
    """Rows of `words` whose `mean` is bold."""
    pictures: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """For the page: figures by name, each with the words below it."""
    caption: str = ""
    label: str = ""
    """Of the floating table in LaTeX; both empty: a bare tabular."""

    def blocks(self) -> Iterator[tuple[str, DataFrame]]:
        """Titles and rows."""
        yield from self.words.groupby(level=0, sort=False)


def choose(listing: Listing, columns: str) -> Listing:
    """The listing with these columns alone (keys with commas), in this order behind the first.

    Raises:
        BadInput: it has no such column.
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
    """The words between the commas; where a key has commas itself (a method's label), all of it is
    one word."""
    longest_first = sorted(map(re.escape, keys), key=len, reverse=True)
    spaced = (key.replace(",\\ ", ",\\s*") for key in longest_first)
    words = re.findall(rf"\s*({'|'.join(spaced)}|[^,]*?)\s*(?:,|$)", columns)
    return [word for word in words if word] or [columns]


def table(listing: Listing, width: int | None = WIDTH) -> str:
    """For the terminal: a table for each block. `width` None: the terminal's."""
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
    """The numbers, every digit."""
    numbers = listing.numbers.copy()
    numbers.insert(0, "made_by", listing.mark)
    return str(numbers.to_csv(index=False, lineterminator="\n"))


def as_json(listing: Listing) -> str:
    """Rows as in CSV, and what else there is."""
    rows = records(listing.numbers)
    content = {
        "made_by": listing.mark,
        "rows": rows,
        **listing.more,
    }
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def records(numbers: DataFrame) -> list[dict[str, Any]]:
    """The rows as plain values; None where there is none."""
    plain = numbers.astype(object)
    return plain.where(plain.notna(), None).to_dict("records")


def as_latex(listing: Listing) -> str:
    r"""A tabular for \usepackage{booktabs}, in a table where there is a caption or a label; the
    lines below the table are comments above it."""
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
    """A page of its own that needs no network."""
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
"""What LaTeX takes for its own, made plain in any font encoding."""


def _tex(text: str) -> str:
    """`text` in LaTeX; negative numbers have a minus."""
    minus = r"(?<![\w-])-(?=[.\d])|(?<=\de)-(?=\d)"
    return re.sub(minus, "\N{MINUS SIGN}", text).translate(str.maketrans(TEX))
