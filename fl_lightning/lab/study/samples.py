"""Data that change under a study: its runs would be of several data sets, and a row of its table a
mean over them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fl_lightning.configuration.config import Config, DataConfig, check
from fl_lightning.foundation.errors import BadInput, RunFailed
from fl_lightning.lab.study.folder import StudyFolder
from fl_lightning.lab.study.grid import Run
from fl_lightning.results import provenance

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


def notes(settings: Mapping[str, Mapping[Path, int]]) -> list[str]:
    """Lines on settings of a table whose runs have read different data.

    Args:
        settings: by setting, the seed of each run by its folder.
    """
    lines = []
    for setting, seeds in settings.items():
        by_digest: dict[str, list[Path]] = {}
        for place in seeds:
            if digest := provenance.source_of(place):
                by_digest.setdefault(digest, []).append(place)
        if len(by_digest) > 1:
            parts = "; ".join(_listed(places, seeds) for places in by_digest.values())
            where = f"{setting}: " if setting else ""
            lines.append(
                f"{where}runs were trained on {len(by_digest)} versions of the data, which "
                f"differ: {parts}"
            )
    return lines


def _listed(places: Sequence[Path], seeds: Mapping[Path, int]) -> str:
    numbers = sorted({seeds[place] for place in places})
    return f"seeds {', '.join(map(str, numbers))} ({places[0]})"
