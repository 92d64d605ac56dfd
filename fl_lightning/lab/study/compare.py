"""Compares methods: means over seeds, paired differences from a baseline, and tests. A unit is a
pair of setting and seed.

Methods are compared only with methods that are judged by the same kind of model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from pandas import DataFrame, Series

from fl_lightning.foundation.metric import (
    ACCURACY,
    FURTHER,
    MODELS,
    SHOWS_ONE_CLASS,
)
from fl_lightning.lab import statistics
from fl_lightning.lab.report.tables import reached, scored_seldom
from fl_lightning.lab.study.groups import (
    ALL,
    UNIT,
    JudgeGroup,
    group_by_judge,
    mean_over_settings,
    no_pairs_error,
    training_alone,
)
from fl_lightning.lab.study.scores import tidy
from fl_lightning.results.result import RunResult, one_class_note, worst_tenth

MIN_METHODS = 3
"""Fewest methods that are ranked over settings: for two, Wilcoxon's test says all."""
INTERVALS = {
    "t": f"under {statistics.FEW} seeds Student's t over seeds",
    "bootstrap": f"from {statistics.FEW} seeds on the outer ends of Student's t over seeds and of "
    "hierarchical bootstrap-t (seeds, then clients within a seed)",
}
"""Notes on the kinds of intervals."""
COLUMNS = {
    "judge": object,
    "setting": object,
    "method": object,
    "seeds": "Int64",
    "mean": float,
    "std": float,
    "worst_tenth": float,
    "harmed": float,
    "mib": float,
    "seconds": float,
    "channel_seconds": float,
    "runs": "Int64",
    "reached": "Int64",
    "baseline": object,
    "pairs": "Int64",
    "difference": float,
    "low": float,
    "high": float,
    "interval": object,
    "wins": "Int64",
    "ties": "Int64",
    "losses": "Int64",
    "p": float,
    "p_holm": float,
    "chosen": object,
    "star": object,
    "target": float,
}
"""Columns of the table and their types; a row is a method with one judge in one setting, or in all.
docs/compare.md explains them."""
NO_COSTS = dict.fromkeys(("mib", "wall", "channel"), np.nan)
"""The costs of a run that never reached the target."""


@dataclass(frozen=True)
class Ranks:
    """The ranks over settings of the methods of one judge, and their tests."""

    judge: str
    methods: list[str]
    settings: int
    """Number of settings."""
    chi_square: float
    p: float
    ranks: list[float]
    """Mean ranks; 1 is best."""
    pairwise: list[list[float]]
    """Wilcoxon's p between methods, Holm-corrected, [method][method]."""
    cliques: list[list[str]]
    """Groups of methods with neighbouring ranks in which no two methods differ."""


@dataclass(frozen=True)
class Compared:
    """The table of a comparison, the ranks over settings, and notes."""

    table: DataFrame
    """The columns are `COLUMNS`; accuracies lie in 0..1, and NaN stands for unknown values."""
    ranks: list[Ranks]
    notes: list[str]
    """Lines below the table."""
    best: list[int]
    """Rows with the best mean of their judge and setting, if the interval of the paired difference
    from the next best lies above 0."""
    target: float | None
    """The accuracy at which costs are taken; None: costs of whole runs."""


