"""What a finished run, or a study, tells of its clients' data, by viewer."""

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
    """What attacks on finished runs measure; `str` gives the overall measures."""

    rows: list[AttackResult]
    claims: dict[str, PrivacyClaim]
    """Of differentially private methods, by label: the claimed epsilon, and what canaries allow."""
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
        lines += [claim.words(label) for label, claim in self.claims.items()]
        return "\n".join([*lines, f"the page: {self.page}"])


def audit(folder: Path, out: Path) -> Audit:
    """Attacks the models of one run, or of all runs of a study; writes the findings to
    `audit.json`, `audit.csv` and `audit.html`.

    Raises:
        RunFailed: a method claims a smaller epsilon than its canaries allow; all has been written.
    """
    check("audit", str(folder), folder.is_dir(), "there is no such folder")
    check(
        "out",
        str(out),
        not out.exists() or out.is_dir(),
        "it is no folder",
    )
    require("report", "audit", str(folder))
    listed = _runs(folder)
    from fl_lightning.lab.audit import page
    from fl_lightning.lab.audit.claims import claimed

    _check_out(out, page.MARKER)
    rows: list[AttackResult] = []
    notes: list[str] = []
    claims: dict[str, PrivacyClaim] = {}
    labels_without: dict[str, list[str]] = defaultdict(list)
    for label, runs in _labels_with_runs(listed):
        claim = claimed([run.privacy for run in runs])
        if claim is not None:
            claims[label] = claim
        rows += _attacked(label, runs)
        notes += _notes(label, runs)
        for view, values in runs[-1].samples.confidence.items():
            if (values != values).any():  # NaN: there is no such model
                labels_without[view].append(label)
    notes += [
        f"No whole model is kept or sent for {view}: {', '.join(labels)}."
        for view, labels in labels_without.items()
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
        print(audited)  # the command would not: it ends with the error
        claim_of = f"{broken[0]} claims a smaller epsilon than its canaries allow"
        raise RunFailed(f"audit: {claim_of}: see {audited.page}")
    return audited


def _labels_with_runs(listed: dict[str, list[Path]]) -> Iterator[tuple[str, list[Observed]]]:
    """Yields each label with its runs; rows of a study share runs, which are read once."""
    from fl_lightning.lab.audit.observe import observed

    by_place: dict[Path, Observed] = {}
    for label, places in listed.items():
        for place in places:
            if place not in by_place:
                print(f"audit: {place}", file=sys.stderr)
                by_place[place] = observed(config_of(place), place)
        yield label, [replace(by_place[place], method=label) for place in places]


def _attacked(label: str, runs: list[Observed]) -> list[AttackResult]:
    """The findings of all attacks on the runs of one method."""
    from fl_lightning.lab.audit import attacks

    last = runs[-1]  # one run: the others would be more of the same
    rows = attacks.lira(runs) if len(runs) > 2 else []
    return [
        *rows,
        *attacks.thresholds(last),
        *attacks.relations(last),
        *attacks.label_mixes(last),
    ]


def _notes(label: str, runs: list[Observed]) -> list[str]:
    """Notes on what attacks on the runs of one method cannot measure."""
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
    """Raise `BadInput` where a file that would be written over is not an audit's: a page has its
    marker, and tables count as an audit's beside such a page."""
    if not out.exists():
        return
    has_page = check_out(
        "out",
        str(out / FILES[-1]),
        "",
        marker,
        "audit",
    ).exists()
    requirement = "it exists and is no audit, and is not written over: give another --out"
    for name in FILES[:-1]:
        table = out / name
        check(
            "out",
            str(table),
            has_page or not table.exists(),
            requirement,
        )


def _runs(folder: Path) -> dict[str, list[Path]]:
    """Finished runs by label (and setting): one of a run folder, all seeds of each row of a
    study."""
    study = StudyFolder(folder)
    if not study:
        is_finished = (folder / "summary.json").is_file()
        check(
            "audit",
            str(folder),
            is_finished,
            "it is neither a study nor a finished run",
        )
        return {folder.name: [folder]}
    listed: dict[str, list[Path]] = defaultdict(list)
    for cell in study.cells():
        setting = ", ".join(f"{key}={value}" for key, value in cell["setting"].items())
        if study.finished(cell["folder"]):
            name = f"{cell['label']} ({setting})" if setting else cell["label"]
            listed[name].append(folder / cell["folder"])
    check(
        "audit",
        str(folder),
        bool(listed),
        "no run of this study has ended",
    )
    return listed
