"""The page's tables, as text: what ran, when a target was reached, what came out, how clients
differ. A column for each run, unless said otherwise; the index heads the rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from pandas import DataFrame

from fl_lightning.foundation.csvtable import Row
from fl_lightning.foundation.metric import ACCURACY, FURTHER, MODELS
from fl_lightning.lab.report import words
from fl_lightning.lab.report.words import NONE, model_words, text
from fl_lightning.results import provenance
from fl_lightning.results.columns import COLUMNS
from fl_lightning.results.folder import CLIENT_FLOPS, final_words
from fl_lightning.results.result import AXES, MIB, RunResult, one_class_note, worst_tenth
from fl_lightning.results.runs import CommonScore, Runs, differing, differing_keys, have_same_seeds

MOST_TARGETS = 8
_COMPARED = ("seed", "smoke", "model", "data", "federation", "optimizer", "evaluation")
Fact = Callable[[RunResult], str]
Rows = dict[str, list[str]]
"""Cells of each row, one for each run."""


def of_runs(runs: Runs, rows: Rows) -> DataFrame:
    """A table with a column for each run."""
    return DataFrame.from_dict(
        rows,
        orient="index",
        columns=[run.name for run in runs],
    )


def of_facts(runs: Runs, facts: dict[str, Fact]) -> Rows:
    """A row for each fact."""
    return {name: [fact(run) for run in runs] for name, fact in facts.items()}


def overview(runs: Runs) -> DataFrame:
    """What was run."""
    facts: dict[str, Fact] = {
        "method": lambda run: words.method(run, runs),
        "model": lambda run: words.component(run.config.get("model")),
        "data": words.data,
        "clients": words.clients,
        "participation": words.participation,
        "local epochs": words.local_training,
        "batch size": lambda run: text(run.setting("federation.batch_size")),
        "optimiser": words.optimizer,
        "samples": words.samples,
        "rounds done": words.rounds_done,
        "judged": words.judged_by,
        "seed": lambda run: text(run.setting("seed")),
        "version": lambda run: text(run.facts.get("version")),
    }
    if any("privacy_epsilon" in run.summary for run in runs):
        facts["privacy"] = privacy
    if any("client_groups" in run.summary for run in runs):
        facts["grouped"] = grouped
    return of_runs(runs, of_facts(runs, facts))


def grouped(run: RunResult) -> str:
    """The layers that are mixed within groups, and who is in each."""
    groups = [
        ", ".join(map(run.client_label, group)) for group in run.summary.get("client_groups", [])
    ]
    layers = ", ".join(run.summary.get("grouped_layers", []))
    return f"in {layers}: {' | '.join(groups)}" if groups else NONE


def privacy(run: RunResult) -> str:
    """Epsilon and delta of the run, and whose data they are about; a method's own report names what
    it covers."""
    summary = run.summary
    if "privacy_epsilon" not in summary:
        return "nothing is protected"
    whose = str(summary.get("privacy_covers", ""))
    if "privacy_unit" in summary:
        whose = f"for each {summary['privacy_unit']}"
    epsilon = summary["privacy_epsilon"]
    size = "infinite" if epsilon is None else f"{float(epsilon):.3g}"
    return f"epsilon {size} at delta {float(summary['privacy_delta']):g}, {whose}"


def remarks(runs: Runs) -> list[str]:
    """What must be known before any number is believed."""
    lines = []
    for run in runs:
        if not run.finished:
            lines.append(f"{run.name} is unfinished: {words.rounds_done(run)} rounds are done.")
        if run.facts.get("made_up_data"):
            lines.append(f"{run.name} was trained on made-up data: its accuracies mean nothing.")
        elif run.setting("smoke"):
            smoke = "a smoke run (a few samples and steps): its accuracies mean little"
            lines.append(f"{run.name} is {smoke}.")
        if alike := one_class_note(run):
            lines.append(f"{run.name}: {alike}.")
    return lines + judges(runs)


def judges(runs: Runs) -> list[str]:
    """Where the runs have different judges: by which kind of model they are compared."""
    by = CommonScore.of(runs)
    if not by.differ:
        return []
    judged = [run for run in runs if run.has(run.metric.of("mean"))]
    judges_of_runs = "; ".join(f"{run.name}: {model_words(run.judge)}" for run in judged)
    line = f"Each run has a judge of its own ({judges_of_runs})."
    if by.kind is None:
        none = "No kind of model was scored in all: each number is by its run's own judge."
        return [f"{line} {none} Do not compare them."]
    shared = f"All are compared by what all were scored by: {model_words(by.kind)}."
    return [f"{line} {shared} Each run's own judge is shown as well."]


def incomparable(runs: Runs) -> list[str]:
    """Keys that differ between the runs although a comparison needs them equal."""
    keys = {key for key in differing_keys(runs) if key.partition(".")[0] in _COMPARED}
    if have_same_seeds(runs):
        keys -= {"seed"}  # what bands over seeds are made of
    of_data = any(key.startswith(("data.", "federation.", "smoke")) for key in keys)
    # no such key differs, but the samples do: name the key under which users look for data
    if not of_data and _other_samples(runs):
        keys.add("data.root")
    # `auto` may stand for different kinds of model: what counts is whether there is one that all
    # were scored by
    keys -= {"evaluation.judge"}
    by = CommonScore.of(runs)
    if by.differ and by.kind is None:
        keys.add("evaluation.judge")
    return sorted(keys)


def _other_samples(runs: Runs) -> bool:
    """Whether runs are known to have trained on different data, or with one seed on different
    samples of them."""
    if len({provenance.source_digest(run.folder) for run in runs} - {None}) > 1:
        return True
    digests = {(repr(run.setting("seed")), provenance.data_digest(run.folder)) for run in runs}
    seeds = [seed for seed, digest in digests if digest is not None]
    return len(seeds) > len(set(seeds))


def differences(runs: Runs) -> DataFrame:
    """Every setting that is not the same in all runs."""
    rows = {key: [text(value) for value in values] for key, values in differing(runs)}
    # no arguments and none that is known look alike
    return of_runs(runs, {key: cells for key, cells in rows.items() if len({*cells}) > 1})


# ---------------------------------------------------------------- time to accuracy


def targets(runs: Runs) -> list[float]:
    """Even scores (0.8, 0.85, ...), the easiest first, that a run reached and not all runs began
    with: the hardest few.

    Accuracies five points apart, or as close as it takes to have any; errors some eighth of the way
    apart.
    """
    by = CommonScore.of(runs)
    curves = []
    for run in runs:
        values = [value for value in run.column(by.column) if math.isfinite(value)]
        curves += [values] if values else []
    if not curves:
        return []
    first = [curve[0] for curve in curves]
    if not by.metric.rises:
        return _falling(max(first), min(map(min, curves)))
    begun, highest = min(first), max(map(max, curves))
    for parts in (20, 50, 100, 200):
        steps = [k / parts for k in range(1, parts + 1) if begun < k / parts <= highest]
        if steps:
            return steps[-MOST_TARGETS:]
    return []


def _falling(begun: float, least: float) -> list[float]:
    """Even numbers between the greatest error that a run began with and the least that one reached,
    falling."""
    if begun <= least:
        return []
    rough = (begun - least) / MOST_TARGETS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [k * step for k in range(math.ceil(least / step), math.ceil(begun / step))][::-1]


def reached(
    run: RunResult, target: float, column: str = "mean_accuracy"
) -> dict[str, float | None] | None:
    """Where on each axis the score in `column` first was `target` or better; None if it never
    was."""
    merit = COLUMNS[column].merit
    for at, row in enumerate(run.rows("metrics")):
        if column in row and merit(row[column]) >= merit(target):
            axes = {name: run.axis(name) for name in AXES}
            return {name: None if values is None else values[at] for name, values in axes.items()}
    return None


def scored_seldom(runs: Iterable[RunResult]) -> str:
    """What a target reached means where rounds are not all scored; empty where they are."""
    every = sorted({int(run.setting("evaluation.every") or 1) for run in runs})
    least, most = every[0], every[-1]
    if most == 1:
        return ""
    spacing = f"{least} to {most}" if least < most else str(most)
    late = f"up to {most - 1} rounds too late" if most > 2 else "up to a round too late"
    begin = f"runs are scored every {spacing} rounds: a target is seen {late}"
    return f"{begin}, and its bytes and seconds count them"


def time_to_accuracy(runs: Runs) -> list[tuple[str, list[list[str]]]]:
    """Targets, and what it took each run to reach each: round, MiB, seconds of the channel and on
    the clock."""
    table, by = [], CommonScore.of(runs)
    for target in targets(runs):
        lines = []
        for run in runs:
            costs = reached(run, target, by.column)
            cells = ["not reached", "", "", ""]
            if costs is not None:
                times = [known(costs[name], seconds) for name in ("channel", "wall")]
                cells = [f"{costs['round']:.0f}", known(costs["mib"], mib), *times]
            lines.append(cells)
        words = f"{100 * target:g} %" if by.metric is ACCURACY else f"{target:.4g}"
        table.append((words, lines))
    return table


# ---------------------------------------------------------------- final scores


def _at_best(
    run: RunResult,
    column: str,
    shown: str,
) -> str:
    """`shown` in the round that is best by `column`."""
    best = run.best(column)[1]
    rows = [row for row in run.rows_with(shown) if row["round"] == best]
    return _in_round(run, rows, shown)


def _last(run: RunResult, column: str) -> str:
    return _in_round(run, run.rows_with(column), column)


def _in_round(
    run: RunResult,
    rows: Sequence[Row],
    column: str,
) -> str:
    """A score in the last of `rows`, and its round."""
    if not rows:
        return NONE
    return f"{run.metric.shown(rows[-1][column])} (round {rows[-1]['round']:.0f})"


def on_global_test(runs: Runs) -> Rows:
    """The rows of what came out on the test set of all clients, for each kind of model that a run
    scored on it."""
    metric = CommonScore.of(runs).metric
    rows = {}
    for kind, model in MODELS.items():
        column = metric.on_global_test(kind)
        if any(run.has(column) for run in runs):
            begin = f"test set of all, {model}: "
            best = [_at_best(run, column, column) for run in runs]
            ended = [known(run.summary.get(f"final_{column}"), run.metric.shown) for run in runs]
            rows[f"{begin}best round (optimistic)"] = best
            rows[f"{begin}last judged round"] = [_last(run, column) for run in runs]
            rows[f"{begin}all clients at the end"] = ended
    return rows


def by_judge(runs: Runs) -> Rows:
    """The rows of what came out: by the kind of model that runs are compared by, then by their own
    judges."""
    by = CommonScore.of(runs)
    metric, mean = by.metric, by.metric.of("mean")
    rows, prefix = {}, "own judge: " if by.differ else ""
    if by.differ and by.kind:
        rows = _of_kind(
            runs,
            "",
            by.column,
            [by.kind] * len(runs),
        )
    rows |= _of_kind(
        runs,
        prefix,
        mean,
        [run.judge for run in runs],
    )
    chosen = [_at_best(run, metric.of("validation"), mean) for run in runs]
    if set(chosen) != {NONE}:
        rows[f"{prefix}round chosen on validation data"] = chosen
    end = f"{prefix}all clients at the end: "
    rows[f"{end}model"] = [final_words(run.summary) if run.finished else NONE for run in runs]
    for key, name in (("mean", "mean"), ("worst", "worst 10 %"), ("std", "spread (std)")):
        values = [run.summary.get(metric.of(f"final_{key}")) for run in runs]
        rows[f"{end}{name}"] = [known(value, metric.shown) for value in values]
    for further in FURTHER.values():
        cells = [_averaged(run, further.name) for run in runs]
        if set(cells) != {NONE}:
            rows[f"{end}{further.mean_words}"] = cells
    return rows


def _of_kind(
    runs: Runs,
    before: str,
    column: str,
    kinds: list[str | None],
) -> Rows:
    """The rows of scores in rounds, of models of these kinds."""
    metric = runs[0].metric
    parts = " or ".join(sorted({str(run.setting("data.score_on") or "test") for run in runs}))
    of_clients = []
    for run, kind in zip(runs, kinds, strict=True):
        # a run of unknown judge, None, has no such column, and so 0 clients
        score, clients = run.mean_of_bests(metric.by(str(kind)))
        of_clients.append(f"{metric.shown(score)} ({clients} clients)" if clients else NONE)
    best = [_at_best(run, column, column) for run in runs]
    return {
        f"{before}model": [model_words(kind) for kind in kinds],
        f"{before}best round, chosen on {parts} data (optimistic)": best,
        f"{before}mean of each client's best round (even more optimistic)": of_clients,
        f"{before}last judged round": [_last(run, column) for run in runs],
    }


def _averaged(run: RunResult, name: str) -> str:
    """The mean of one of `FURTHER` over the final models, and of how many clients it is."""
    mean, clients = (run.summary.get(f"final_{key}_{name}") for key in ("mean", "clients"))
    return f"{percent(mean)} (of {clients} clients)" if isinstance(mean, int | float) else NONE


AGREEMENT = (
    "true groups found in the relation, last round (adjusted Rand index; 1: all, 0: by chance)"
)
OPTIONAL = ("modelled", "operations", "peak", "true groups")
"""Beginnings of rows that are left out where no run has a value."""


def scores(runs: Runs) -> DataFrame:
    """What came out and what it cost."""

    def total(
        column: str,
        write: Callable[[float], str],
        unit: float = 1,
    ) -> Fact:
        return lambda run: known(run.total(column), write, unit)

    def peak(column: str) -> Fact:
        return lambda run: known(max(filter(math.isfinite, run.column(column)), default=None), mib)

    facts: dict[str, Fact] = {
        "upload": total("upload_bytes", mib, MIB),
        "upload, parameters only": total(
            "upload_parameter_bytes",
            mib,
            MIB,
        ),
        "download": total("download_bytes", mib, MIB),
        "download, parameters only": total(
            "download_parameter_bytes",
            mib,
            MIB,
        ),
        "modelled channel time": total("channel_s", seconds),
        "wall time of the rounds": total("seconds", seconds),
        "operations": lambda run: known(flops(run), operations),
        "peak memory, host": peak("memory_mib"),
        "peak memory, GPU": peak("memory_device_mib"),
        "peak memory, server's share": peak("memory_server_mib"),
        AGREEMENT: _agreement,
    }
    rows = by_judge(runs) | on_global_test(runs)
    for name, cells in of_facts(runs, facts).items():
        if set(cells) != {NONE} or not name.startswith(OPTIONAL):
            rows[name] = cells
    return of_runs(runs, rows)


def _agreement(run: RunResult) -> str:
    """The last round's `rand_index`, where true groups are known."""
    judged = run.rows_with("rand_index")
    return f"{judged[-1]['rand_index']:.2f}" if judged else NONE


