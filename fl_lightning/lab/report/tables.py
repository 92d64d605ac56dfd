"""Tabulate for the page what was run, when targets were reached, final scores and costs, and
differences between clients. Tables have text cells, a column for each run and row names as index,
unless said otherwise."""

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
"""Function that gives a run's cell in one row."""
Rows = dict[str, list[str]]
"""Cells by row, one for each run."""


def run_table(runs: Runs, rows: Rows) -> DataFrame:
    """Make a table of rows, with a column for each run."""
    return DataFrame.from_dict(
        rows,
        orient="index",
        columns=[run.name for run in runs],
    )


def fact_rows(runs: Runs, facts: dict[str, Fact]) -> Rows:
    """Make a row of each fact by calling it for each run."""
    return {name: [fact(run) for run in runs] for name, fact in facts.items()}


def overview(runs: Runs) -> DataFrame:
    """Table of what was run: method, model, data, federation, training."""
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
        facts["grouped"] = client_groups
    return run_table(runs, fact_rows(runs, facts))


def client_groups(run: RunResult) -> str:
    """List the layers that are mixed within groups of clients, and the groups' members."""
    groups = [
        ", ".join(map(run.client_label, group)) for group in run.summary.get("client_groups", [])
    ]
    layers = ", ".join(run.summary.get("grouped_layers", []))
    return f"in {layers}: {' | '.join(groups)}" if groups else NONE


def privacy(run: RunResult) -> str:
    """State epsilon and delta of the run, and the unit that they protect (such as a client); a
    method with its own report states what it covers instead of a unit."""
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
    """List caveats for the top of the page: unfinished and smoke runs, made-up data, clients of one
    class, different judges."""
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
    """Return a note if the runs' scores are of different kinds of models (judges): it names each
    run's kind and the kind by which all are compared. A list of one line; empty if all have the
    same judge."""
    common = CommonScore.of(runs)
    if not common.differ:
        return []
    judged = [run for run in runs if run.has(run.metric.of("mean"))]
    judges_of_runs = "; ".join(f"{run.name}: {model_words(run.judge)}" for run in judged)
    line = f"Each run has a judge of its own ({judges_of_runs})."
    if common.kind is None:
        without = "No kind of model was scored in all: each number is by its run's own judge."
        return [f"{line} {without} Do not compare them."]
    shared = f"All are compared by what all were scored by: {model_words(common.kind)}."
    return [f"{line} {shared} Each run's own judge is shown as well."]


def incomparable(runs: Runs) -> list[str]:
    """List keys that differ between the runs and should not in a comparison."""
    keys = {key for key in differing_keys(runs) if key.partition(".")[0] in _COMPARED}
    if have_same_seeds(runs):
        keys -= {"seed"}  # each method has runs of the same seeds
    is_explained = any(key.startswith(("data.", "federation.", "smoke")) for key in keys)
    # samples differ, but no key that would explain it: name the one where users look for data
    if not is_explained and _have_other_samples(runs):
        keys.add("data.root")
    # judges may differ as long as one kind of model was scored in all runs
    keys -= {"evaluation.judge"}
    common = CommonScore.of(runs)
    if common.differ and common.kind is None:
        keys.add("evaluation.judge")
    return sorted(keys)


def _have_other_samples(runs: Runs) -> bool:
    """Whether runs are known to have trained on different data sets, or runs of the same seed on
    different samples."""
    if len({provenance.source_digest(run.folder) for run in runs} - {None}) > 1:
        return True
    digests = {(repr(run.setting("seed")), provenance.data_digest(run.folder)) for run in runs}
    seeds = [seed for seed, digest in digests if digest is not None]
    return len(seeds) > len(set(seeds))


def differences(runs: Runs) -> DataFrame:
    """Table of the settings that differ between runs."""
    rows = {key: [text(value) for value in values] for key, values in differing(runs)}
    # different values may have the same text: empty arguments, and an unknown value
    return run_table(runs, {key: cells for key, cells in rows.items() if len({*cells}) > 1})


# ---------------------------------------------------------------- time to accuracy


def targets(runs: Runs) -> list[float]:
    """Choose target scores with few digits (such as 0.8 and 0.85), at most `MOST_TARGETS`, from
    easy to hard.

    At least one run has reached each target, and at least one run had not reached it in its first
    scored round. Accuracies are five points apart, or less if there would be none; errors are about
    an eighth of their range apart, by a step with few digits.
    """
    common = CommonScore.of(runs)
    curves = []
    for run in runs:
        values = [value for value in run.column(common.column) if math.isfinite(value)]
        curves += [values] if values else []
    if not curves:
        return []
    first = [curve[0] for curve in curves]
    if not common.metric.rises:
        return _error_targets(max(first), min(map(min, curves)))
    lowest, highest = min(first), max(map(max, curves))
    for parts in (20, 50, 100, 200):
        steps = [k / parts for k in range(1, parts + 1) if lowest < k / parts <= highest]
        if steps:
            return steps[-MOST_TARGETS:]
    return []


