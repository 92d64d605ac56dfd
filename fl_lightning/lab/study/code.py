"""Own code that changes under a study: refused, or accepted and said below the table."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from fl_lightning.configuration.config import Config, check
from fl_lightning.foundation.files import write_whole
from fl_lightning.lab.study.folder import StudyFolder
from fl_lightning.lab.study.grid import Run
from fl_lightning.results import owncode

if TYPE_CHECKING:
    from pandas import DataFrame

ACCEPTED = "changed_code.json"
"""In a study's folder: for each file of own code, the SHA-256 of versions that
`--accept_changed_code` let in."""
Versions = dict[str, list[str]]


def accepted(folder: Path) -> Versions:
    """What `changed_code.json` holds; nothing where there is none."""
    try:
        content = json.loads((folder / ACCEPTED).read_text(encoding="utf-8"))
        return {str(name): [str(digest) for digest in digests] for name, digests in content.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def changes(folder: StudyFolder, todo: Collection[tuple[Run, Config]]) -> dict[str, str]:
    """Files of own code that runs of the study were trained with in another version than `todo`
    would execute.

    All code of runs of the same row counts, of other rows that of models and data, which all rows
    have in common. Accepted versions do not count.

    Returns:
        SHA-256 of the version now, by file.
    """
    cells = {str(cell["folder"]) for cell in folder.cells()} if folder else set()
    begun = [name for name in sorted(cells) if (folder.path / name / "metrics.csv").is_file()]
    before = {(_row(name), tuple(owncode.recorded(folder.path / name).items())) for name in begun}
    known, changed = accepted(folder.path), dict[str, str]()
    own, shared = (
        {(_row(run.folder), owncode.paths(config, parts)) for run, config in todo}
        for parts in (owncode.COMPUTES, owncode.SHARED)
    )
    for (row, named), whole in [*((key, True) for key in own), *((key, False) for key in shared)]:
        now = owncode.digests(owncode.read(named))
        for other, code in before:
            names = owncode.changed(dict(code), now) if other == row or not whole else []
            changed |= {name: now[name] for name in names if now[name] not in known.get(name, [])}
    return changed


def check_same(folder: StudyFolder, todo: Collection[tuple[Run, Config]], accept: bool) -> None:
    """Raise `BadInput` for `changes`, unless `accept`."""
    names = ", ".join(changes(folder, todo))
    allowed = (
        f"runs in {folder.path} were trained with another version (their folders' source/ has it): "
        f"change it back, "
        "give the study another --out, or go on with --accept_changed_code, which tables then say"
    )
    check("code", names, accept or not names, allowed)


def accept(folder: StudyFolder, todo: Collection[tuple[Run, Config]]) -> None:
    """Add `changes` to the versions that are accepted."""
    new, known = changes(folder, todo), accepted(folder.path)
    if new:
        whole = known | {name: [*known.get(name, []), digest] for name, digest in new.items()}
        write_whole(folder.path / ACCEPTED, json.dumps(whole, indent=1) + "\n")


def flag(place: Path, config: Config) -> list[str]:
    """What a job's command line needs beside the run's name, where the run in `place` goes on with
    accepted code."""
    begun = (place / "metrics.csv").is_file()
    return (
        ["--accept_changed_code"]
        if begun and owncode.changed(owncode.recorded(place), owncode.now(config))
        else []
    )


def _row(name: str) -> str:
    """The label's part of a run folder's name within the study."""
    return name.split("/")[-2]


# ---------------------------------------------------------------- in a table


def check_rows(runs: DataFrame, known: Versions, accept: bool) -> list[str]:
    """Notes on own code of which runs of a table had several versions.

    Args:
        runs: as `scores.read` has them.
        known: versions that the study has accepted.
        accept: all versions are.

    Raises:
        BadInput: runs of a row had versions that nobody has accepted.
    """
    from pandas import DataFrame

    accepted = {(name, digest) for name, digests in known.items() for digest in digests}
    trained = []
    for run in runs.itertuples():
        for version in owncode.versions(run.run.folder):
            accepted |= {(name, version["code"][name]) for name in version["changed"]}
            trained += [(run.method, name, run.seed, d) for name, d in version["code"].items()]
    table = DataFrame(trained, columns=["method", "name", "seed", "digest"])
    notes = []
    for (label, name), rows in table.groupby(["method", "name"], sort=False):
        digests = rows.digest.unique()
        strange = [digest for digest in digests if (name, digest) not in accepted]
        count = f"{len(digests)} versions of {name} (their folders' source/ has them)"
        versions = f"its runs were trained with {count}"
        allowed = f"{versions}; --accept_changed_code compares them all the same"
        check("compare", label, accept or len(strange) < 2, allowed)
        if len(digests) > 1:
            seeds = rows.groupby("digest", sort=False).seed.unique()
            listed = "; ".join(
                f"seeds {', '.join(map(str, sorted(of)))} with {digest[:8]}"
                for digest, of in seeds.items()
            )
            notes.append(f"{label}: {versions}: {listed}")
    numbers = table.groupby("name").digest.nunique()
    apart = sorted(numbers[numbers > 1].index)
    if apart and not notes:
        notes.append(f"rows were trained with different versions of {', '.join(apart)}")
    return notes
