"""Which of a study's runs a command is to run: some methods, seeds or settings; the others wait."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from fl_lightning.configuration.catalogue import did_you_mean
from fl_lightning.configuration.config import check
from fl_lightning.lab.study.grid import Run, Study, read_seeds, words


@dataclass(frozen=True)
class Part:
    """Some of a study's runs; as made, all of them."""

    methods: frozenset[str] | None = None
    """Labels; the forced rows are always among them. None: all."""
    seeds: tuple[int, ...] | None = None
    """None: all."""
    settings: frozenset[str] = frozenset()
    """Words such as `data.alpha=0.3`: of a key with several, any; of a key with none, all."""

    def __contains__(self, run: Run) -> bool:
        return (
            (self.methods is None or run.entry.forced or run.entry.label in self.methods)
            and (self.seeds is None or run.seed in self.seeds)
            and all(
                word in self.settings
                for word in words(run.setting)
                if _key(word) in map(_key, self.settings)
            )
        )


def part_of(
    study: Study, methods: str | None, seeds: str | None, settings: str | None
) -> tuple[Study, Part]:
    """What a command line chooses of a study, and the study with the seeds that it lacked.

    Args:
        methods: labels, with commas.
        seeds: `0`, `0,2` or `0-4`.
        settings: such as `data.alpha=0.3`, with commas.

    Raises:
        BadInput: the study has no such method or setting, or these are no seeds.
    """
    labels = frozenset(_listed(methods)) if methods is not None else None
    known = [entry.label for entry in study.entries()[: len(study.methods)]]
    for name in _listed(methods):
        allowed = (
            f"the study has no such method{did_you_mean(name, known)}; it has {', '.join(known)}"
        )
        check("methods", name, name in known, allowed)
    there = list(dict.fromkeys(word for setting in study.settings() for word in words(setting)))
    for word in _listed(settings):
        near = did_you_mean(word, there)
        allowed = f"the study's grid has no such setting{near}; it has {', '.join(there) or 'none'}"
        check("settings", word, word in there, allowed)
    if seeds is None:
        return study, Part(labels, None, frozenset(_listed(settings)))
    parts = _listed(seeds)
    chosen = tuple(
        read_seeds([int(part) for part in parts] if all(p.isdecimal() for p in parts) else seeds)
    )
    return with_seeds(study, chosen), Part(labels, chosen, frozenset(_listed(settings)))


def with_seeds(study: Study, seeds: Iterable[int]) -> Study:
    """The study with these seeds beside its own. `BadInput` if those are too many runs."""
    wider = dataclasses.replace(study, seeds=list(dict.fromkeys([*study.seeds, *seeds])))
    wider.check()
    return wider


def _listed(text: str | None) -> list[str]:
    return [word.strip() for word in text.strip("[] ").split(",")] if text is not None else []


def _key(word: str) -> str:
    return word.partition("=")[0]