def compare_runs(
    runs: DataFrame,
    baseline: str | None = None,
    target: float | None = None,
) -> Compared:
    """Compare the methods of a table of runs with a baseline.

    Args:
        runs: the table of runs (`scores.read`).
        baseline: label of the method to compare with; None: training alone. Under a judge without
            runs of that method, the baseline is training alone, else the judge's first method.
        target: accuracy in 0..1: costs are those until a run reaches it; None: costs of whole runs.

    Raises:
        BadInput: no method has the label `baseline`; no other method of the baseline's judge has
            run in the same setting with the same seed; or methods of a setting and seed scored
            different clients.
    """
    groups, notes = group_by_judge(runs, baseline)
    harmed = share_harmed(runs)
    rows: list[dict[str, Any]] = []
    best: list[int] = []
    for group in groups:
        units = _units(group, harmed, target)
        means = group.units()
        for name, settings in group.blocks():
            winner = _best(group, means, settings)
            in_block = units[units.setting.isin(settings)]
            for label in group.methods:
                of_method = in_block[in_block.method == label]
                if of_method.empty:
                    continue
                if label == winner:
                    best.append(len(rows))
                row = {
                    "judge": group.judge,
                    "setting": name,
                    "method": label,
                }
                row |= _mean_columns(of_method, settings, target)
                if label != group.baseline:
                    row |= _difference_columns(group, settings, label)
                rows.append(row)
    table = DataFrame(rows, columns=list(COLUMNS)).astype(COLUMNS)
    of_baseline = table if baseline is None else table[table.baseline.eq(baseline)]
    if not of_baseline.pairs.fillna(0).any():
        raise no_pairs_error(groups, baseline)
    # all judges' tests are one family
    tested = table.p.notna()
    table.loc[tested, "p_holm"] = statistics.holm(table.p[tested].tolist())
    is_small = table.p_holm.le(statistics.LEVEL)
    table["star"] = is_small.map({True: "*", False: ""})
    ranks, rank_notes = _ranks(groups)
    seldom = scored_seldom(runs.run) if target is not None else ""
    if seldom:
        notes.append(f"target: {seldom}")
    last_block = {group.judge: group.blocks()[-1][0] for group in groups}
    compared = table[table.baseline.notna() & (table.setting == table.judge.map(last_block))]
    notes += [
        *_time_notes(runs),
        *_test_notes(table, compared),
        *rank_notes,
        *harm_notes(runs),
    ]
    notes += _one_class_notes(runs)
    return Compared(table, ranks, notes, best, target)


# ---------------------------------------------------------------- rows


def _units(
    group: JudgeGroup,
    harmed: Series,
    target: float | None,
) -> DataFrame:
    """The runs of a group with the mean and the worst tenth of their clients' scores, `harmed`, and
    their costs (as `compare_runs`)."""
    scores = dict(iter(group.scores.groupby(level=UNIT, sort=False)))
    rows = []
    for run in group.runs.itertuples():
        of_clients = scores[run.setting, run.seed][run.method].to_numpy()
        costs: Any = {name: run.run.spent(name) for name in NO_COSTS}
        if target is not None:
            costs = reached(run.run, target, run.column)
        row = {"mean": float(of_clients.mean()), "worst_tenth": worst_tenth(of_clients)}
        rows.append(row | {"reached": costs is not None} | (costs or NO_COSTS))
    columns = DataFrame(rows, index=group.runs.index)
    return group.runs[["method", *UNIT]].assign(harmed=harmed, **columns)


def _mean_columns(
    of_method: DataFrame, settings: list[str], target: float | None
) -> dict[str, Any]:
    """The columns of a method without those on the baseline; means are over the seeds that ran in
    all `settings`."""
    units = of_method.set_index(UNIT)
    means = mean_over_settings(units["mean"], settings)
    return {
        "seeds": len(means),
        "mean": means.mean(),
        "std": means.std(),
        "worst_tenth": mean_over_settings(units.worst_tenth, settings).mean(),
        "harmed": mean_over_settings(units.harmed, settings).mean(),
        "mib": _mean(of_method.mib),
        "seconds": _mean(of_method.wall),
        "channel_seconds": _mean(of_method.channel),
        "runs": len(of_method),
        "reached": None if target is None else of_method.reached.sum(),
        "target": target,
    }


def _mean(values: Any) -> float | None:
    """The mean; None if there are no values or some are unknown."""
    numbers = [float(value) for value in values if value is not None]
    are_known = numbers and len(numbers) == len(values)
    return sum(numbers) / len(numbers) if are_known else None


