"""The command `fl-train compare`, and the page of a study."""

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
from fl_lightning.lab.study.chosen import chosen_values
from fl_lightning.lab.study.compare import compare_runs
from fl_lightning.lab.study.listing import FORMATS, Listing, choose_columns
from fl_lightning.lab.study.listing import table as as_table
from fl_lightning.lab.study.tables import MARK
from fl_lightning.results.opening import check_out


@dataclasses.dataclass(frozen=True)
class CompareOptions:
    """Options of `fl_lightning.compare`."""

    baseline: str | None = None
    judge: str | None = None
    metric: str | None = None
    target: float | None = None
    format: str = "table"
    out: str | None = None
    accept_changed_code: bool = False
    clients: bool = False
    columns: str | None = None
    caption: str | None = None
    label: str | None = None

    def check(self) -> None:
        """Raise `BadInput` for options that exclude each other, and for a file that may not be
        written."""
        if self.out is not None:
            check_out("out", self.out, "", MARK, "comparison")
        if self.clients:
            check(
                "target",
                self.target,
                self.target is None,
                "it has no effect on the table of clients: leave it or --clients out",
            )
        for key in ("caption", "label"):
            value = getattr(self, key)
            fits = value is None or self.format == "latex"
            check(key, value, fits, "it is only for --format latex: leave it out")
        fits = self.columns is None or self.format not in ("csv", "json")
        check(
            "columns",
            self.columns,
            fits,
            f"leave it out: --format {self.format} writes all columns",
        )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A comparison of methods; `str` gives its text, which is empty if it was written to a file."""

    table: DataFrame
    """Unrounded numbers: a row for each method by judge and setting, or for each client and
    method."""
    notes: list[str]
    """Lines below the table."""
    text: str

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return str(self.table.to_html()) + "".join(f"<p>{escape(note)}</p>" for note in self.notes)


def compare(folders: Sequence[str], options: CompareOptions) -> Comparison:
    """Compares the methods of a study, an archive or run folders.

    Args:
        folders: a study's folder, an archive, or run folders.
        options: with `out`, the text is written to that file.

    Raises:
        BadInput: options exclude each other, the file may not be written, or the runs cannot be
            compared (`scores.read`).
    """
    check(
        "compare",
        None,
        bool(folders),
        "give a study or runs: fl-train compare STUDY, or RUN [RUN ...]",
    )
    options.check()
    if options.format == "html":
        require("report", "compare", folders[0])
    listing = _listing_of(folders, options)
    if options.columns is not None:
        listing = choose_columns(listing, options.columns)
    caption, label = options.caption or "", options.label or ""
    listing = dataclasses.replace(listing, caption=caption, label=label)
    return write_listing(listing, options.format, options.out)


def _listing_of(folders: Sequence[str], options: CompareOptions) -> Listing:
    """Returns the table of the runs in `folders`; for HTML also pictures."""
    with open_runs(folders, options) as (runs, notes, folder):
        if options.clients:
            listing = clients.clients_listing(runs, options.baseline)
            return dataclasses.replace(listing, notes=[*notes, *listing.notes])
        try:
            compared = compare_runs(runs, options.baseline, options.target)
        except BadInput:  # notes on runs that are left out may explain it
            for note in notes:
                print(note, file=sys.stderr)
            raise
        choices, warnings = chosen_values(folder)
        compared.table["chosen"] = compared.table.method.map(choices)
        compared.notes[:0] = [*notes, *warnings]
        pictures = picture.draw(runs, compared) if options.format == "html" else {}
        return dataclasses.replace(tables.comparison_listing(compared), pictures=pictures)


def report(
    study: str,
    out: str,
    figures: Literal["svg", "pdf", "png"] | None,
    accept_changed_code: bool,
) -> Path | None:
    """Writes the page of a study.

    Args:
        study: its folder.
        out: the page.
        figures: also write each picture to a file of this format.
        accept_changed_code: whether runs of a row may have different versions of own code.

    Returns:
        The folder of the pictures' files, if any.
    """
    require("study", "report", study)
    require("report", "report", study)
    page = check_out("out", out, "", MARK, "comparison")
    options = CompareOptions(accept_changed_code=accept_changed_code, format="html")
    listing = _listing_of([study], options)
    charts = page.with_name(f"{page.stem}-figures")
    if figures is not None:
        drawn = {name: figure for name, (figure, _) in listing.pictures.items()}
        vector.write(drawn, charts, figures, MARK)
    write_listing(listing, "html", out)
    return charts if figures is not None else None


@contextlib.contextmanager
def open_runs(
    names: Sequence[str],
    options: CompareOptions,
) -> Iterator[tuple[DataFrame, list[str], Path]]:
    """Context manager: yield the table of runs (`scores.read`), notes on it, and the folder of the
    study or of the first run.

    Args:
        names: a study's folder, an archive, or run folders. An archive is unpacked to a temporary
            folder, which is deleted when the context ends.
        options: judge, metric, and whether changed code is accepted.
    """
    require("study", "compare", names[0])
    folders = [Path(name) for name in names]
    with contextlib.ExitStack() as until:
        if len(folders) == 1 and folders[0].is_file():
            from fl_lightning.lab.study import archive

            folders = [until.enter_context(archive.unpacked(folders[0]))]
        keys = options.judge, options.metric, options.accept_changed_code
        yield *scores.read(folders, *keys), folders[0]


def write_listing(
    listing: Listing,
    form: str,
    out: str | None = None,
) -> Comparison:
    """Formats a listing as text, and writes the text to a file or returns it.

    Notes of a CSV are printed to stderr.

    Args:
        listing: the table.
        form: format of the text, a key of `listing.FORMATS`.
        out: file for the text; None: the text is part of the returned comparison.
    """
    screen = Console()
    fits = form == "table" and out is None and screen.is_terminal
    text = as_table(listing, screen.width) if fits else FORMATS[form](listing)
    if form == "csv":
        print("\n".join(listing.notes), file=sys.stderr)
    if out is not None:
        write_whole(Path(out), text)
    shown = text.removesuffix("\n") if out is None else ""
    return Comparison(listing.numbers, list(listing.notes), shown)
