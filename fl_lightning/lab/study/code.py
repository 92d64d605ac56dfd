"""Own code that changes under a study: refused, or accepted and said below the table."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from fl_lightning.configuration.config import Config, check
from fl_lightning.foundation.files import write_whole
from fl_lightning.lab.study.folder import StudyFolder
from fl_lightning.lab.study.grid import StudyRun
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
        return {str(name): list(map(str, digests)) for name, digests in content.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def changes(
    folder: StudyFolder,
    todo: Collection[tuple[StudyRun, Config]],
) -> dict[str, str]:
    """Files of own code that runs of the study were trained with in another version than `todo`
    would execute.

    All code of runs of the same row counts, of other rows that of models and data, which all rows
    have in common. Accepted versions do not count.

    Returns:
        SHA-256 of the version now, by file.
    """
    names = folder.run_names() if folder else []
    begun = [name for name in names if _has_begun(folder.path / name)]
    before = set()
    for name in begun:
        digests = owncode.recorded(folder.path / name)
        before.add((_row(name), tuple(digests.items())))
    let_in, changed = accepted(folder.path), dict[str, str]()
    for parts in (owncode.COMPUTES, owncode.SHARED):
        paths = {(_row(run.folder), owncode.paths(config, parts)) for run, config in todo}
        for row, path in paths:
            now = owncode.digests(owncode.read(path))
            for earlier_row, code in before:
                # code beside models and data is a row's own
                if earlier_row == row or parts == owncode.SHARED:
                    for name in owncode.changed(dict(code), now):
                        if now[name] not in let_in.get(name, []):
                            changed[name] = now[name]
    return changed


def _has_begun(run: Path) -> bool:
    return (run / "metrics.csv").is_file()


def check_same(
    folder: StudyFolder,
    todo: Collection[tuple[StudyRun, Config]],
    accept: bool,
) -> None:
    """Raise `BadInput` for `changes`, unless `accept`."""
    names = ", ".join(changes(folder, todo))
    check(
        "code",
        names,
        accept or not names,
        f"runs in {folder.path} were trained with another version (their folders' source/ has it): "
        "change it back, give the study another --out, or go on with --accept_changed_code, which "
        "tables then say",
    )


def accept(
    folder: StudyFolder,
    todo: Collection[tuple[StudyRun, Config]],
) -> None:
    """Add `changes` to the versions that are accepted."""
    new, versions = changes(folder, todo), accepted(folder.path)
    for name, digest in new.items():
        versions.setdefault(name, []).append(digest)
    if new:
        write_whole(folder.path / ACCEPTED, json.dumps(versions, indent=1) + "\n")


def flag(place: Path, config: Config) -> list[str]:
    """What a job's command line needs beside the run's name, where the run in `place` goes on with
    accepted code."""
    has_begun = _has_begun(place)
    differs = has_begun and owncode.changed(owncode.recorded(place), owncode.now(config))
    return ["--accept_changed_code"] if differs else []


def _row(name: str) -> str:
    """The label's part of a run folder's name within the study."""
    return name.split("/")[-2]


# ---------------------------------------------------------------- in a table


def check_rows(
    runs: DataFrame,
    let_in: Versions,
    accept: bool,
) -> list[str]:
    """Notes on own code of which runs of a table had several versions.

    Args:
        runs: as `scores.read` has them.
        let_in: versions that the study has accepted.
        accept: all versions are.

    Raises:
        BadInput: runs of a row had versions that nobody has accepted.
    """
    from pandas import DataFrame

    accepted = {(name, digest) for name, digests in let_in.items() for digest in digests}
    trained = []
    for run in runs.itertuples():
        for version in owncode.versions(run.run.folder):
            code = version["code"]
            accepted |= {(name, code[name]) for name in version["changed"]}
            trained += [(run.method, name, run.seed, digest) for name, digest in code.items()]
    table = DataFrame(trained, columns=["method", "name", "seed", "digest"])
    notes = []
    for (label, name), rows in table.groupby(["method", "name"], sort=False):
        digests = rows.digest.unique()
        strange = {(name, digest) for digest in digests} - accepted
        count = f"{len(digests)} versions of {name} (their folders' source/ has them)"
        versions = f"its runs were trained with {count}"
        advice = "--accept_changed_code compares them all the same"
        check(
            "compare",
            label,
            accept or len(strange) < 2,
            f"{versions}; {advice}",
        )
        if len(digests) > 1:
            listed = []
            for digest, seeds in rows.groupby("digest", sort=False).seed:
                numbers = ", ".join(map(str, sorted(seeds.unique())))
                listed.append(f"seeds {numbers} with {digest[:8]}")
            notes.append(f"{label}: {versions}: {'; '.join(listed)}")
    versions_of = table.groupby("name").digest.nunique()
    several = sorted(versions_of[versions_of > 1].index)
    if several and not notes:
        notes.append(f"rows were trained with different versions of {', '.join(several)}")
    return notes
