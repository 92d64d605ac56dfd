"""Cells by the kind of model that judges them, with the scores of clients that all methods of a
pair have scored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from fl_lightning.configuration.catalogue import did_you_mean
from fl_lightning.configuration.config import check
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.metric import MODELS
from fl_lightning.lab.study.cells import Cell, tidy
from fl_lightning.results.folder import NEVER

ALL = "all settings"
Unit = tuple[str, int]


@dataclass
class Group:
    """What is judged by one kind of model."""

    judge: str
    cells: dict[str, dict[Unit, Cell]] = field(default_factory=dict)
    """By label, then by unit."""
    scores: dict[str, dict[Unit, np.ndarray]] = field(default_factory=dict)
    """Likewise: of the clients that all methods of the unit have scored, in one order."""
    baseline: str | None = None

    @property
    def settings(self) -> list[str]:
        """Those that a method has run in."""
        return list(dict.fromkeys(setting for cells in self.cells.values() for setting, _ in cells))

    def differences(self, label: str, other: str, settings: list[str]) -> list[list[np.ndarray]]:
        """Of each seed in which both have run in all of `settings`: in each of these, of each
        client."""
        ours, theirs = self.scores[label], self.scores[other]
        seeds = complete(settings, ours.keys() & theirs.keys())
        return [
            [ours[setting, seed] - theirs[setting, seed] for setting in settings] for seed in seeds
        ]

    def blocks(self) -> list[tuple[str, list[str]]]:
        """The settings one by one, and at last all of them."""
        single = [(setting, [setting]) for setting in self.settings]
        return single if len(single) == 1 else [*single, (ALL, self.settings)]


def grouped(cells: Sequence[Cell]) -> tuple[list[Group], list[str]]:
    """The cells by judge with the scores that can be paired, and what must be said of clients that
    not all scored."""
    table, groups, notes = tidy(cells), [], []
    for judge in (judge for judge in MODELS if (table.model == judge).any()):
        group = Group(judge)
        for cell in (cell for cell in cells if cell.judge == judge):
            group.cells.setdefault(cell.label, {})[cell.unit] = cell
        wide = table[table.model == judge].pivot(
            index=["setting", "seed", "client"], columns="method", values="value"
        )
        lost = 0
        for unit, rows in wide[list(group.cells)].groupby(level=["setting", "seed"], sort=False):
            of_unit = rows.dropna(axis="columns", how="all")
            common = of_unit.dropna()
            if common.empty:
                where, names = (
                    ", ".join(filter(None, [unit[0], f"seed {unit[1]}"])),
                    " and ".join(of_unit),
                )
                raise BadInput(
                    "compare", where, f"{names} cannot be paired: they scored different clients"
                )
            lost += len(common) < len(of_unit)
            for label in of_unit:
                group.scores.setdefault(label, {})[unit] = common[label].to_numpy()
        scored = Counter(
            cell.scored for of_method in group.cells.values() for cell in of_method.values()
        )
        listed = "; ".join(f"{words} ({number} runs)" for words, number in scored.items())
        mixed = len(scored) > 1 or any(NEVER in words for words in scored)
        notes += [f"{MODELS[judge]}: scores of {listed}"] if mixed else []
        notes += _of_last_round(group)
        if lost:
            units = len({unit for of_method in group.cells.values() for unit in of_method})
            notes.append(
                f"{MODELS[judge]}: in {lost} of {units} settings and seeds not all methods scored "
                f"the same clients; "
                "only those that all scored count"
            )
        groups.append(group)
    return groups, notes


def _of_last_round(group: Group) -> list[str]:
    """Whether scores lack clients that the runs have: kinds other than the judge's are scored in
    rounds, by cohort."""
    runs = [cell for cells in group.cells.values() for cell in cells.values()]
    ends = [
        (len(cell.scores), sum(cell.metric in row for row in cell.run.rows("final")))
        for cell in runs
    ]
    cut = [(scored, clients) for scored, clients in ends if scored < clients]
    if not cut:
        return []
    least = min(cut)
    return [
        f"{MODELS[group.judge]}: in {len(cut)} of {len(runs)} runs scores are of the clients of "
        f"the last judged round "
        f"alone ({least[0]} of {least[1]}); by its own judge a run scores them all"
    ]


def choose_baseline(groups: list[Group], baseline: str | None) -> list[str]:
    """Fill in the groups' baselines; where there is none, it is said."""
    labels = list(dict.fromkeys(label for group in groups for label in group.cells))
    allowed = f"no such method{did_you_mean(str(baseline), labels)}; methods: {', '.join(labels)}"
    check("baseline", baseline, baseline is None or baseline in labels, allowed)
    notes = []
    for group in groups:
        local = _local(cell for cells in group.cells.values() for cell in cells.values())
        group.baseline = baseline if baseline in group.cells else local or next(iter(group.cells))
        if len(group.cells) == 1:
            notes.append(
                f"{MODELS[group.judge]}: {', '.join(group.cells)}: nothing with the same judge to "
                f"compare with"
            )
        elif baseline not in (None, group.baseline):
            notes.append(
                f"{MODELS[group.judge]}: {baseline} was not judged so: differences are to "
                f"{group.baseline}; "
                "--judge KIND compares all by one kind of model, where all runs were scored so"
            )
    return notes


def no_pairs(groups: list[Group], baseline: str | None) -> BadInput:
    """Why there are none."""
    compared = [g for g in groups if baseline in (None, g.baseline) and len(g.cells) > 1]
    if compared:
        settings = "; ".join(
            list(dict.fromkeys(s for group in compared for s in group.settings if s))[:4]
        )
        allowed = "there are no pairs: no other method has run in its setting with its seed"
        return BadInput(
            "baseline",
            compared[0].baseline,
            f"{allowed}{f' (settings: {settings})' if settings else ''}",
        )
    if len(groups) > 1:
        judged = "; ".join(f"{', '.join(group.cells)}: {MODELS[group.judge]}" for group in groups)
        allowed = (
            f"judges are not mixed ({judged}); --judge KIND compares all by one, where all runs "
            f"were scored so"
        )
        return (
            BadInput("baseline", baseline, allowed)
            if baseline
            else BadInput("judge", "mixed", allowed)
        )
    (group,) = groups
    return BadInput(
        "compare",
        ", ".join(group.cells),
        "there is one method alone, and nothing to compare it with",
    )


def _local(cells: Iterable[Cell]) -> str | None:
    """The label of training alone; where that was run in several ways, `local`, else the first."""
    labels = list(dict.fromkeys(cell.label for cell in cells if cell.method == "local"))
    return "local" if "local" in labels else next(iter(labels), None)


def training_alone(cells: Sequence[Cell]) -> dict[Unit, Cell]:
    """Training alone, by unit."""
    label = _local(cells)
    return {cell.unit: cell for cell in cells if cell.label == label}


def complete(settings: list[str], units: Iterable[Unit]) -> list[int]:
    """The seeds that have run in every one of `settings`."""
    there = set(units)
    return [
        s
        for s in sorted({seed for _, seed in there})
        if all((setting, s) in there for setting in settings)
    ]
