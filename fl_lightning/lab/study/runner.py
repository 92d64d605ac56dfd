"""Prints the end of each run of a study, and records failures."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Sequence

from fl_lightning.foundation.errors import RunFailed
from fl_lightning.lab.study.board import describe_run, state_of
from fl_lightning.lab.study.folder import StudyFolder
from fl_lightning.lab.study.grid import StudyRun
from fl_lightning.lab.study.workers import EndedJob

NAMED = 3
"""Failed runs that the last line names."""


def follow(
    folder: StudyFolder,
    runs: Sequence[StudyRun],
    all_ended: Generator[EndedJob, None, None],
    total: int,
) -> None:
    """Print a line for each run as it ends, and record failures in the study's folder.

    Args:
        folder: the study's folder.
        runs: the runs that are trained, in the order of their jobs.
        all_ended: the generator of `workers.serve_all`.
        total: number of runs asked for, including those that had finished before.

    Raises:
        RunFailed: some runs failed; all others were trained.
    """
    names = [run.folder for run in runs]
    # without those that are tried again
    earlier = {name: why for name, why in folder.failures().items() if name not in names}
    failures: dict[str, str] = {}
    folder.write_failures(earlier)
    number = total - len(runs)
    with contextlib.closing(all_ended):
        for ended in all_ended:
            cells = runs[ended.job].cells()
            if ended.error is None:
                number += 1
                states = [state_of(folder, cell, lambda run: None) for cell in cells]
                scores = ", ".join(f"{state.shown_score} ({state.judge})" for state in states)
                line = (
                    f"[{number}/{total}] {describe_run(cells)}: {scores}, {states[0].seconds:.1f} s"
                )
            else:
                failures[names[ended.job]] = ended.error
                folder.write_failures(earlier | failures)
                line = f"{describe_run(cells)} failed: {ended.error}"
            print(line, file=sys.stderr, flush=True)
    if failures:
        failed = [describe_run(run.cells()) for run in runs if run.folder in failures]
        others = f"; and {len(failed) - NAMED} more" if len(failed) > NAMED else ""
        first_reason = next(iter(failures.values()))
        raise RunFailed(
            f"{len(failed)} of {total} runs failed ({'; '.join(failed[:NAMED])}{others}), "
            f"the first: {first_reason}; the same command tries them again"
        )