def _error_targets(greatest: float, least: float) -> list[float]:
    """Choose numbers with few digits between the greatest error of a run's first scored round and
    the least error of all, in descending order."""
    if greatest <= least:
        return []
    rough = (greatest - least) / MOST_TARGETS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    multiples = range(math.ceil(least / step), math.ceil(greatest / step))
    return [k * step for k in reversed(multiples)]


def reached(
    run: RunResult, target: float, column: str = "mean_accuracy"
) -> dict[str, float | None] | None:
    """Find when a run first reached a target score: the round, the MiB and the seconds up to then.

    Args:
        run: the run.
        target: the score to reach.
        column: column of metrics.csv with the score.

    Returns:
        The value of each of `AXES` at the end of that round; a value is None if it was not measured
            in all rounds. None if the run never reached the target.
    """
    merit = COLUMNS[column].merit
    for at, row in enumerate(run.rows("metrics")):
        if column in row and merit(row[column]) >= merit(target):
            axes = {name: run.axis(name) for name in AXES}
            return {name: None if values is None else values[at] for name, values in axes.items()}
    return None


def scored_seldom(runs: Iterable[RunResult]) -> str:
    """Warn that targets are noticed late if only every n-th round is scored; empty if all are."""
    intervals = sorted({int(run.setting("evaluation.every") or 1) for run in runs})
    least, most = intervals[0], intervals[-1]
    if most == 1:
        return ""
    spacing = f"{least} to {most}" if least < most else str(most)
    late = f"up to {most - 1} rounds too late" if most > 2 else "up to a round too late"
    warning = f"runs are scored every {spacing} rounds: a target is seen {late}"
    return f"{warning}, and its bytes and seconds count them"


def time_to_accuracy(runs: Runs) -> list[tuple[str, list[list[str]]]]:
    """List each target, and for each run the cells: round, MiB, modelled and measured time at which
    it was reached."""
    table, common = [], CommonScore.of(runs)
    for target in targets(runs):
        lines = []
        for run in runs:
            costs = reached(run, target, common.column)
            cells = ["not reached", "", "", ""]
            if costs is not None:
                times = [known(costs[name], seconds) for name in ("channel", "wall")]
                cells = [f"{costs['round']:.0f}", known(costs["mib"], mib), *times]
            lines.append(cells)
        target_words = f"{100 * target:g} %" if common.metric is ACCURACY else f"{target:.4g}"
        table.append((target_words, lines))
    return table


# ---------------------------------------------------------------- final scores


def _at_best(
    run: RunResult,
    column: str,
    shown: str,
) -> str:
    """Format the score in the column `shown`, in the round that is best by `column`."""
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
    """Format the score in the last of `rows`, and its round."""
    if not rows:
        return NONE
    return f"{run.metric.shown(rows[-1][column])} (round {rows[-1]['round']:.0f})"


def global_test_rows(runs: Runs) -> Rows:
    """Make rows of scores on the common test set of all clients, by kind of model."""
    metric = CommonScore.of(runs).metric
    rows = {}
    for kind, model in MODELS.items():
        column = metric.on_global_test(kind)
        if any(run.has(column) for run in runs):
            prefix = f"test set of all, {model}: "
            best = [_at_best(run, column, column) for run in runs]
            at_end = [known(run.summary.get(f"final_{column}"), run.metric.shown) for run in runs]
            rows[f"{prefix}best round (optimistic)"] = best
            rows[f"{prefix}last judged round"] = [_last(run, column) for run in runs]
            rows[f"{prefix}all clients at the end"] = at_end
    return rows


def score_rows(runs: Runs) -> Rows:
    """Make rows of scores: first of the kind of model by which runs are compared, if their judges
    differ, then of each run's own judge."""
    common = CommonScore.of(runs)
    metric, mean = common.metric, common.metric.of("mean")
    rows, prefix = {}, "own judge: " if common.differ else ""
    if common.differ and common.kind:
        rows = _round_rows(
            runs,
            "",
            common.column,
            [common.kind] * len(runs),
        )
    rows |= _round_rows(
        runs,
        prefix,
        mean,
        [run.judge for run in runs],
    )
    chosen = [_at_best(run, metric.of("validation"), mean) for run in runs]
    if set(chosen) != {NONE}:
        rows[f"{prefix}round chosen on validation data"] = chosen
    at_end = f"{prefix}all clients at the end: "
    rows[f"{at_end}model"] = [final_words(run.summary) if run.finished else NONE for run in runs]
    for key, name in (("mean", "mean"), ("worst", "worst 10 %"), ("std", "spread (std)")):
        values = [run.summary.get(metric.of(f"final_{key}")) for run in runs]
        rows[f"{at_end}{name}"] = [known(value, metric.shown) for value in values]
    for further in FURTHER.values():
        cells = [_final_mean(run, further.name) for run in runs]
        if set(cells) != {NONE}:
            rows[f"{at_end}{further.mean_words}"] = cells
    return rows


