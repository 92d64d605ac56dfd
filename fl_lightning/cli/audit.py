"""`fl-train audit`: what a finished run, or a study, tells of its clients' data, by viewer."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fl_lightning.cli.commands import load
from fl_lightning.cli.folder import check_out
from fl_lightning.cli.settings import read_line
from fl_lightning.configuration.config import check
from fl_lightning.foundation.errors import RunFailed
from fl_lightning.foundation.files import write_whole
from fl_lightning.lab.study.folder import StudyFolder

if TYPE_CHECKING:
    from fl_lightning.lab.audit.attacks import Finding
    from fl_lightning.lab.audit.claims import Claim
    from fl_lightning.lab.audit.observe import Observed

FILES = ("audit.json", "audit.csv", "audit.html")


def audit(argv: list[str]) -> None:
    """Look at the models of one run, or of all runs of a study, and write what they tell."""
    line = read_line(argv, "audit")
    check(
        "audit",
        line.words,
        len(line.words) == 1,
        "one run folder, or one study: fl-train audit DIR --out DIR",
    )
    folder, out = Path(line.words[0]), Path(line.values.out)
    check("audit", str(folder), folder.is_dir(), "there is no such folder")
    check("out", str(out), not out.exists() or out.is_dir(), "it is no folder")
    listed = _runs(folder)
    from fl_lightning.lab.audit import page
    from fl_lightning.lab.audit.claims import claimed
    from fl_lightning.lab.audit.observe import observed

    _check_out(out, page.MARKER)
    rows: list[Finding] = []
    notes: list[str] = []
    claims: dict[str, Claim] = {}
    unseen: dict[str, list[str]] = {}
    seen: dict[Path, Observed] = {}  # rows of a study share runs
    for label, places in listed.items():
        runs: list[Observed] = []
        for place in places:
            if place not in seen:
                print(f"audit: {place}", file=sys.stderr)
                seen[place] = observed(load(place), place)
            runs.append(replace(seen[place], method=label))
        claim = claimed([run.privacy for run in runs])
        claims |= {label: claim} if claim is not None else {}
        row, note = _attacked(label, runs)
        rows += row
        notes += note
        last = runs[-1]
        for view, values in last.samples.confidence.items():
            if (values != values).any():
                unseen.setdefault(view, []).append(label)
    notes += [
        f"No whole model is kept or sent for {view}: {', '.join(labels)}."
        for view, labels in unseen.items()
    ]
    texts = (
        page.as_json(rows, claims),
        page.as_csv(rows),
        page.as_html(rows, folder.name, claims, notes),
    )
    for name, text in zip(FILES, texts, strict=True):
        write_whole(out / name, text)
    _print(rows)
    for label, claim in claims.items():
        print(claim.words(label))
    print(f"the page: {out / FILES[-1]}")
    if false := [label for label, claim in claims.items() if claim.broken]:
        raise RunFailed(
            f"audit: {false[0]} claims a smaller epsilon than its canaries allow: see "
            f"{out / FILES[-1]}"
        )


def _attacked(label: str, runs: list[Observed]) -> tuple[list[Finding], list[str]]:
    """What attacks on the runs of one method measure, and notes on what they could not."""
    from fl_lightning.lab.audit import attacks

    notes = []
    if 1 < len(runs) < 3:
        notes.append(f"{label}: {len(runs)} runs, and LiRA needs 3 at least, of other seeds.")
    if len({tuple(run.rounds) for run in runs}) > 1:
        notes.append(
            f"{label}: its runs have kept models of different rounds: LiRA goes by the last round "
            "alone."
        )
    last = runs[-1]  # one run: the others would be more of the same
    notes += [f"{label}: {why}" for why in attacks.too_few(last)]
    if last.flipped:
        flipped = f"{len(last.flipped)} of {len(last.counts)}"
        notes.append(f"{label}: {flipped} clients {attacks.FLIPPED}.")
    rows = attacks.lira(runs) if len(runs) > 2 else []
    rows += attacks.thresholds(last) + attacks.relations(last) + attacks.label_mixes(last)
    return rows, notes


def _print(rows: list[Finding]) -> None:
    """Print the attacks' overall measures, those by layer aside."""
    for row in rows:
        if (
            row.measure.startswith(("AUC", "rank correlation"))
            and "layer " not in row.measure
            and row.low == row.low
        ):
            interval = f"({row.low:.3f} to {row.high:.3f})"
            print(
                f"{row.method}: {row.viewer}: {row.attack}: {row.measure} {row.value:.3f} "
                f"{interval}"
            )


def _check_out(out: Path, marker: str) -> None:
    """Raise `BadInput` where a file that would be written is not an audit's: tables are, beside a
    page that is one."""
    if not out.exists():
        return
    ours = check_out("out", str(out / FILES[-1]), "", marker, "audit").exists()
    for table in (out / name for name in FILES[:-1]):
        check(
            "out",
            str(table),
            ours or not table.exists(),
            "it exists and is no audit, and is not written over",
        )


def _runs(folder: Path) -> dict[str, list[Path]]:
    """Finished runs by label (and setting): one of a run folder, all seeds of each row of a
    study."""
    study = StudyFolder(folder)
    if not study:
        check(
            "audit",
            str(folder),
            (folder / "summary.json").is_file(),
            "it is neither a study nor a finished run",
        )
        return {folder.name: [folder]}
    listed: dict[str, list[Path]] = {}
    for cell in study.cells():
        setting = ", ".join(f"{key}={value}" for key, value in cell["setting"].items())
        if study.finished(cell["folder"]):
            name = f"{cell['label']} ({setting})" if setting else cell["label"]
            listed.setdefault(name, []).append(folder / cell["folder"])
    check("audit", str(folder), bool(listed), "no run of this study has ended")
    return listed
