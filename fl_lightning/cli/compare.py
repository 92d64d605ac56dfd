"""`fl-train compare`: methods over seeds, in one table that a reader can trust."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pandas import DataFrame
from rich.console import Console

from fl_lightning.cli.folder import check_out
from fl_lightning.cli.settings import read_line, values_of
from fl_lightning.configuration.config import check
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.extras import require
from fl_lightning.foundation.files import write_whole
from fl_lightning.lab.report import vector
from fl_lightning.lab.statistics import MIN_PAIRS
from fl_lightning.lab.study import clients, picture, scores, tables
from fl_lightning.lab.study.chosen import chosen as values_chosen
from fl_lightning.lab.study.compare import MIN_METHODS, Comparison
from fl_lightning.lab.study.compare import compare as of_methods
from fl_lightning.lab.study.listing import FORMATS, Listing, choose
from fl_lightning.lab.study.listing import table as as_table
from fl_lightning.lab.study.tables import MARK


def compare(argv: list[str]) -> None:
    """Print, or write to `--out`, the comparison of a study's methods or of run folders."""
    line = read_line(argv, "compare")
    words, values = line.words, line.values
    listing = listing_of(words, values)
    listing = listing if values.columns is None else choose(listing, values.columns)
    listing = dataclasses.replace(listing, caption=values.caption or "", label=values.label or "")
    write(listing, values.format, values.out)


def listing_of(words: list[str], values: Any) -> Listing:
    """The table that a command line, or a script, asks for; a picture is written at once, for the
    page it is drawn.

    Raises:
        BadInput: a key that has no effect beside the others, a file that is not written over, or as
            `read`.
    """
    _check(words, values)
    with read(words, values) as (scored, notes, folder):
        if values.clients:
            listing = clients.listing_of(scored, values.baseline)
            return dataclasses.replace(listing, notes=[*notes, *listing.notes])
        compared = side_by_side(scored, notes, folder, values.baseline, values.target)
        if values.picture is not None:
            few = (
                f"ranks need at least {MIN_PAIRS} settings and {MIN_METHODS} methods with the same "
                f"judge"
            )
            allowed = f"{few}; without --picture the table says how many there are"
            check("picture", values.picture, bool(compared.ranks), allowed)
            drawn = vector.image("ranks", picture.draw_ranks(compared.ranks), "png", MARK)
            write_whole(Path(values.picture), drawn, durable=False)
        listing = tables.listing_of(compared)
        if values.format != "html":
            return listing
        pictures = picture.as_svg(picture.draw(scored, compared))
        return dataclasses.replace(listing, pictures=pictures)


def _check(words: list[str], values: Any) -> None:
    """Raise `BadInput` without a word, for keys that do not go together, and for files that may not
    be written."""
    check(
        "compare", None, bool(words), "it must be given: fl-train compare STUDY, or RUN [RUN ...]"
    )
    for key, suffix in (("out", ""), ("picture", ".png")):
        if values[key] is not None:
            check_out(key, values[key], suffix, MARK, "comparison")
    apiece = (
        None in (values.out, values.picture)
        or Path(values.out).resolve() != Path(values.picture).resolve()
    )
    check(
        "picture",
        values.picture,
        apiece,
        "the table is written there (--out): it must be another file",
    )
    for key in ("picture", "target") if values.clients else ():
        check(
            key,
            values[key],
            values[key] is None,
            "it is of methods over seeds: leave out --clients",
        )
    for key in ("caption", "label") if values.format != "latex" else ():
        check(key, values[key], values[key] is None, "it is for --format latex")
    lists = values.format in ("csv", "json")
    check(
        "columns",
        values.columns,
        values.columns is None or not lists,
        f"{values.format} has all columns",
    )
    if values.picture is not None or values.format == "html":
        require("report", "compare", words[0])


def report(study: str, values: Any) -> None:
    """Write the page on a study, by default into its folder, and with `--figures` each picture to a
    file of its own."""
    require("study", "report", study)
    require("report", "report", study)
    given = str(Path(study) / "report.html") if values.out is None else values.out
    out = check_out("out", given, "", MARK, "comparison")
    defaults = values_of("compare", [{"accept_changed_code": values.accept_changed_code}])
    with read([study], defaults) as (scored, notes, folder):
        compared = side_by_side(scored, notes, folder)
        drawn = picture.draw(scored, compared)
        listing = tables.listing_of(compared)
        listing = dataclasses.replace(listing, pictures=picture.as_svg(drawn))
    figures = out.with_name(f"{out.stem}-figures")
    if values.figures is not None:
        pictures = {name: figure for name, (figure, _) in drawn.items()}
        vector.write(pictures, figures, values.figures, MARK)
    write(listing, "html", str(out))
    print(f"report: {out}" + (f"\nfigures: {figures}" if values.figures is not None else ""))


@contextlib.contextmanager
def read(words: list[str], values: Any) -> Iterator[tuple[DataFrame, list[str], Path]]:
    """The cells of a study, an archive or run folders, what is to be said of them, and the first
    folder."""
    require("study", "compare", words[0])
    folders = [Path(word) for word in words]
    with contextlib.ExitStack() as until:
        if len(folders) == 1 and folders[0].is_file():
            from fl_lightning.lab.study import archive

            folders = [until.enter_context(archive.unpacked(folders[0]))]
        keys = values.judge, values.metric, values.accept_changed_code
        scored, notes = scores.read(folders, *keys)
        yield scored, notes, folders[0]


def side_by_side(
    scored: DataFrame,
    notes: list[str],
    folder: Path,
    baseline: str | None = None,
    target: float | None = None,
) -> Comparison:
    """The comparison of cells, with the values that `fl-train tune` chose for the study in
    `folder`."""
    try:
        compared = of_methods(scored, baseline, target)
    except BadInput:  # such as no pairs, since runs are left out
        print("".join(f"{note}\n" for note in notes), end="", file=sys.stderr)
        raise
    chosen, warnings = values_chosen(folder)
    compared.table["chosen"] = compared.table.method.map(chosen)
    compared.notes[:0] = [*notes, *warnings]
    return compared


def write(listing: Listing, form: str, given: str | None = None) -> None:
    """Write a table to the file `given` or to the screen; of a CSV, the lines below the table go to
    stderr."""
    screen = Console()
    fits = form == "table" and given is None and screen.is_terminal
    text = as_table(listing, screen.width) if fits else FORMATS[form](listing)
    if given is None:
        print(text, end="")
    else:
        write_whole(Path(given), text)
    if form == "csv":
        print("\n".join(listing.notes), file=sys.stderr)
