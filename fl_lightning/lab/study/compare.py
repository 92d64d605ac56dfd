"""Methods side by side: means over seeds, paired differences to a baseline, tests. Units are
(setting, seed).

Judges are never mixed: a method is compared with those that are judged by the same kind of model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fl_lightning.foundation.metric import ACCURACY, MODELS, SHOWS_ONE_CLASS
from fl_lightning.lab.report.tables import reached, scored_seldom, worst_tenth
from fl_lightning.lab.study import statistics
from fl_lightning.lab.study.cells import Cell
from fl_lightning.lab.study.groups import (
    ALL,
    Group,
    Unit,
    choose_baseline,
    complete,
    grouped,
    no_pairs,
    training_alone,
)
from fl_lightning.lab.study.harm import harm_notes, share_harmed
from fl_lightning.results.result import one_class

MIN_METHODS = 3
"""Of ranks over settings: of two there is nothing that Wilcoxon's test does not say."""
INTERVALS = {
    "t": f"under {statistics.FEW} seeds Student's t over seeds",
    "bootstrap": f"from {statistics.FEW} seeds on the outer ends of Student's t over seeds and of "
    f"hierarchical"
    " bootstrap-t (seeds, then clients within a seed)",
}


@dataclass(frozen=True)
class Row:
    """A method by one judge in one setting (or in all), over its seeds. Accuracies lie in 0..1;
    None: not known."""

    judge: str
    setting: str
    method: str
    seeds: int
    """That the mean is over; of `ALL` those that have run in every setting."""
    mean: float | None
    std: float | None
    """Over seeds, of one unit more than none (n - 1)."""
    worst_tenth: float | None
    """Mean over the worst tenth of the clients of a seed, at least one."""
    harmed: float | None
    """Share of clients that are worse off than with training alone, beyond their test samples'
    noise (`noise`)."""
    mib: float | None
    """Sent by clients and server, up to the target if there is one, else in the whole run; mean
    over runs."""
    seconds: float | None
    """Of the rounds without scoring, likewise."""
    channel_seconds: float | None
    """Of a modelled channel, likewise."""
    runs: int
    reached: int | None
    """Runs that have reached the target."""
    baseline: str | None = None
    pairs: int | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    interval: str | None = None
    """How `low` and `high` came about: `t` or `bootstrap`."""
    wins: int | None = None
    ties: int | None = None
    losses: int | None = None
    p: float | None = None
    """Of Wilcoxon's test over pairs; in `ALL` that of a t test over seeds, if that is greater."""
    p_holm: float | None = None
    chosen: str | None = None
    """Values that `fl-train tune` chose for it."""

    @property
    def star(self) -> str:
        """`*` where the corrected p says so."""
        return "*" if self.p_holm is not None and self.p_holm <= statistics.LEVEL else ""


@dataclass(frozen=True)
class Ranks:
    """Methods of one judge, ranked over settings."""

    judge: str
    methods: list[str]
    settings: int
    chi_square: float
    p: float
    ranks: list[float]
    """Mean ranks; 1 is best."""
    pairwise: list[list[float]]
    """Wilcoxon's p between methods, Holm-corrected."""
    cliques: list[list[str]]
    """Methods of neighbouring ranks of which no two differ."""


@dataclass(frozen=True)
class Compared:
    """The whole comparison."""

    rows: list[Row]
    ranks: list[Ranks]
    notes: list[str]
    target: float | None
    best: dict[tuple[str, str], str] = field(default_factory=dict)
    """By judge and setting the method with the best mean, where the interval of its paired
    difference to the next best lies above 0."""


def compare(
    cells: Sequence[Cell], baseline: str | None = None, target: float | None = None
) -> Compared:
    """The comparison of `cells`, each with `baseline`.

    Args:
        cells: as `cells.read` gives them.
        baseline: a method's label; None: training alone (`_local`), else the first method of a
            judge.
        target: the accuracy, in 0..1, at which bytes and seconds are taken.

    Raises:
        BadInput: nobody is called so, there are no pairs, or only such as are judged by different
            kinds of model.
    """
    groups, notes = grouped(cells)
    notes += choose_baseline(groups, baseline)
    alone = training_alone(cells)
    rows = [
        _row(group, name, settings, label, alone, target)
        for group in groups
        for name, settings in group.blocks()
        for label in group.cells
        if any(setting in settings for setting, _ in group.cells[label])
    ]
    if not any(row.pairs for row in rows if baseline in (None, row.baseline)):
        raise no_pairs(groups, baseline)
    rows = _corrected(rows)
    best = {
        (g.judge, name): label
        for g in groups
        for name, at in g.blocks()
        if (label := _best(g, at)) is not None
    }
    ranks, rank_notes = _ranks(groups)
    last = {group.judge: group.blocks()[-1][0] for group in groups}
    compared = [row for row in rows if row.baseline and row.setting == last[row.judge]]
    seldom = scored_seldom(cell.run for cell in cells) if target is not None else ""
    notes += [f"target: {seldom}"] if seldom else []
    notes += (
        _time(cells) + _how(rows, compared) + rank_notes + harm_notes(cells) + _one_class(cells)
    )
    return Compared(rows, ranks, notes, target, best)