def _round_rows(
    runs: Runs,
    prefix: str,
    column: str,
    kinds: list[str | None],
) -> Rows:
    """Make rows of scores in the best and the last round, for each run's kind of model."""
    metric = runs[0].metric
    parts = " or ".join(sorted({str(run.setting("data.score_on") or "test") for run in runs}))
    of_clients = []
    for run, kind in zip(runs, kinds, strict=True):
        # without a known judge (None) there is no such column, hence 0 clients
        score, clients = run.mean_of_bests(metric.by(str(kind)))
        of_clients.append(f"{metric.shown(score)} ({clients} clients)" if clients else NONE)
    best = [_at_best(run, column, column) for run in runs]
    return {
        f"{prefix}model": [model_words(kind) for kind in kinds],
        f"{prefix}best round, chosen on {parts} data (optimistic)": best,
        f"{prefix}mean of each client's best round (even more optimistic)": of_clients,
        f"{prefix}last judged round": [_last(run, column) for run in runs],
    }


def _final_mean(run: RunResult, name: str) -> str:
    """Format the mean of a `FURTHER` metric over final models, and its number of clients."""
    mean, clients = (run.summary.get(f"final_{key}_{name}") for key in ("mean", "clients"))
    return f"{percent(mean)} (of {clients} clients)" if isinstance(mean, int | float) else NONE


AGREEMENT = (
    "true groups found in the relation, last round (adjusted Rand index; 1: all, 0: by chance)"
)
OPTIONAL = ("modelled", "operations", "peak", "true groups")
"""Beginnings of the names of rows that are left out if no run has a value."""


def scores(runs: Runs) -> DataFrame:
    """Table of scores and costs."""

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
    rows = score_rows(runs) | global_test_rows(runs)
    for name, cells in fact_rows(runs, facts).items():
        if set(cells) != {NONE} or not name.startswith(OPTIONAL):
            rows[name] = cells
    return run_table(runs, rows)


def _agreement(run: RunResult) -> str:
    """Format the last `rand_index`; a dash if planted groups are not known."""
    judged = run.rows_with("rand_index")
    return f"{judged[-1]['rand_index']:.2f}" if judged else NONE


def fairness(runs: Runs) -> DataFrame:
    """Table of the clients' final scores: mean, spread, worst, median, best."""
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
"""Names of the columns of metrics.csv that count operations."""


def flops(run: RunResult) -> float | None:
    """Sum the run's floating-point operations of clients and server; None unless all were
    counted."""
    return run.total(*CLIENT_FLOPS, *(["flops_server"] if run.has("flops_server") else []))


# ---------------------------------------------------------------- numbers with their units


def percent(value: float) -> str:
    """Format a share from 0 to 1 in percent."""
    return f"{100 * value:.2f} %"


def mib(value: float) -> str:
    """Format a number of MiB, in KiB, MiB or GiB."""
    if 0 < value < 0.1:
        return f"{value * 1024:.1f} KiB"
    if value >= 10_240:
        return f"{value / 1024:,.1f} GiB"
    return f"{value:,.0f} MiB" if value >= 100 else f"{value:.2f} MiB"


def seconds(value: float) -> str:
    """Format a number of seconds, in seconds, minutes or hours."""
    if value >= 7200:
        return f"{value / 3600:,.1f} h"
    if 0 < value < 0.1:
        return f"{value:.2g} s"
    return f"{value / 60:.1f} min" if value >= 600 else f"{value:.1f} s"


def operations(value: float) -> str:
    """Format a number of floating-point operations, such as "9 GFLOP"."""
    unit, size = flop_unit(value)
    return f"{value / size:.3g} {unit}"


def flop_unit(value: float) -> tuple[str, int]:
    """Choose the unit for `value` operations, from FLOP to EFLOP; returns its name and size."""
    power = min(6, int(math.log10(value) // 3)) if value >= 1 else 0
    return f"{('', 'k', 'M', 'G', 'T', 'P', 'E')[power]}FLOP", 1000**power


def known(
    value: Any,
    write: Callable[[float], str],
    unit: float = 1,
) -> str:
    """Return a number as text; a dash if it is no finite number.

    Args:
        value: the number.
        write: function that makes text of the number.
        unit: divisor of the number before `write` gets it.
    """
    return write(value / unit) if isinstance(value, int | float) and math.isfinite(value) else NONE
