"""Audit a finished run or a study: attack it, check its privacy claims, and write the results."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fl_lightning.configuration.config import check
from fl_lightning.foundation.errors import RunFailed
from fl_lightning.foundation.extras import require
from fl_lightning.foundation.files import write_whole
from fl_lightning.lab.study.folder import StudyFolder
from fl_lightning.results.opening import check_out, config_of

if TYPE_CHECKING:
    from fl_lightning.lab.audit.attacks import AttackResult
    from fl_lightning.lab.audit.claims import PrivacyClaim
    from fl_lightning.lab.audit.observe import Observed

FILES = ("audit.json", "audit.csv", "audit.html")


@dataclass(frozen=True)
class Audit:
    """Result of an audit; `str` gives the measures over all clients, and the claims."""

    rows: list[AttackResult]
    claims: dict[str, PrivacyClaim]
    """Claims of differentially private methods, by label."""
    page: Path

    def __str__(self) -> str:
        lines = [
            f"{row.method}: {row.viewer}: {row.attack}: {row.measure} {row.value:.3f} "
            f"({row.low:.3f} to {row.high:.3f})"
            for row in self.rows
            if row.measure.startswith(("AUC", "rank correlation"))
            and "layer " not in row.measure
            and not math.isnan(row.low)
        ]
        lines += [claim.sentence(label) for label, claim in self.claims.items()]
        return "\n".join([*lines, f"the page: {self.page}"])


def audit(folder: Path, out: Path) -> Audit:
    """Attack one run, or all runs of a study, and write `audit.json`, `audit.csv` and `audit.html`.

    Args:
        folder: folder of the run or study.
        out: folder for the three files.

    Raises:
        BadInput: `folder` is no finished run and no study with one, or `out` is not free.
        RunFailed: guesses on canaries (samples or clients that were included by a coin flip) refute
            a method's claimed epsilon; the files have been written.
    """
    check("audit", str(folder), folder.is_dir(), "there is no such folder; correct the path")
    is_free = not out.exists() or out.is_dir()
    check("out", str(out), is_free, "it is a file; name a folder")
    require("report", "audit", str(folder))
    folders_by_label = _runs(folder)
    from fl_lightning.lab.audit import page
    from fl_lightning.lab.audit.claims import pooled_claim

    _check_out(out, page.MARKER)
    rows: list[AttackResult] = []
    notes: list[str] = []
    claims: dict[str, PrivacyClaim] = {}
    labels_without: dict[str, list[str]] = defaultdict(list)
    for label, runs in _labels_with_runs(folders_by_label):
        claim = pooled_claim([run.privacy for run in runs])
        if claim is not None:
            claims[label] = claim
        rows += _attack(runs)
        notes += _notes(label, runs)
        for viewer, values in runs[-1].samples.confidence.items():
            if (values != values).any():  # NaN: the viewer has no model
                labels_without[viewer].append(label)
    notes += [
        f"No whole model is kept or sent for {viewer}: {', '.join(labels)}."
        for viewer, labels in labels_without.items()
    ]
    texts = {
        "audit.json": page.as_json(rows, claims),
        "audit.csv": page.as_csv(rows),
        "audit.html": page.as_html(rows, folder.name, claims, notes),
    }
    for name, text in texts.items():
        write_whole(out / name, text)
    audited = Audit(rows, claims, out / FILES[-1])
    if broken := [label for label, claim in claims.items() if claim.broken]:
        print(audited)  # since the command ends with the error
        raise RunFailed(
            f"audit: {broken[0]} claims a smaller epsilon than its canaries allow; see "
            f"{audited.page}"
        )
    return audited


def _labels_with_runs(
    folders_by_label: dict[str, list[Path]],
) -> Iterator[tuple[str, list[Observed]]]:
    """Yield each label with its runs; a run of several labels is read once."""
    from fl_lightning.lab.audit.observe import observe

    by_folder: dict[Path, Observed] = {}
    for label, folders in folders_by_label.items():
        for folder in folders:
            if folder not in by_folder:
                print(f"audit: {folder}", file=sys.stderr)
                by_folder[folder] = observe(config_of(folder), folder)
        yield label, [replace(by_folder[folder], method=label) for folder in folders]


def _attack(runs: list[Observed]) -> list[AttackResult]:
    """Run all attacks on the runs of one method: LiRA on all, the others on the last run."""
    from fl_lightning.lab.audit import attacks

    last = runs[-1]
    rows = attacks.lira(runs) if len(runs) > 2 else []
    return [
        *rows,
        *attacks.loss_threshold(last),
        *attacks.relations(last),
        *attacks.label_mixes(last),
    ]


def _notes(label: str, runs: list[Observed]) -> list[str]:
    """Note which attacks on the runs of one method were not possible, or only in part."""
    from fl_lightning.lab.audit import attacks

    notes, last = [], runs[-1]
    if len(runs) == 2:
        notes.append("2 runs, and LiRA needs 3 at least, of other seeds.")
    if len({tuple(run.rounds) for run in runs}) > 1:
        notes.append(
            "its runs have kept models of different rounds: LiRA goes by the last round alone."
        )
    notes += attacks.untestable_groups(last)
    if last.flipped:
        flipped = f"{len(last.flipped)} of {len(last.counts)}"
        notes.append(f"{flipped} clients {attacks.FLIPPED}.")
    return [f"{label}: {note}" for note in notes]


def _check_out(out: Path, marker: str) -> None:
    """Refuse an `out` with files of these names that no audit has written: an audit's page contains
    `marker`, and tables beside such a page are an audit's."""
    if not out.exists():
        return
    has_page = check_out(
        "out",
        str(out / FILES[-1]),
        "",
        marker,
        "audit",
    ).exists()
    for name in FILES[:-1]:
        table = out / name
        check(
            "out",
            str(table),
            has_page or not table.exists(),
            "it exists and is no audit, so it is not overwritten; give another --out",
        )


def _runs(folder: Path) -> dict[str, list[Path]]:
    """List folders of finished runs: a single run by its name; runs of a study, one for each seed,
    by the method's label and setting."""
    study = StudyFolder(folder)
    if not study:
        is_finished = (folder / "summary.json").is_file()
        check(
            "audit",
            str(folder),
            is_finished,
            "it is neither a study nor a finished run; name one of these",
        )
        return {folder.name: [folder]}
    folders_by_label: dict[str, list[Path]] = defaultdict(list)
    for cell in study.cells():
        setting = ", ".join(f"{key}={value}" for key, value in cell["setting"].items())
        if study.finished(cell["folder"]):
            name = f"{cell['label']} ({setting})" if setting else cell["label"]
            folders_by_label[name].append(folder / cell["folder"])
    check(
        "audit",
        str(folder),
        bool(folders_by_label),
        "no run of this study has finished; finish one first",
    )
    return folders_by_label
