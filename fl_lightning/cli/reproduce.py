"""`fl-train reproduce`: a study that ships with the package, and the paper's numbers beside its
own."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

from fl_lightning.cli import studyfile
from fl_lightning.cli.resolve import to_settings
from fl_lightning.cli.settings import Layer
from fl_lightning.cli.study import resolve, start, study_line
from fl_lightning.configuration.config import check, flat
from fl_lightning.foundation.errors import RunFailed
from fl_lightning.lab.study.folder import PLACE, StudyFolder, default
from fl_lightning.lab.study.grid import Study
from fl_lightning.lab.study.papers import cells_of
from fl_lightning.lab.study.part import part_of


def reproduce(argv: list[str]) -> None:
    """Run what is missing of a study, then print its numbers beside the paper's."""
    name, values, over = study_line(argv, "reproduce")
    whole = Study.of(studyfile.read(name))
    cells = cells_of(whole)
    if values.out is None:
        values.out = str(Path("studies") / name.removesuffix(".yaml").replace("/", "-"))
    failed: RunFailed | None = None
    if values.no_run:
        folder = StudyFolder(Path(values.out))
        check("out", values.out, bool(folder), "there is no study yet; without --no-run it is run")
        for key in ("methods", "seeds", "settings", "rounds"):
            value = getattr(values, key)
            check(key, value, value is None, "it says what to run, and no-run runs nothing")
    else:
        over += [{"federation": {"rounds": values.rounds}}] if values.rounds is not None else []
        folder, failed = _run(whole, over, values, ["fl-train", "reproduce", *argv])
    from fl_lightning.cli.compare import write
    from fl_lightning.lab.study.reproduce import beside, listing_of

    changed = _changed(whole, folder)
    notes = [*changed, *_other_seeds(whole, folder)]
    title = str((whole.paper or {}).get("title") or name)
    if notes:
        title += (
            f"; NOT AS THE STUDY IS WRITTEN, and the verdicts are of this alone: {', '.join(notes)}"
        )
    lines = beside(cells, folder, reasons=not changed)
    write(listing_of(lines, title, _missing(folder)), values.format)
    if failed is not None:
        raise failed


def _run(
    whole: Study, over: list[Layer], values: Any, line: list[str]
) -> tuple[StudyFolder, RunFailed | None]:
    """The study's folder once it has run; and what failed, for the table of all else comes
    first."""
    values.slurm = False
    study, part = part_of(whole, values.methods, values.seeds, values.settings)
    with contextlib.redirect_stdout(sys.stderr):  # stdout is the table's
        try:
            return start(study, over, values, line, part), None
        except RunFailed as error:
            return StudyFolder(Path(values.out)), error


def _changed(whole: Study, folder: StudyFolder) -> list[str]:
    """Where the base of what was run is not the study's as it is written."""
    written = dict(flat(to_settings(resolve(whole)[0])))
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
