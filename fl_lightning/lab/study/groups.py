"""Groups runs by the kind of model that judges them, and pairs their clients' scores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pandas import DataFrame, Series, concat

from fl_lightning.configuration.catalogue import did_you_mean
from fl_lightning.configuration.config import check
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.metric import MODELS
from fl_lightning.lab.study.scores import tidy
from fl_lightning.results.folder import NEVER_TRAINED

ALL = "all settings"
"""Title of the block over all settings."""
UNIT = ["setting", "seed"]
"""Index by which methods are paired."""


@dataclass(frozen=True)
class JudgeGroup:
    """The runs that one kind of model judges."""

    judge: str
    """The kind of model, a key of `metric.MODELS`."""
    runs: DataFrame
    """Their part of the table of runs (`scores.read`)."""
    scores: DataFrame
    """Clients' scores, indexed by setting, seed and client, a column for each method; NaN if a
    method has not run. Only clients that all methods of the setting and seed have scored."""
    baseline: str
    """Label of the method from which differences are taken."""

    @property
    def methods(self) -> list[str]:
        """Labels, in the order of the runs."""
        return list(self.scores)

    @property
    def settings(self) -> list[str]:
        """Settings in which at least one method has run."""
        return list(self.runs.setting.unique())

    def blocks(self) -> list[tuple[str, list[str]]]:
        """The blocks of the table, each a title and its settings: one for each setting, and one for
        all settings if there are several."""
        blocks = [(setting, [setting]) for setting in self.settings]
        return blocks if len(blocks) == 1 else [*blocks, (ALL, self.settings)]

    def units(self) -> DataFrame:
        """Means over clients, indexed by setting and seed, a column for each method."""
        return self.scores.groupby(level=UNIT, sort=False).mean()

    def paired(
        self, label: str, baseline: str, settings: list[str]
    ) -> dict[tuple[str, int], np.ndarray]:
        """Each client's score with method `label` minus that with `baseline`, by (setting, seed) in
        which both have run."""
        differences = (self.scores[label] - self.scores[baseline]).dropna()
        units = differences.groupby(level=UNIT, sort=False)
        return {unit: values.to_numpy() for unit, values in units if unit[0] in settings}

    def differences(self, label: str, baseline: str, settings: list[str]) -> list[list[np.ndarray]]:
        """The same differences as `paired`, as [seed][setting], for the seeds with which both
        methods have run in all of `settings`."""
        units = self.paired(label, baseline, settings)
        seeds = sorted({seed for _, seed in units})
        complete = [seed for seed in seeds if all((s, seed) in units for s in settings)]
        return [[units[setting, seed] for setting in settings] for seed in complete]


def mean_over_settings(units: Series, settings: list[str]) -> Series:
    """The mean over `settings` for each seed that ran in all of them.

    Args:
        units: a value for each setting and seed.
    """
    table = units.unstack("setting").reindex(columns=settings)
    return table.dropna().mean(axis=1)


def group_by_judge(
    runs: DataFrame,
    baseline: str | None,
) -> tuple[list[JudgeGroup], list[str]]:
    """Group the runs by judge, pair their clients' scores, and note what is left out.

    Args:
        runs: the table of runs (`scores.read`).
        baseline: label of the method to compare with; None: training alone. Under a judge without
            runs of that method, the baseline is training alone, else the judge's first method.

    Raises:
        BadInput: no method has the label `baseline`, or methods of a setting and seed scored
            different clients.
    """
    labels = list(runs.method.unique())
    check(
        "baseline",
        baseline,
        baseline is None or baseline in labels,
        f"no such method{did_you_mean(str(baseline), labels)}; methods: {', '.join(labels)}",
    )
    table = tidy(runs)
    groups, notes, last_notes = [], [], []
    for judge in [judge for judge in MODELS if (runs.model == judge).any()]:
        words = MODELS[judge]
        of_judge = runs[runs.model == judge]
        methods = list(of_judge.method.unique())
        of_clients = table[table.model == judge]
        wide = of_clients.pivot(
            index=[*UNIT, "client"],
            columns="method",
            values="value",
        )
        units = []
        for _, of_unit in wide.groupby(level=UNIT, sort=False):
            units.append(of_unit.dropna(axis=1, how="all"))
            _check_common_clients(units[-1])
        incomplete = sum(bool(unit.isna().any(axis=None)) for unit in units)
        common = concat([unit.dropna() for unit in units]).reindex(columns=methods)
        first = training_alone(of_judge) or methods[0]
        group_baseline = str(baseline) if baseline in methods else first
        groups.append(JudgeGroup(judge, of_judge, common, group_baseline))
        notes += [
            f"{words}: {note}"
            for note in _notes(
                of_judge,
                incomplete,
                len(units),
            )
        ]
        if len(methods) == 1:
            last_notes.append(f"{words}: {methods[0]}: nothing with the same judge to compare with")
        elif baseline not in (None, group_baseline):
            last_notes.append(
                f"{words}: {baseline} was not judged so: differences are to {group_baseline}; "
                "--judge KIND compares all by one kind of model, where all runs were scored so"
            )
    return groups, notes + last_notes


def _check_common_clients(unit: DataFrame) -> None:
    """Raise `BadInput` if no client was scored by all methods of a setting and seed."""
    setting, seed, _ = unit.index[0]
    where = ", ".join(filter(None, [setting, f"seed {seed}"]))
    check(
        "compare",
        where,
        len(unit.dropna()) > 0,
        f"{' and '.join(unit)} scored no common client, and cannot be paired: leave one out",
    )


def _notes(
    runs: DataFrame,
    incomplete: int,
    units: int,
) -> list[str]:
    """Notes on whose scores the runs of one judge have, and on clients that are left out.

    Args:
        runs: the runs of one judge.
        incomplete: number of units in which methods scored different clients.
        units: number of units.
    """
    notes = []
    whose = runs.scored.value_counts(sort=False)
    if len(whose) > 1 or any(NEVER_TRAINED in words for words in whose.index):
        counts = "; ".join(f"{words} ({number} runs)" for words, number in whose.items())
        notes.append(f"scores of {counts}")
    # other kinds of model than the judge's are scored for the cohort of a round only
    partly_scored = []
    for row in runs.itertuples():
        scored = len(row.scores)
        clients = sum(row.metric in client for client in row.run.rows("final"))
        if scored < clients:
            partly_scored.append((scored, clients))
    if partly_scored:
        least, clients = min(partly_scored)
        notes.append(
            f"in {len(partly_scored)} of {len(runs)} runs scores are of the clients of the last "
            f"judged round alone ({least} of {clients}); by its own judge a run scores them all"
        )
    if incomplete:
        notes.append(
            f"in {incomplete} of {units} settings and seeds not all methods scored the same "
            "clients; only those that all scored count"
        )
    return notes


def no_pairs_error(groups: list[JudgeGroup], baseline: str | None) -> BadInput:
    """The error of a comparison without pairs of methods."""
    compared = [g for g in groups if baseline in (None, g.baseline) and len(g.methods) > 1]
    if compared:
        settings = list(dict.fromkeys(s for group in compared for s in group.settings if s))
        listed_settings = f" (settings: {'; '.join(settings[:4])})" if settings else ""
        return BadInput(
            "baseline",
            compared[0].baseline,
            "there are no pairs: no other method has run in its setting with its "
            f"seed{listed_settings}",
        )
    if len(groups) > 1:
        judged = "; ".join(f"{', '.join(g.methods)}: {MODELS[g.judge]}" for g in groups)
        key, value = ("baseline", baseline) if baseline else ("judge", "mixed")
        return BadInput(
            key,
            value,
            f"methods that different kinds of model judge are not compared ({judged}): give "
            "--judge KIND with a kind that all runs have scored",
        )
    return BadInput(
        "compare", groups[0].methods[0], "it is the only method: a comparison needs two"
    )


def training_alone(runs: DataFrame) -> str | None:
    """The label of training alone (method `local`); None if no run has this method. If it has run
    under several labels: `local`, else the first label."""
    labels = list(runs.method[runs.name == "local"].unique())
    return "local" if "local" in labels else next(iter(labels), None)
