"""Methods over seeds, in one table that a reader can trust."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Literal

from pandas import DataFrame
from rich.console import Console

from fl_lightning.configuration.config import check
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.extras import require
from fl_lightning.foundation.files import write_whole
from fl_lightning.lab.report import vector
from fl_lightning.lab.study import clients, picture, scores, tables
from fl_lightning.lab.study.chosen import chosen as values_chosen
from fl_lightning.lab.study.compare import Compared
from fl_lightning.lab.study.compare import compare as of_methods
from fl_lightning.lab.study.listing import FORMATS, Listing, choose
from fl_lightning.lab.study.listing import table as as_table
from fl_lightning.lab.study.tables import MARK
from fl_lightning.results.opening import check_out


@dataclasses.dataclass(frozen=True)
class Asked:
    """How methods are compared (`fl_lightning.compare`)."""

    baseline: str | None = None
    judge: str | None = None
    metric: str | None = None
    target: float | None = None
    accept_changed_code: bool = False
    clients: bool = False
    format: str = "table"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Methods side by side; `str` is the text that was asked for, empty where a file has it."""

    table: DataFrame
    """A row for each method by judge and setting (or for each client and method), every digit
    kept."""
    notes: list[str]
    """What is said below the table."""
    text: str

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return str(self.table.to_html()) + "".join(f"<p>{escape(note)}</p>" for note in self.notes)


def compare(
    folders: Sequence[str],
    asked: Asked,
    columns: str | None,
    caption: str | None,
    label: str | None,
    out: str | None,
) -> Comparison:
    """Compares the methods of a study, an archive or run folders; writes the text to the file
    `out`, where it is given.

    Raises:
        BadInput: a key that has no effect beside the others, a file that is not written over, or as
            `read`.
    """
    _check(folders, asked, columns, caption, label, out)
    listing = _listing_of(folders, asked)
    listing = listing if columns is None else choose(listing, columns)
    listing = dataclasses.replace(
        listing,
        caption=caption or "",
        label=label or "",
    )
    return written(listing, asked.format, out)


def _listing_of(folders: Sequence[str], asked: Asked) -> Listing:
    """Returns the table, with pictures where it becomes a page."""
    with read(folders, asked) as (scored, notes, folder):
        if asked.clients:
            listing = clients.listing_of(scored, asked.baseline)
            return dataclasses.replace(
                listing,
                notes=[*notes, *listing.notes],
            )
        compared = side_by_side(
            scored,
            notes,
            folder,
            asked.baseline,
            asked.target,
        )
        listing = tables.listing_of(compared)
        drawn = picture.draw(scored, compared) if asked.format == "html" else {}
        return dataclasses.replace(listing, pictures=drawn)


def _check(
    folders: Sequence[str],
    asked: Asked,
    columns: str | None,
    caption: str | None,
    label: str | None,
    out: str | None,
) -> None:
    """Raise `BadInput` without a folder, for keys that do not go together, and for a file that may
    not be written."""
    allowed = "it must be given: fl-train compare STUDY, or RUN [RUN ...]"
    check("compare", None, bool(folders), allowed)
    if out is not None:
        check_out("out", out, "", MARK, "comparison")
    if asked.clients:
        allowed = "it is of methods over seeds: leave out --clients"
        check("target", asked.target, asked.target is None, allowed)
    if asked.format != "latex":
        check("caption", caption, caption is None, "it is for --format latex")
        check("label", label, label is None, "it is for --format latex")
    whole = columns is None or asked.format not in ("csv", "json")
    check("columns", columns, whole, f"{asked.format} has all columns")
    if asked.format == "html":
        require("report", "compare", folders[0])


def report(
    study: str, out: str, figures: Literal["svg", "pdf", "png"] | None, accept_changed_code: bool
) -> Path | None:
    """Writes the page on a study, and with `figures` each picture to a file of its own; returns
    the folder of these."""
    require("study", "report", study)
    require("report", "report", study)
    page = check_out("out", out, "", MARK, "comparison")
    asked = Asked(
        accept_changed_code=accept_changed_code,
        format="html",
    )
    listing = _listing_of([study], asked)
    charts = page.with_name(f"{page.stem}-figures")
    if figures is not None:
        files = {name: figure for name, (figure, _) in listing.pictures.items()}
        vector.write(files, charts, figures, MARK)
    written(listing, "html", out)
    return charts if figures is not None else None


@contextlib.contextmanager
def read(names: Sequence[str], asked: Asked) -> Iterator[tuple[DataFrame, list[str], Path]]:
    """The cells of a study, an archive or run folders, what is to be said of them, and the first
    folder."""
    require("study", "compare", names[0])
    folders = [Path(name) for name in names]
    with contextlib.ExitStack() as until:
        if len(folders) == 1 and folders[0].is_file():
            from fl_lightning.lab.study import archive

            folders = [until.enter_context(archive.unpacked(folders[0]))]
        keys = asked.judge, asked.metric, asked.accept_changed_code
        scored, notes = scores.read(folders, *keys)
        yield scored, notes, folders[0]


def side_by_side(
    scored: DataFrame,
    notes: list[str],
    folder: Path,
    baseline: str | None = None,
    target: float | None = None,
) -> Compared:
    """The comparison of cells, with the values that `fl-train tune` chose for the study in
    `folder`."""
    try:
        compared = of_methods(scored, baseline, target)
    except BadInput:  # such as no pairs, since runs are left out
        print(
            "".join(f"{note}\n" for note in notes),
            end="",
            file=sys.stderr,
        )
        raise
    chosen, warnings = values_chosen(folder)
    compared.table["chosen"] = compared.table.method.map(chosen)
    compared.notes[:0] = [*notes, *warnings]
    return compared


def written(listing: Listing, form: str, out: str | None = None) -> Comparison:
    """Returns the comparison with its text, which is written to the file `out` where that is given;
    of a CSV, the lines below the table go to stderr."""
    screen = Console()
    fits = form == "table" and out is None and screen.is_terminal
    text = as_table(listing, screen.width) if fits else FORMATS[form](listing)
    if out is not None:
        write_whole(Path(out), text)
    if form == "csv":
        print("\n".join(listing.notes), file=sys.stderr)
    shown = "" if out is not None else text.removesuffix("\n")
    return Comparison(listing.numbers, list(listing.notes), shown)