# ---------------------------------------------------------------- rows


def _row(
    group: Group,
    name: str,
    settings: list[str],
    label: str,
    alone: dict[Unit, Cell],
    target: float | None,
) -> Row:
    scores = {unit: values for unit, values in group.scores[label].items() if unit[0] in settings}
    cells = [group.cells[label][unit] for unit in scores]
    seeds = complete(settings, scores)

    def over_seeds(of: dict[Unit, float | None]) -> np.ndarray | None:
        """Of each seed the mean over settings; None if a value is not known."""
        values = [[of.get((setting, seed)) for setting in settings] for seed in seeds]
        known = seeds and all(value is not None for row in values for value in row)
        return np.array(values, dtype=float).mean(axis=1) if known else None

    means = over_seeds({unit: float(values.mean()) for unit, values in scores.items()})
    worst = over_seeds({unit: worst_tenth(values) for unit, values in scores.items()})
    harmed = over_seeds({cell.unit: share_harmed(cell, alone.get(cell.unit)) for cell in cells})
    costs = [_costs(cell, target) for cell in cells]
    row = Row(
        judge=group.judge,
        setting=name,
        method=label,
        seeds=len(seeds),
        mean=_mean(means),
        worst_tenth=_mean(worst),
        harmed=_mean(harmed),
        std=float(means.std(ddof=1)) if means is not None and len(means) > 1 else None,
        mib=_total(costs, "mib"),
        seconds=_total(costs, "wall"),
        channel_seconds=_total(costs, "channel"),
        runs=len(cells),
        reached=None if target is None else sum(cost is not None for cost in costs),
    )
    return (
        row if group.baseline in (None, label) else replace(row, **_against(group, settings, label))
    )


def _against(group: Group, settings: list[str], label: str) -> dict[str, Any]:
    """The fields of a row that speak of the baseline."""
    ours, theirs = group.scores[label], group.scores[str(group.baseline)]
    paired = {
        unit: ours[unit] - theirs[unit] for unit in ours if unit in theirs and unit[0] in settings
    }
    means = [float(values.mean()) for values in paired.values()]
    fields: dict[str, Any] = {"baseline": group.baseline, "pairs": len(paired)}
    if not paired:
        return fields
    fields |= dict(zip(("wins", "ties", "losses"), statistics.tally(means), strict=True))
    differences = group.differences(label, str(group.baseline), settings)
    if differences:
        fields["difference"] = float(statistics.seed_means(differences).mean())
        fields |= zip(("low", "high", "interval"), _interval(differences) or (), strict=False)
    if settings == group.settings and len(paired) >= statistics.MIN_PAIRS and len(differences) > 1:
        fields["p"] = statistics.wilcoxon(means)
        # pairs of one seed in several settings may have in common what the seed brings
        if len(settings) > 1:
            fields["p"] = max(fields["p"], statistics.over_seeds(differences))
    return fields


def _best(group: Group, settings: list[str]) -> str | None:
    """The method with the best mean, where the interval of its difference to the next best lies
    above 0.

    None, too, where methods have not the same seeds: their means are then of unlike runs.
    """
    by_label = {
        label: seeds
        for label, scores in group.scores.items()
        if (seeds := complete(settings, scores))
    }
    if len({tuple(seeds) for seeds in by_label.values()}) > 1:
        return None
    means = {
        label: np.mean(
            [group.scores[label][setting, seed].mean() for seed in seeds for setting in settings]
        )
        for label, seeds in by_label.items()
    }
    first, second = [*sorted(means, key=lambda label: -means[label]), None, None][:2]
    if first is None or second is None:
        return None
    interval = _interval(group.differences(first, second, settings))
    return first if interval and interval[0] > 0 else None


def _interval(differences: list[list[np.ndarray]]) -> tuple[float, float, str] | None:
    """None of one seed, and of seeds that differ alike: without a spread to go by it would claim to
    be certain."""
    return (
        None
        if len(differences) < 2 or statistics.alike(differences)
        else statistics.interval(differences)
    )


def _costs(cell: Cell, target: float | None) -> dict[str, float | None] | None:
    """MiB, seconds and modelled seconds of the channel, of the run or up to the target; None if it
    never reached it."""
    if target is not None:
        return reached(cell.run, target, cell.column)
    return {name: cell.run.spent(name) for name in ("mib", "wall", "channel")}


def _total(costs: list[dict[str, float | None] | None], name: str) -> float | None:
    """Mean over runs; None unless it is known of all."""
    values = [None if cost is None else cost[name] for cost in costs]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _mean(values: np.ndarray | None) -> float | None:
    return None if values is None else float(values.mean())


