"""The page's tables, as text: what ran, when a target was reached, what came out, how clients
differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fl_lightning.foundation.metric import ACCURACY, FURTHER, MODELS, Metric
from fl_lightning.lab.report import words
from fl_lightning.lab.report.words import NONE, model_words, text
from fl_lightning.results import provenance
from fl_lightning.results.columns import COLUMNS
from fl_lightning.results.folder import CLIENT_FLOPS, final_words
from fl_lightning.results.result import MIB, RunResult, one_class
from fl_lightning.results.runs import Comparison, differing, differing_keys, same_seeds

MOST_TARGETS = 8
_COMPARED = ("seed", "smoke", "model", "data", "federation", "optimizer", "evaluation")


@dataclass
class Table:
    """A head and rows; the first cell of a row heads it. Where `of_runs`, each further column is a
    run."""

    head: list[str]
    rows: list[list[str]]
    of_runs: bool = True


def overview(runs: list[RunResult]) -> Table:
    """What was run."""
    facts: dict[str, Callable[[RunResult], str]] = {
        "method": lambda run: words.component(words.method(run, runs)),
        "model": lambda run: words.component(run.config.get("model")),
        "data": words.data,
        "clients": words.clients,
        "participation": words.participation,
        "local epochs": words.local_training,
        "batch size": lambda run: text(run.setting("federation.batch_size")),
        "optimiser": words.optimizer,
        "samples": words.samples,
        "rounds done": lambda run: f"{run.rounds_done} of {text(run.rounds_asked)}",
        "judged": words.judged_by,
        "seed": lambda run: text(run.setting("seed")),
        "version": lambda run: text(run.facts.get("version")),
    }
    if any("privacy_epsilon" in run.summary for run in runs):
        facts["privacy"] = privacy
    if any("client_groups" in run.summary for run in runs):
        facts["grouped"] = grouped
    return Table(
        ["", *_names(runs)], [[name, *(fact(run) for run in runs)] for name, fact in facts.items()]
    )


def grouped(run: RunResult) -> str:
    """The layers that are mixed within groups, and who is in each."""
    if "client_groups" not in run.summary:
        return NONE
    groups = [", ".join(map(run.called, group)) for group in run.summary["client_groups"]]
    return f"in {', '.join(run.summary['grouped_layers'])}: {' | '.join(groups)}"


def privacy(run: RunResult) -> str:
    """Epsilon and delta of the run, and whose data they are about; a method's own report names what
    it covers."""
    kept = run.summary
    if "privacy_epsilon" not in kept:
        return "nothing is protected"
    whose = (
        f"for each {kept['privacy_unit']}"
        if "privacy_unit" in kept
        else str(kept.get("privacy_covers", ""))
    )
    size = (
        "infinite" if kept["privacy_epsilon"] is None else f"{float(kept['privacy_epsilon']):.3g}"
    )
    return f"epsilon {size} at delta {float(kept['privacy_delta']):g}, {whose}"


def remarks(runs: list[RunResult]) -> list[str]:
    """What must be known before any number is believed."""
    lines = []
    for run in runs:
        if not run.finished:
            lines.append(
                f"{run.name} is unfinished: {run.rounds_done} of {text(run.rounds_asked)} rounds "
                f"are done."
            )
        if run.facts.get("made_up_data"):
            lines.append(f"{run.name} was trained on made-up data: its accuracies mean nothing.")
        elif run.setting("smoke"):
            lines.append(
                f"{run.name} is a smoke run (a few samples and steps): its accuracies mean little."
            )
        if words := one_class(run):
            lines.append(f"{run.name}: {words}.")
    return lines + judges(runs)


def judges(runs: list[RunResult]) -> list[str]:
    """Where the runs have different judges: by which kind of model they are compared."""
    by = Comparison.of(runs)
    if not by.differ:
        return []
    own = "; ".join(
        f"{run.name}: {model_words(run.judge)}" for run in runs if run.has(run.metric.of("mean"))
    )
    line = f"Each run has a judge of its own ({own})."
    if by.kind is None:
        return [
            f"{line} No kind of model was scored in all: each number is by its run's own judge. Do "
            f"not compare them."
        ]
    shared = model_words(by.kind)
    return [
        f"{line} All are compared by what all were scored by: {shared}. Each run's own judge is "
        f"shown as well."
    ]


def incomparable(runs: list[RunResult]) -> list[str]:
    """Keys that differ between the runs although a comparison needs them equal."""
    keys = {key for key in differing_keys(runs) if key.partition(".")[0] in _COMPARED}
    if same_seeds(runs):
        keys -= {"seed"}  # what bands over seeds are made of
    if not any(
        key.startswith(("data.", "federation.", "smoke")) for key in keys
    ) and _other_samples(runs):
        keys.add("data.root")
    # `auto` may stand for different kinds of model: what counts is whether there is one that all
    # were scored by.
    keys -= {"evaluation.judge"}
    by = Comparison.of(runs)
    if by.differ and by.kind is None:
        keys.add("evaluation.judge")
    return sorted(keys)


def _other_samples(runs: list[RunResult]) -> bool:
    """Whether runs are known to have trained on different data, or with one seed on different
    samples of them."""
    if len({provenance.source_of(run.folder) for run in runs} - {None}) > 1:
        return True
    known = [(repr(run.setting("seed")), provenance.data_of(run.folder)) for run in runs]
    digests = {(seed, digest) for seed, digest in known if isinstance(digest, str)}
    return len(digests) > len({seed for seed, _ in digests})


def differences(runs: list[RunResult]) -> Table:
    """Every setting that is not the same in all runs."""
    rows = [[key, *(text(value) for value in values)] for key, values in differing(runs)]
    # no arguments and none that is known look alike
    seen = [row for row in rows if len({*row[1:]}) > 1]
    return Table(["setting", *_names(runs)], seen)


def targets(runs: list[RunResult]) -> list[float]:
    """Round scores, the easiest first, that a run reached and not all runs began with: the hardest
    few.

    Accuracies five points apart, or as close as it takes to have any; errors some eighth of the way
    apart.
    """
    by = Comparison.of(runs)
    column = by.column
    curves = [
        [row[column] for row in run.judged(column) if math.isfinite(row[column])] for run in runs
    ]
    curves = [curve for curve in curves if curve]
    if not by.metric.rises:
        return _falling(curves)
    begun = min((curve[0] for curve in curves), default=0.0)
    highest = max((max(curve) for curve in curves), default=0.0)
    for parts in (20, 50, 100, 200):
        steps = [k / parts for k in range(1, parts + 1) if begun < k / parts <= highest]
        if steps:
            return steps[-MOST_TARGETS:]
    return []


def _falling(curves: list[list[float]]) -> list[float]:
    """Round numbers between the greatest error that a run began with and the least that one
    reached, falling."""
    begun, least = (
        max((curve[0] for curve in curves), default=0.0),
        min(map(min, curves), default=0.0),
    )
    if begun <= least:
        return []
    rough = (begun - least) / MOST_TARGETS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first, last = math.ceil(least / step), math.ceil(begun / step)
    return [k * step for k in range(first, last)][::-1]


def reached(
    run: RunResult, target: float, column: str = "mean_accuracy"
) -> dict[str, float | None] | None:
    """Where on each axis the score in `column` first was `target` or better; None if it never
    was."""
    merit = COLUMNS[column].merit
    for at, row in enumerate(run.rows("metrics")):
        if column in row and merit(row[column]) >= merit(target):
            axes = {name: run.axis(name) for name in ("round", "mib", "channel", "wall")}
            return {name: None if values is None else values[at] for name, values in axes.items()}
    return None


def scored_seldom(runs: Iterable[RunResult]) -> str:
    """What a target reached means where rounds are not all scored; empty where they are."""
    every = sorted({int(run.setting("evaluation.every") or 1) for run in runs})
    if every[-1] == 1:
        return ""
    spacing = f"{every[0]} to {every[-1]}" if len(every) > 1 else str(every[0])
    more = f"up to {every[-1] - 1} rounds too late" if every[-1] > 2 else "up to a round too late"
    return (
        f"runs are scored every {spacing} rounds: a target is seen {more}, and its bytes and "
        f"seconds count them"
    )


def time_to_accuracy(runs: list[RunResult]) -> list[tuple[str, list[tuple[int, list[str]]]]]:
    """For each target: its text, and for each run its number and the cells round, MiB, channel,
    wall."""
    table, by = [], Comparison.of(runs)
    for target in targets(runs):
        lines = []
        for number, run in enumerate(runs):
            costs = reached(run, target, by.column)
            cells = ["not reached", "", "", ""]
            if costs is not None:
                spent = [
                    known(costs["mib"], mib),
                    *(known(costs[name], seconds) for name in ("channel", "wall")),
                ]
                cells = [f"{costs['round']:.0f}", *spent]
            lines.append((number, cells))
        table.append((f"{100 * target:g} %" if by.metric is ACCURACY else f"{target:.4g}", lines))
    return table


def _at_best(run: RunResult, column: str, shown: str) -> str:
    """`shown` in the round that is best by `column`."""
    accuracy, number = run.best(column)
    chosen = next((row for row in run.judged(shown) if row["round"] == number), {}).get(
        shown, math.nan
    )
    return (
        NONE
        if math.isnan(accuracy) or math.isnan(chosen)
        else f"{run.metric.shown(chosen)} (round {number})"
    )


def _last(run: RunResult, column: str) -> str:
    judged = run.judged(column)
    return (
        f"{run.metric.shown(judged[-1][column])} (round {judged[-1]['round']:.0f})"
        if judged
        else NONE
    )


def on_global_test(runs: list[RunResult]) -> list[list[str]]:
    """The rows of what came out on the test set of all clients, for each kind of model that a run
    scored on it."""
    shown = []
    for kind, model in MODELS.items():
        column = Comparison.of(runs).metric.on_global_test(kind)
        if any(run.has(column) for run in runs):
            begin = f"test set of all, {model}: "
            shown.append(
                [
                    f"{begin}best round (optimistic)",
                    *(_at_best(run, column, column) for run in runs),
                ]
            )
            shown.append([f"{begin}last judged round", *(_last(run, column) for run in runs)])
            ended = [(run, run.summary.get(f"final_{column}")) for run in runs]
            shown.append(
                [
                    f"{begin}all clients at the end",
                    *(known(v, run.metric.shown) for run, v in ended),
                ]
            )
    return shown


def by_judge(runs: list[RunResult]) -> list[list[str]]:
    """The rows of what came out: by the kind of model that runs are compared by, then by their own
    judges."""
    by = Comparison.of(runs)

    def of_clients(run: RunResult, kind: str | None) -> str:
        score, clients = run.mean_of_bests(by.metric.by(str(kind)))
        return f"{by.metric.shown(score)} ({clients} clients)" if clients else NONE

    parts = " or ".join(sorted({str(run.setting("data.score_on") or "test") for run in runs}))

    def of_kind(before: str, column: str, kinds: list[str | None]) -> list[list[str]]:
        return [
            [f"{before}model", *map(model_words, kinds)],
            [
                f"{before}best round, chosen on {parts} data (optimistic)",
                *(_at_best(run, column, column) for run in runs),
            ],
            [f"{before}mean of each client's best round (more so)", *map(of_clients, runs, kinds)],
            [f"{before}last judged round", *(_last(run, column) for run in runs)],
        ]

    own = "own judge: " if by.differ else ""
    judges = [run.judge for run in runs]
    shown = of_kind("", by.column, [by.kind] * len(runs)) if by.differ and by.kind else []
    mean = by.metric.of("mean")
    shown += of_kind(own, mean, judges)
    chosen = [_at_best(run, by.metric.of("validation"), mean) for run in runs]
    shown += [[f"{own}round chosen on validation data", *chosen]] if set(chosen) != {NONE} else []
    ended = [final_words(run.summary) if run.finished else NONE for run in runs]
    shown.append([f"{own}all clients at the end: model", *ended])
    for key, name in (("mean", "mean"), ("worst", "worst 10 %"), ("std", "spread (std)")):
        values = (run.summary.get(by.metric.of(f"final_{key}")) for run in runs)
        shown.append(
            [
                f"{own}all clients at the end: {name}",
                *(known(value, by.metric.shown) for value in values),
            ]
        )
    for name, metric in FURTHER.items():
        cells = [_averaged(run, name) for run in runs]
        shown += (
            [[f"{own}all clients at the end: {metric.mean_words}", *cells]]
            if set(cells) != {NONE}
            else []
        )
    return shown


def _averaged(run: RunResult, name: str) -> str:
    """The mean of one of `FURTHER` over the final models, and of how many clients it is."""
    mean, clients = (run.summary.get(f"final_{what}_{name}") for what in ("mean", "clients"))
    return f"{percent(mean)} (of {clients} clients)" if isinstance(mean, int | float) else NONE


def scores(runs: list[RunResult]) -> Table:
    """What came out and what it cost."""

    def summed(*columns: str) -> Callable[[RunResult], str]:
        return lambda run: known(run.total(*columns), mib, MIB)

    def peak(column: str) -> Callable[[RunResult], str]:
        return lambda run: known(
            max((row[column] for row in run.judged(column)), default=None), mib
        )

    facts: dict[str, Callable[[RunResult], str]] = {
        "upload": summed("upload_bytes"),
        "upload, parameters only": summed("upload_parameter_bytes"),
        "download": summed("download_bytes"),
        "download, parameters only": summed("download_parameter_bytes"),
        "modelled channel time": lambda run: known(run.total("channel_s"), seconds),
        "wall time of the rounds": lambda run: known(run.total("seconds"), seconds),
        "operations": lambda run: known(flops(run), operations),
        "peak memory, host": peak("memory_mib"),
        "peak memory, GPU": peak("memory_device_mib"),
        "peak memory, server's share": peak("memory_server_mib"),
        "true groups found in the relation, last round (adjusted Rand index; 1: all, "
        "0: by chance)": _agreement,
    }
    rows = [[name, *(fact(run) for run in runs)] for name, fact in facts.items()]
    optional = ("modelled", "operations", "peak", "true groups")
    kept = [row for row in rows if not row[0].startswith(optional) or set(row[1:]) != {NONE}]
    return Table(["", *_names(runs)], by_judge(runs) + on_global_test(runs) + kept)


def _agreement(run: RunResult) -> str:
    """The last round's `rand_index`, where true groups are known."""
    return known(
        next((row["rand_index"] for row in reversed(run.judged("rand_index"))), None),
        "{:.2f}".format,
    )