def _difference_columns(group: JudgeGroup, settings: list[str], label: str) -> dict[str, Any]:
    """The columns of a method that compare it with the baseline."""
    paired = group.paired(label, group.baseline, settings)
    row: dict[str, Any] = {"baseline": group.baseline, "pairs": len(paired)}
    if not paired:
        return row
    means = [float(values.mean()) for values in paired.values()]
    row["wins"], row["ties"], row["losses"] = statistics.tally(means)
    differences = group.differences(label, group.baseline, settings)
    if differences:
        row["difference"] = float(statistics.seed_means(differences).mean())
    interval = statistics.interval(differences)
    if interval is not None:
        row["low"], row["high"], row["interval"] = interval
    has_test = len(paired) >= statistics.MIN_PAIRS and len(differences) > 1
    if has_test and settings == group.settings:
        row["p"] = statistics.wilcoxon(means)
        # pairs of one seed in several settings are not independent
        if len(settings) > 1:
            row["p"] = max(row["p"], statistics.t_test_over_seeds(differences))
    return row


def _best(group: JudgeGroup, means: DataFrame, settings: list[str]) -> str | None:
    """The method with the best mean if the interval of its paired difference from the next best
    lies above 0, else None.

    None also if methods ran with different seeds, since their means are then over unlike runs.
    """
    by_method = {label: mean_over_settings(means[label], settings) for label in group.methods}
    ran = {label: by_seed for label, by_seed in by_method.items() if len(by_seed)}
    if len(ran) < 2 or len({tuple(by_seed.index) for by_seed in ran.values()}) > 1:
        return None
    first, second, *_ = sorted(ran, key=lambda label: -ran[label].mean())
    interval = statistics.interval(
        group.differences(
            first,
            second,
            settings,
        )
    )
    return first if interval and interval[0] > 0 else None


# ---------------------------------------------------------------- harm


def share_harmed(runs: DataFrame) -> Series:
    """The share of each run's clients that score below training alone (same setting and seed) by
    more than the noise of their test samples; NaN without a run of training alone.

    The noise of other metrics than accuracy is unknown: every client that scores lower counts.
    """
    local = training_alone(runs)
    scores = tidy(runs).reset_index(names="at")
    keys = [*UNIT, "client"]
    alone = scores[scores.method == local].set_index(keys).value.rename("alone")
    scores_and_alone = scores[scores.method != local].join(alone, on=keys).dropna(subset="alone")
    sizes = {row.Index: tested_samples(row) for row in runs.itertuples()}
    units = zip(scores_and_alone["at"], scores_and_alone.client, strict=True)
    tested = np.array([sizes[at].get(client, 0.0) for at, client in units])
    floor = statistics.noise_threshold(
        scores_and_alone.value.to_numpy(),
        scores_and_alone.alone.to_numpy(),
        tested,
    )
    is_worse = scores_and_alone.alone - scores_and_alone.value > floor
    return is_worse.groupby(scores_and_alone["at"]).mean().reindex(runs.index)


def tested_samples(run: Any) -> dict[int, float]:
    """Number of test samples by client; empty if the noise of the run's scores is unknown."""
    if run.metric != ACCURACY.name or run.run.setting("data.score_on") == "validation":
        return {}
    rows = run.run.rows("split")
    return {int(row["client"]): row["test_samples"] for row in rows if "test_samples" in row}


def harm_notes(runs: DataFrame) -> list[str]:
    """Notes below the table: on the column `harmed` (`share_harmed`) and, for a metric of
    `evaluation.metrics`, on the number of clients over which it is averaged."""
    if all(tested_samples(run) for run in runs.itertuples()):
        return [
            "harmed: below training alone by more than the noise of the client's test samples "
            "alone. The noise of training is left out, so it is no test: of clients that lose "
            "nothing 14 to 44 % were counted where the same method was trained with another seed"
        ]
    notes = [
        "harmed: every client below training alone counts; how much is noise is not known here"
    ]
    metric = runs.metric.iloc[0]
    if metric in FURTHER:
        smallest = [run.summary.get("least_test_class") for run in runs.run]
        counts = [count for count in smallest if isinstance(count, int)]
        rare = ""
        if counts:
            rare = f"; the rarest class of a client's test part has {min(counts)} samples"
        numbers = runs.scores.map(len)
        low, high = numbers.min(), numbers.max()
        number = f"{low}" if low == high else f"{low} to {high}"
        clients = max(len(run.rows("final")) for run in runs.run)
        notes.append(f"{metric}: means are over {number} of {clients} clients{rare}")
    return notes


# ---------------------------------------------------------- ranks and notes