def _corrected(rows: list[Row]) -> list[Row]:
    """With Holm's correction over all tests of the table: one family, whatever the judge."""
    tested = [at for at, row in enumerate(rows) if row.p is not None]
    corrected = dict(
        zip(tested, statistics.holm([rows[at].p or 0.0 for at in tested]), strict=True)
    )
    return [replace(row, p_holm=corrected.get(at)) for at, row in enumerate(rows)]


# ---------------------------------------------------------- ranks, and what is said below the table


def _ranks(groups: list[Group]) -> tuple[list[Ranks], list[str]]:
    """Friedman's test for each judge with enough settings and methods; where there are several but
    too few, a note."""
    ranked, notes = [], []
    for group in groups:
        labels, table = list(group.scores), []
        for setting in group.settings:
            seeds = set.intersection(
                *({s for at, s in units if at == setting} for units in group.scores.values())
            )
            if seeds:
                means = [
                    [group.scores[label][setting, seed].mean() for seed in sorted(seeds)]
                    for label in labels
                ]
                table.append(np.mean(means, axis=1))
        if len(table) >= statistics.MIN_PAIRS and len(labels) >= MIN_METHODS:
            chi_square, p, ranks = statistics.friedman(np.array(table))
            pairwise = statistics.pairwise(np.array(table))
            cliques = [
                [labels[k] for k in clique] for clique in statistics.cliques(ranks, pairwise)
            ]
            lists = [float(rank) for rank in ranks], pairwise.tolist(), cliques
            ranked.append(Ranks(group.judge, labels, len(table), chi_square, p, *lists))
        elif len(group.settings) > 1 and len(labels) > 1:
            needed = (
                f"it wants {statistics.MIN_PAIRS} settings that all methods have run in, and "
                f"{MIN_METHODS} methods"
            )
            notes.append(
                f"{MODELS[group.judge]}: no Friedman test: {needed}; here {len(table)} and "
                f"{len(labels)}"
            )
    return ranked, notes


def _time(cells: Iterable[Cell]) -> list[str]:
    """Which seconds these are, where there are any."""
    timed = {cell.run.name: cell.run for cell in cells if cell.run.has("seconds")}
    whole = sum(not run.has("seconds_evaluation") for run in timed.values())
    more = f" ({whole} of {len(timed)} runs do not tell it apart)" if whole else ""
    return [f"time: of the rounds, without scoring{more}"] if timed else []


def _one_class(cells: Iterable[Cell]) -> list[str]:
    """Names the rows whose runs end with models that predict one class, where accuracy is
    compared."""
    flags: dict[str, list[bool]] = {}
    for cell in cells:
        if cell.metric == ACCURACY.name and cell.judge == cell.run.judge:
            flags.setdefault(cell.label, []).append(bool(one_class(cell.run)))
    rows = [
        f"{label} ({sum(of_runs)} of {len(of_runs)} runs)"
        for label, of_runs in flags.items()
        if any(of_runs)
    ]
    if not rows:
        return []
    subject = "some final models predict one class for all of the client's test samples"
    advice = (
        f"accuracy does not show it, evaluation.metrics [{', '.join(SHOWS_ONE_CLASS)}] and "
        f"--metric do"
    )
    return [f"one class: {subject}: {', '.join(rows)}; {advice}"]


def _how(rows: list[Row], compared: list[Row]) -> list[str]:
    """How intervals and stars came about, and how many seeds a star would take. `compared`: the
    rows for tests."""
    kinds = {row.interval for row in rows}
    words = [text for kind, text in INTERVALS.items() if kind in kinds]
    level = f"intervals: {1 - statistics.LEVEL:.0%} for the mean difference of new seeds"
    notes = [f"{level}; {'; '.join(words)}"] if words else []
    if tested := sum(row.p is not None for row in rows):
        over = (
            "pairs (and Student's t over seeds, if that is greater)"
            if ALL in {r.setting for r in rows}
            else "pairs"
        )
        stars = f"* where it is at most {statistics.LEVEL:g}"
        notes.append(
            f"p: Wilcoxon signed rank over {over}, Holm-corrected ({tested} of them); {stars}"
        )
    needed, pairs = statistics.pairs_needed(len(compared)), min(row.pairs or 0 for row in compared)
    lone = all(row.seeds < 2 for row in compared)
    if pairs < needed or lone:
        settings = max(1, len({row.setting for row in rows} - {ALL}))
        seeds = (
            f"{max(2, -(-needed // settings))} "
            f"seeds{f' in each of {settings} settings' * (settings > 1)}"
        )
        notes.append(
            f"stars: {'one seed says nothing of others; ' if lone else ''}p corrected for all "
            f"{len(compared)} "
            f"comparisons can be {statistics.LEVEL:g} from {needed} pairs on, {seeds} (fewest "
            f"pairs here: {pairs}); "
            f"fewer than {statistics.MIN_PAIRS} pairs are not tested"
        )
    return notes
