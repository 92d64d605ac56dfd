"""Detects changes of the data under a study, whose runs would then have been trained on different
data."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fl_lightning.configuration.config import Config, DataConfig, check
from fl_lightning.foundation.errors import BadInput, RunFailed
from fl_lightning.foundation.named import some
from fl_lightning.lab.study.folder import StudyFolder
from fl_lightning.lab.study.grid import Pairs
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
"""Keys of `data` that decide which data are read."""


def data_key(data: DataConfig) -> str:
    """A text of the settings that decide which data are read; equal texts mean equal data."""
    return repr([getattr(data, key) for key in READING])


def digests(configs: Iterable[Config]) -> dict[str, str]:
    """The digest of the present data of each config, by `data_key`; data that cannot be read are
    left out.

    Data are loaded in a process of their own, since this process must have no threads when it forks
    workers.
    """
    from fl_lightning.lab.study.workers import in_a_process

    first: dict[str, Config] = {}
    for config in configs:
        first.setdefault(data_key(config.data), config)
    current = {}
    for key, config in first.items():
        with suppress(BadInput, RunFailed):  # the run itself will report the error
            current[key] = in_a_process(_current, config)
    return current


def _current(config: Config) -> str:
    from fl_lightning.data.identity import current

    return current(config.data, config.federation.clients, config.smoke)


def check_data_unchanged(
    folder: StudyFolder,
    runs: Pairs,
    todo: Pairs,
) -> None:
    """Raise `BadInput` if the data have changed since finished runs were trained on them.

    Args:
        folder: the study's folder.
        runs: all runs of the study.
        todo: the runs to train.
    """
    before: dict[str, dict[Path, str]] = {}
    for run, config in runs:
        place = folder.path / run.folder
        digest = provenance.source_digest(place) if folder.finished(run.folder) else None
        if digest is not None:
            before.setdefault(data_key(config.data), {})[place] = digest
    configs_to_check = [config for _, config in todo if data_key(config.data) in before]
    roots = {data_key(config.data): config.data.root for config in configs_to_check}
    for key, digest in digests(configs_to_check).items():
        places = [str(place) for place, earlier in before[key].items() if earlier != digest]
        check(
            "data.root",
            roots[key],
            not places,
            f"the data have changed since {some(places)} trained on them: restore them, or give "
            "another --out",
        )


def notes(runs: DataFrame) -> list[str]:
    """Notes on settings whose runs in a table were trained on different data."""
    lines = []
    folders = runs.assign(folder=[run.folder for run in runs.run])
    folders["digest"] = folders.folder.map(provenance.source_digest)
    for setting, of_setting in folders.dropna(subset="digest").groupby("setting", sort=False):
        versions = [rows for _, rows in of_setting.groupby("digest", sort=False)]
        if len(versions) > 1:
            version_texts = []
            for rows in versions:
                seeds = ", ".join(map(str, sorted(set(rows.seed))))
                version_texts.append(f"seeds {seeds} ({rows.folder.iloc[0]})")
            prefix = f"{setting}: " if setting else ""
            lines.append(
                f"{prefix}runs were trained on {len(versions)} versions of the data, which differ: "
                f"{'; '.join(version_texts)}"
            )
    return lines
