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
from fl_lightning.lab.study.comparison import Comparison, write
from fl_lightning.lab.study.folder import PLACE, StudyFolder, default
from fl_lightning.lab.study.grid import Study
from fl_lightning.lab.study.launch import Options, Selection, check_over, resolved, start
from fl_lightning.lab.study.listing import Listing
from fl_lightning.lab.study.papers import Printed, cells_of
from fl_lightning.lab.study.part import part_of
from fl_lightning.lab.study.reproduce import beside, listing_of


def reproduce(
    name: str,
    over: list[Layer],
    chosen: Selection,
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
    study = Study.of(studyfile.read(name))
    cells = cells_of(study)
    failure: RunFailed | None = None
    folder = StudyFolder(Path(options.out))
    if no_run:
        requirement = "there is no study yet; without --no-run it is run"
        check("out", options.out, bool(folder), requirement)
        keys = zip(("methods", "seeds", "settings", "rounds"), (*chosen, rounds), strict=True)
        for key, value in keys:
            check(key, value, value is None, "it says what to run, and no-run runs nothing")
    else:
        length: list[Layer] = [] if rounds is None else [{"federation": {"rounds": rounds}}]
        definition, part = part_of(study, *chosen)
        line = command.line("reproduce", name)
        with contextlib.redirect_stdout(sys.stderr):  # stdout is the table's
            try:
                print(start(definition, [*over, *length], options, line, part))
            except RunFailed as error:
                failure = error
    comparison = write(_beside_paper(study, cells, folder, name), form)
    if failure is not None:
        print(comparison)
        raise failure
    return comparison


def _beside_paper(
    study: Study,
    cells: list[Printed],
    folder: StudyFolder,
    name: str,
) -> Listing:
    changes = _changed(study, folder)
    notes = [*changes, *_other_seeds(study, folder)]
    title = str((study.paper or {}).get("title") or name)
    if notes:
        title += "; NOT AS THE STUDY IS WRITTEN, and the verdicts are of this alone: "
        title += ", ".join(notes)
    return listing_of(beside(cells, folder, reasons=not changes), title, _missing(folder))


def _changed(study: Study, folder: StudyFolder) -> list[str]:
    """The keys whose values differ between the base of what was run and the study's."""
    base, _ = resolved(study)
    written = dict(flat(to_settings(base)))
    run = dict(flat(folder.definition().get("base")))
    changes = []
    for key in dict.fromkeys([*written, *run]):
        value = run.get(key, default(key))
        may_differ = key.startswith((*PLACE, "fabric.", "seed"))
        if written.get(key) != value and not may_differ:
            changes.append(f"{key} {value} (the study: {written.get(key)})")
    return changes


def _other_seeds(study: Study, folder: StudyFolder) -> list[str]:
    """A note where the seeds that have been run are others than the study's."""
    seeds = {int(cell["seed"]) for cell in folder.cells() if folder.finished(cell["folder"])}
    differ = bool(seeds) and seeds != set(study.seeds)
    return [f"seeds {_listed(sorted(seeds))} (the study: {_listed(study.seeds)})"] if differ else []


def _missing(folder: StudyFolder) -> list[str]:
    names = folder.run_names()
    missing = sum(not folder.finished(name) for name in names)
    return [f"unfinished: {missing} of {len(names)} runs"] if missing else []


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
