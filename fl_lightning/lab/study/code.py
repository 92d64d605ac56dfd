"""Detects changes of the user's own code under a study: they are refused, or accepted and noted
below the table."""

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
"""File in a study's folder with the SHA-256 of each file version that `--accept_changed_code`
accepted."""
Versions = dict[str, list[str]]
"""SHA-256 sums of the versions of each file, by file name."""


def accepted_versions(folder: Path) -> Versions:
    """Read from `changed_code.json` which versions of own code the user has accepted for the study
    in `folder`; empty without that file."""
    try:
        content = json.loads((folder / ACCEPTED).read_text(encoding="utf-8"))
        return {str(name): list(map(str, digests)) for name, digests in content.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def changed_files(
    folder: StudyFolder,
    todo: Collection[tuple[StudyRun, Config]],
) -> dict[str, str]:
    """Find files of own code that have changed since runs of the study were trained.

    A run of `todo` is compared with earlier runs of its row in all its code, and with earlier runs
    of other rows in the code of models and data, which all rows share. Accepted versions do not
    count as changes.

    Args:
        folder: the study's folder.
        todo: the runs to train, with their configs.

    Returns:
        The present version's SHA-256 by file.
    """
    earlier_code = set()
    for name in folder.run_names() if folder else []:
        if _has_begun(folder.path / name):
            digests = owncode.recorded_digests(folder.path / name)
            earlier_code.add((_row(name), tuple(digests.items())))
    accepted, changed = accepted_versions(folder.path), dict[str, str]()
    for parts in (owncode.COMPUTES, owncode.SHARED):
        paths = {(_row(run.folder), owncode.paths(config, parts)) for run, config in todo}
        for row, path in paths:
            present_digests = owncode.digests(owncode.read(path))
            for earlier_row, code in earlier_code:
                # code of methods and callbacks may differ between rows
                if earlier_row == row or parts == owncode.SHARED:
                    for name in owncode.changed_files(dict(code), present_digests):
                        if present_digests[name] not in accepted.get(name, []):
                            changed[name] = present_digests[name]
    return changed


def _has_begun(run: Path) -> bool:
    return (run / "metrics.csv").is_file()


def check_code_unchanged(
    folder: StudyFolder,
    todo: Collection[tuple[StudyRun, Config]],
    accept: bool,
) -> None:
    """Raise `BadInput` if own code has changed (`changed_files`), unless `accept`: the user accepts
    the changes."""
    names = ", ".join(changed_files(folder, todo))
    check(
        "code",
        names,
        accept or not names,
        f"runs in {folder.path} were trained with another version (their folders' source/ has it): "
        "change it back, give the study another --out, or accept it with --accept_changed_code "
        "(tables will note it)",
    )


def accept(
    folder: StudyFolder,
    todo: Collection[tuple[StudyRun, Config]],
) -> None:
    """Record in `changed_code.json` that the present versions of all `changed_files` are
    accepted."""
    new, versions = changed_files(folder, todo), accepted_versions(folder.path)
    for name, digest in new.items():
        versions.setdefault(name, []).append(digest)
    if new:
        write_whole(folder.path / ACCEPTED, json.dumps(versions, indent=1) + "\n")


def resume_flags(run: Path, config: Config) -> list[str]:
    """Flags of `fl-train fit` for a SLURM job that resumes a run: `--accept_changed_code` if own
    code has changed since the run began, else none."""
    differs = _has_begun(run) and owncode.changed_files(
        owncode.recorded_digests(run), owncode.current_digests(config)
    )
    return ["--accept_changed_code"] if differs else []


def _row(name: str) -> str:
    """The part of a run folder's name that stands for the row: the folder of the row's label."""
    return name.split("/")[-2]


# ---------------------------------------------------------------- in a table


def check_rows(
    runs: DataFrame,
    study_versions: Versions,
    accept: bool,
) -> list[str]:
    """Check that all runs of a row were trained with the same version of own code.

    Args:
        runs: the table of runs (`scores.read`).
        study_versions: versions that the user has accepted for the study (`accepted_versions`).
        accept: whether to accept all versions.

    Returns:
        Notes on rows that were trained with several versions.

    Raises:
        BadInput: runs of a row were trained with versions that were not accepted.
    """
    from pandas import DataFrame

    accepted = {(name, digest) for name, digests in study_versions.items() for digest in digests}
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
        unaccepted = {(name, digest) for digest in digests} - accepted
        versions = (
            f"its runs were trained with {len(digests)} versions of {name} (their folders' "
            "source/ has them)"
        )
        check(
            "compare",
            label,
            accept or len(unaccepted) < 2,
            f"{versions}; --accept_changed_code compares them all the same",
        )
        if len(digests) > 1:
            version_texts = []
            for digest, seeds in rows.groupby("digest", sort=False).seed:
                numbers = ", ".join(map(str, sorted(seeds.unique())))
                version_texts.append(f"seeds {numbers} with {digest[:8]}")
            notes.append(f"{label}: {versions}: {'; '.join(version_texts)}")
    versions_of = table.groupby("name").digest.nunique()
    several = sorted(versions_of[versions_of > 1].index)
    if several and not notes:
        notes.append(f"rows were trained with different versions of {', '.join(several)}")
    return notes