def fairness(runs: list[RunResult]) -> Table:
    """How far apart the clients of a run are."""
    kind = Comparison.of(runs).kind

    def spread(run: RunResult) -> list[str]:
        scores, which = run.scores(kind)
        if not scores:
            return [NONE] * 8
        values = np.array(sorted(scores.values(), key=run.metric.merit))
        tenth = worst_tenth(values, run.metric)
        numbers = (values.mean(), values.std(), values[0], tenth, np.median(values), values[-1])
        return [which, str(len(values)), *(run.metric.shown(float(number)) for number in numbers)]

    names = [
        "scores of",
        "clients",
        "mean",
        "spread (std)",
        "worst client",
        "worst 10 %, mean",
        "median",
        "best client",
    ]
    columns = [spread(run) for run in runs]
    rows = [[name, *(column[at] for column in columns)] for at, name in enumerate(names)]
    return Table(["", *_names(runs)], rows)


def worst_tenth(scores: np.ndarray, metric: Metric = ACCURACY) -> float:
    """Mean over the worst tenth of the clients, at least one."""
    worst_first = np.array(sorted(scores, key=metric.merit))
    return float(worst_first[: max(1, len(scores) // 10)].mean())


def flops(run: RunResult) -> float | None:
    """Floating-point operations of the whole run, of clients and server; None unless all of them
    were counted."""
    return run.total(*CLIENT_FLOPS, *(["flops_server"] if run.has("flops_server") else []))


FLOPS = {
    "flops_forward": "forward",
    "flops_backward": "backward",
    "flops_extra": "further passes",
    "flops_penalty": "proximal term",
    "flops_server": "server",
}
"""Columns of metrics.csv that count operations, in words."""


# ---------------------------------------------------------------- numbers with their units


def percent(value: float) -> str:
    """An accuracy in 0..1."""
    return f"{100 * value:.2f} %"


def mib(value: float) -> str:
    """So many MiB, in GiB or KiB where that reads better."""
    if 0 < value < 0.1:
        return f"{value * 1024:.1f} KiB"
    return (
        f"{value / 1024:,.1f} GiB"
        if value >= 10_240
        else f"{value:,.0f} MiB"
        if value >= 100
        else f"{value:.2f} MiB"
    )


def seconds(value: float) -> str:
    """Seconds, minutes or hours."""
    if value >= 7200:
        return f"{value / 3600:,.1f} h"
    if 0 < value < 0.1:
        return f"{value:.2g} s"
    return f"{value / 60:.1f} min" if value >= 600 else f"{value:.1f} s"


def operations(value: float) -> str:
    """Floating-point operations, in the unit that suits them."""
    unit, size = flop_unit(value)
    return f"{value / size:.3g} {unit}"


def flop_unit(value: float) -> tuple[str, int]:
    """FLOP to EFLOP, as suits `value`, and how many operations that is."""
    power = min(6, int(math.log10(value) // 3)) if value >= 1 else 0
    return f"{('', 'k', 'M', 'G', 'T', 'P', 'E')[power]}FLOP", 1000**power


def known(value: Any, write: Callable[[float], str], unit: float = 1) -> str:
    """A number as text; a dash where it is not known."""
    return write(value / unit) if isinstance(value, int | float) and math.isfinite(value) else NONE


def _names(runs: list[RunResult]) -> list[str]:
    return [run.name for run in runs]