def _ranks(groups: list[JudgeGroup]) -> tuple[list[Ranks], list[str]]:
    """The ranks of each judge with enough settings and methods, and a note on each that has several
    but too few."""
    ranked, notes = [], []
    for group in groups:
        labels = group.methods
        means = group.units().dropna()
        table = means.groupby(level="setting", sort=False).mean().to_numpy()
        if len(table) >= statistics.MIN_PAIRS and len(labels) >= MIN_METHODS:
            chi_square, p, ranks = statistics.friedman(table)
            pairwise = statistics.pairwise(table)
            places = statistics.cliques(ranks, pairwise)
            cliques = [[labels[k] for k in clique] for clique in places]
            lists = ranks.tolist(), pairwise.tolist(), cliques
            ranked.append(
                Ranks(
                    group.judge,
                    labels,
                    len(table),
                    chi_square,
                    p,
                    *lists,
                )
            )
        elif len(group.settings) > 1 and len(labels) > 1:
            notes.append(
                f"{MODELS[group.judge]}: no Friedman test: it wants {statistics.MIN_PAIRS} "
                f"settings that all methods have run in, and {MIN_METHODS} methods; here "
                f"{len(table)} and {len(labels)}"
            )
    return ranked, notes


def _time_notes(runs: DataFrame) -> list[str]:
    """A note on the meaning of the seconds, if runs have them."""
    with_seconds = [run for run in runs.run if run.has("seconds")]
    timed: dict[str, RunResult] = {run.name: run for run in with_seconds}
    undivided = sum(not run.has("seconds_evaluation") for run in timed.values())
    more = f" ({undivided} of {len(timed)} runs do not tell it apart)" if undivided else ""
    return [f"time: of the rounds, without scoring{more}"] if timed else []


def _one_class_notes(runs: DataFrame) -> list[str]:
    """A note on rows whose final models predict one class, if accuracies are compared."""
    judges = [run.judge for run in runs.run]
    judged = runs[(runs.metric == ACCURACY.name) & (runs.model == judges)]
    flags = judged.run.map(lambda run: bool(one_class_note(run)))
    rows = []
    for label, of_method in flags.groupby(judged.method, sort=False):
        if of_method.any():
            rows.append(f"{label} ({of_method.sum()} of {len(of_method)} runs)")
    if not rows:
        return []
    return [
        "one class: some final models predict one class for all of the client's test samples: "
        f"{', '.join(rows)}; accuracy does not show it, evaluation.metrics "
        f"[{', '.join(SHOWS_ONE_CLASS)}] and --metric do"
    ]


def _test_notes(table: DataFrame, compared: DataFrame) -> list[str]:
    """Notes on intervals and stars, and on the number of seeds that a star takes.

    Args:
        table: the table of the comparison.
        compared: its rows that could be tested.
    """
    notes = []
    kinds = [words for kind, words in INTERVALS.items() if table.interval.eq(kind).any()]
    if kinds:
        notes.append(
            f"intervals: {1 - statistics.LEVEL:.0%} for the mean difference of new seeds; "
            f"{'; '.join(kinds)}"
        )
    settings = set(table.setting)
    tested = table.p.count()
    if tested:
        seeds = " (and Student's t over seeds, if that is greater)" if ALL in settings else ""
        notes.append(
            f"p: Wilcoxon signed rank over pairs{seeds}, Holm-corrected ({tested} of them); * "
            f"where it is at most {statistics.LEVEL:g}"
        )
    needed = statistics.pairs_needed(len(compared))
    pairs, lone = compared.pairs.min(), (compared.seeds < 2).all()
    if pairs < needed or lone:
        setting_count = len(settings - {ALL})
        seeds = f"{max(2, -(-needed // setting_count))} seeds"
        seeds += f" in each of {setting_count} settings" if setting_count > 1 else ""
        why = "one seed says nothing of others; " if lone else ""
        notes.append(
            f"stars: {why}p corrected for all {len(compared)} comparisons can be "
            f"{statistics.LEVEL:g} from {needed} pairs on, {seeds} (fewest pairs here: {pairs}); "
            f"fewer than {statistics.MIN_PAIRS} pairs are not tested"
        )
    return notes
