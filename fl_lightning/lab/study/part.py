"""The part of a study's runs that a command selects by methods, seeds and settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from fl_lightning.configuration.catalogue import did_you_mean
from fl_lightning.configuration.config import check
from fl_lightning.lab.study.grid import Study, StudyRun, read_seeds, words


@dataclass(frozen=True)
class StudyPart:
    """A selection of a study's runs; by default all. `run in part` says whether a run belongs to
    it."""

    methods: frozenset[str] | None = None
    """Labels; the forced baselines are always selected. None: all."""
    seeds: tuple[int, ...] | None = None
    """Seeds; None: all."""
    settings: frozenset[str] = frozenset()
    """Keys and values such as `data.alpha=0.3`. For each key named here, a run's value must be
    among those given; other keys are free."""

    def __contains__(self, run: StudyRun) -> bool:
        is_listed = self.methods is None or run.entry.forced or run.entry.label in self.methods
        is_seed = self.seeds is None or run.seed in self.seeds
        keys = set(map(_key, self.settings))
        of_keys = {word for word in words(run.setting) if _key(word) in keys}
        return is_listed and is_seed and of_keys <= self.settings


def part_of(
    study: Study,
    methods: str | None,
    seeds: str | None,
    settings: str | None,
) -> tuple[Study, StudyPart]:
    """Read the methods, seeds and settings that a command line selects.

    Args:
        study: the study.
        methods: labels with commas; None: all.
        seeds: `0`, `0,2` or `0-4`; None: all.
        settings: keys and values such as `data.alpha=0.3`, with commas; None: all.

    Returns:
        The study, to which selected seeds are added; the selection.

    Raises:
        BadInput: the study has no such method or setting, or these are no seeds.
    """
    labels = [entry.label for entry in study.entries()[: len(study.methods)]]
    listed = _chosen_names(
        "methods",
        methods,
        "the study has no such method",
        labels,
    )
    setting_words = dict.fromkeys(word for setting in study.settings() for word in words(setting))
    missing = "the study's grid has no such setting"
    chosen = _chosen_names("settings", settings, missing, list(setting_words))
    part = StudyPart(None if methods is None else listed, settings=chosen)
    if seeds is None:
        return study, part
    parts = _split(seeds)
    are_numbers = all(number.isdecimal() for number in parts)
    numbers = read_seeds(list(map(int, parts)) if are_numbers else seeds)
    return with_seeds(study, numbers), dataclasses.replace(part, seeds=tuple(numbers))


def with_seeds(study: Study, seeds: Iterable[int]) -> Study:
    """The study with these seeds added. Raises `BadInput` if it would have too many runs."""
    every = list(dict.fromkeys([*study.seeds, *seeds]))
    wider = dataclasses.replace(study, seeds=every)
    wider.check()
    return wider


def _split(text: str) -> list[str]:
    return [word.strip() for word in text.strip("[] ").split(",")]


def _chosen_names(
    key: str,
    text: str | None,
    missing: str,
    names: list[str],
) -> frozenset[str]:
    """Split `text` at commas; raises `BadInput` for a name that is not among `names`."""
    listed = [] if text is None else _split(text)
    for name in listed:
        near = did_you_mean(name, names)
        check(key, name, name in names, f"{missing}{near}; it has {', '.join(names) or 'none'}")
    return frozenset(listed)


def _key(word: str) -> str:
    return word.partition("=")[0]
