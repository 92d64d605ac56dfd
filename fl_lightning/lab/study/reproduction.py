"""A study of a paper's table, run again, and the paper's numbers beside its own."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from fl_lightning.configuration.config import check, flat
from fl_lightning.configuration.files import Layer
from fl_lightning.configuration.resolve import to_settings
from fl_lightning.foundation import command
from fl_lightning.foundation.errors import RunFailed
from fl_lightning.lab.study import studyfile
from fl_lightning.lab.study.comparison import Comparison, written
from fl_lightning.lab.study.folder import PLACE, StudyFolder, default
from fl_lightning.lab.study.grid import Study
from fl_lightning.lab.study.launch import Chosen, Options, check_over, resolved, start
from fl_lightning.lab.study.listing import Listing
from fl_lightning.lab.study.papers import Printed, cells_of
from fl_lightning.lab.study.part import part_of
from fl_lightning.lab.study.reproduce import beside, listing_of


def reproduce(
    name: str,
    over: list[Layer],
    chosen: Chosen,
    options: Options,
    rounds: int | None,
    form: str,
    no_run: bool,
) -> Comparison:
    """Runs what is missing of a study, and returns its numbers beside the paper's.

    Args:
        name: of the study, or its file.
        over: settings over those of its base.
        chosen: methods, seeds and settings that are to be run; None: all.
        options: its folder, and how it is run.
        rounds: in place of the study's.
        form: of the text.
        no_run: whether to run nothing.

    Raises:
        RunFailed: runs have failed; the table of all else has been printed.
    """
    check_over(over)
    whole = Study.of(studyfile.read(name))
    cells = cells_of(whole)
    failed: RunFailed | None = None
    folder = StudyFolder(Path(options.out))
    if no_run:
        allowed = "there is no study yet; without --no-run it is run"
        check("out", options.out, bool(folder), allowed)
        for key, value in zip(
            ("methods", "seeds", "settings", "rounds"), (*chosen, rounds), strict=True
        ):
            check(key, value, value is None, "it says what to run, and no-run runs nothing")
    else:
        length: Layer = {"federation": {"rounds": rounds}}
        study, part = part_of(whole, *chosen)
        layers = over if rounds is None else [*over, length]
        with contextlib.redirect_stdout(sys.stderr):  # stdout is the table's
            try:
                print(start(study, layers, options, command.line("reproduce", name), part))
            except RunFailed as error:
                failed = error
    comparison = written(_beside_paper(whole, cells, folder, name), form)
    if failed is not None:
        print(comparison)
        raise failed
    return comparison


def _beside_paper(whole: Study, cells: list[Printed], folder: StudyFolder, name: str) -> Listing:
    changed = _changed(whole, folder)
    notes = [*changed, *_other_seeds(whole, folder)]
    title = str((whole.paper or {}).get("title") or name)
    if notes:
        title += (
            f"; NOT AS THE STUDY IS WRITTEN, and the verdicts are of this alone: {', '.join(notes)}"
        )
    return listing_of(beside(cells, folder, reasons=not changed), title, _missing(folder))


def _changed(whole: Study, folder: StudyFolder) -> list[str]:
    """Where the base of what was run is not the study's as it is written."""
    written = dict(flat(to_settings(resolved(whole)[0])))
    there = dict(flat(folder.definition().get("base")))
    skip = (*PLACE, "fabric.", "seed")
    return [
        f"{key} {there.get(key, default(key))} (the study: {written.get(key)})"
        for key in dict.fromkeys([*written, *there])
        if written.get(key) != there.get(key, default(key)) and not key.startswith(skip)
    ]


def _other_seeds(whole: Study, folder: StudyFolder) -> list[str]:
    """Whether the seeds that have been run are others than the study's."""
    run = sorted({int(cell["seed"]) for cell in folder.cells() if folder.finished(cell["folder"])})
    differ = bool(run) and set(run) != set(whole.seeds)
    return [f"seeds {_listed(run)} (the study: {_listed(whole.seeds)})"] if differ else []


def _missing(folder: StudyFolder) -> list[str]:
    runs = {cell["folder"] for cell in folder.cells()}
    missing = sum(not folder.finished(run) for run in runs)
    return [f"unfinished: {missing} of {len(runs)} runs"] if missing else []


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
