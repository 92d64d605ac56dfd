"""Data that change under a study: its runs would be of several data sets, and a row of its table a
mean over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fl_lightning.configuration.config import Config, DataConfig, check
from fl_lightning.foundation.errors import BadInput, RunFailed
from fl_lightning.lab.study.folder import StudyFolder
from fl_lightning.lab.study.grid import Run
from fl_lightning.results import provenance

if TYPE_CHECKING:
    from pandas import DataFrame

READING = (
    "source",
    "root",
    "task",
    "label_column",
    "group_column",
    "unit_column",
    "columns",
    "one_hot",
    "impute",
    "tokens",
    "length",
    "vocabulary",
    "clients_per_domain",
    "public",
    "public_root",
    "reads_test",
)
"""Of the settings of data, those that decide what is read."""
SHOWN = 3
"""Run folders in a line, at most."""
Pairs = Sequence[tuple[Run, Config]]


def reading(data: DataConfig) -> str:
    """What is read, as text: settings in which it is equal have one digest."""
    return repr([getattr(data, key) for key in READING])


def digests(configs: Iterable[Config]) -> dict[str, str]:
    """The digest of the data that each of `configs` names now, by what is read; without those that
    cannot be read.

    Data are loaded in a process of their own: this one must run no threads when it forks workers.
    """
    from fl_lightning.lab.study.workers import in_a_process

    first: dict[str, Config] = {}
    for config in configs:
        first.setdefault(reading(config.data), config)
    known = {}
    for key, config in first.items():
        try:
            known[key] = in_a_process(_current, config)
        except (BadInput, RunFailed):  # a run that reads them says why
            continue
    return known


def _current(config: Config) -> str:
    from fl_lightning.data.identity import current

    return current(config.data, config.federation.clients, config.smoke)


def check_same(folder: StudyFolder, runs: Pairs, todo: Pairs) -> None:
    """Raise `BadInput` where `todo` would read other data than finished `runs` of the study have
    read."""
    kept: dict[str, dict[Path, str]] = {}
    for run, config in runs:
        place = folder.path / run.folder
        digest = provenance.source_of(place) if folder.finished(run.folder) else None
        if digest is not None:
            kept.setdefault(reading(config.data), {})[place] = digest
    now = digests(config for _, config in todo if reading(config.data) in kept)
    for key, digest in now.items():
        others = [str(place) for place, before in kept[key].items() if before != digest]
        root = next(config.data.root for _, config in todo if reading(config.data) == key)
        whose = ", ".join(others[:SHOWN]) + (
            f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
        )
        allowed = (
            f"the data have changed since {whose} trained on them: restore them, or give another "
            f"--out"
        )
        check("data.root", root, not others, allowed)


def notes(runs: DataFrame) -> list[str]:
    """Lines on settings of a table of runs that have read different data."""
    lines = []
    folders = runs.assign(folder=[run.folder for run in runs.run])
    folders["digest"] = folders.folder.map(provenance.source_of)
    for setting, of_setting in folders.dropna(subset="digest").groupby("setting", sort=False):
        versions = [rows for _, rows in of_setting.groupby("digest", sort=False)]
        if len(versions) > 1:
            listed = "; ".join(
                f"seeds {', '.join(map(str, sorted(set(rows.seed))))} ({rows.folder.iloc[0]})"
                for rows in versions
            )
            begin = f"{setting}: " if setting else ""
            count = f"{len(versions)} versions of the data, which differ"
            lines.append(f"{begin}runs were trained on {count}: {listed}")
    return lines