def fairness(runs: Runs) -> DataFrame:
    """How far apart the clients of a run are."""
    kind = CommonScore.of(runs).kind
    names = ("mean", "spread (std)", "worst client", "worst 10 %, mean", "median", "best client")
    columns = {}
    for run in runs:
        column = dict.fromkeys(("scores of", "clients", *names), NONE)
        scores, whose = run.scores(kind)
        if scores:
            values = np.array(sorted(scores.values(), key=run.metric.merit))
            tenth, median = worst_tenth(values, run.metric), np.median(values)
            numbers = (values.mean(), values.std(), values[0], tenth, median, values[-1])
            column |= {
                "scores of": whose,
                "clients": str(len(values)),
            }
            column |= zip(
                names,
                map(run.metric.shown, map(float, numbers)),
                strict=True,
            )
        columns[run.name] = column
    return DataFrame(columns)


FLOPS = {
    "flops_forward": "forward",
    "flops_backward": "backward",
    "flops_extra": "further passes",
    "flops_penalty": "proximal term",
    "flops_server": "server",
}
"""Columns of metrics.csv that count operations, in words."""


def flops(run: RunResult) -> float | None:
    """Floating-point operations of the whole run, of clients and server; None unless all of them
    were counted."""
    return run.total(*CLIENT_FLOPS, *(["flops_server"] if run.has("flops_server") else []))


# ---------------------------------------------------------------- numbers with their units


def percent(value: float) -> str:
    """An accuracy in 0..1."""
    return f"{100 * value:.2f} %"


def mib(value: float) -> str:
    """So many MiB, in GiB or KiB where that reads better."""
    if 0 < value < 0.1:
        return f"{value * 1024:.1f} KiB"
    if value >= 10_240:
        return f"{value / 1024:,.1f} GiB"
    return f"{value:,.0f} MiB" if value >= 100 else f"{value:.2f} MiB"


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


def known(
    value: Any,
    write: Callable[[float], str],
    unit: float = 1,
) -> str:
    """A number as text; a dash where it is not known."""
    return write(value / unit) if isinstance(value, int | float) and math.isfinite(value) else NONE
