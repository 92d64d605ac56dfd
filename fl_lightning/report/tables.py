"""The page's tables, as text: what ran, when a target was reached, what came out, how clients differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fl_lightning.metric import ACCURACY, FURTHER, MODELS
from fl_lightning.report.load import ABSENT, MIB, Comparison, Run, differing, differing_keys
from fl_lightning.runfolder import best, final_words, mean_of_bests

NONE = "–"
MOST_TARGETS = 8
_COMPARED = ("seed", "smoke", "model", "data", "federation", "evaluation")


@dataclass
class Table:
    """A head and rows; the first cell of a row heads it. Where `of_runs`, each further column is a run."""

    head: list[str]
    rows: list[list[str]]
    of_runs: bool = True


def overview(runs: list[Run]) -> Table:
    """What was run."""
    facts: dict[str, Callable[[Run], str]] = {
        "method": lambda run: component(_method(run, runs)),
        "model": lambda run: component(run.config.get("model")),
        "data": _data,
        "clients": lambda run: _text(run.setting("federation.clients")),
        "participation": _participation,
        "local epochs": _local_training,
        "rounds done": lambda run: f"{run.rounds_done} of {_text(run.rounds_asked)}",
        "judged": lambda run: _judge(run),
        "seed": lambda run: _text(run.setting("seed")),
        "version": lambda run: _text(run.summary.get("version")),
    }
    return Table(["", *_names(runs)], [[name, *(fact(run) for run in runs)] for name, fact in facts.items()])


def _local_training(run: Run) -> str:
    steps = run.setting("federation.local_steps")
    return f"{steps} steps" if steps is not None else _text(run.setting("federation.local_epochs"))


def remarks(runs: list[Run]) -> list[str]:
    """What must be known before any number is believed."""
    said = []
    for run in runs:
        if not run.finished:
            said.append(f"{run.name} is unfinished: {run.rounds_done} of {_text(run.rounds_asked)} rounds are done.")
        if run.summary.get("made_up_data"):
            said.append(f"{run.name} was trained on made-up data: its accuracies mean nothing.")
        elif run.setting("smoke"):
            said.append(f"{run.name} is a smoke run (a few samples and steps): its accuracies mean little.")
    return said + judges(runs)


def judges(runs: list[Run]) -> list[str]:
    """Where the runs have different judges: by which kind of model they are compared."""
    by = Comparison.of(runs)
    if not by.differ:
        return []
    own = "; ".join(f"{run.name}: {_model(run.judge)}" for run in runs if run.has("mean_accuracy"))
    said = f"Each run has a judge of its own ({own})."
    if by.kind is None:
        return [
            f"{said} No kind of model was scored in all: each number is by its run's own judge. Do not compare them."
        ]
    return [f"{said} All are compared by what all were scored by: {_model(by.kind)}. Own judges' numbers stand beside."]


def incomparable(runs: list[Run]) -> list[str]:
    """Keys that differ between the runs although a comparison needs them equal."""
    keys = {key for key in differing_keys(runs) if key.partition(".")[0] in _COMPARED}
    # `auto` may stand for different kinds of model: what counts is whether there is one that all were scored by.
    keys -= {"evaluation.judge"}
    by = Comparison.of(runs)
    if by.differ and by.kind is None:
        keys.add("evaluation.judge")
    return sorted(keys)


def differences(runs: list[Run]) -> Table:
    """Every setting that is not the same in all runs."""
    rows = [[key, *(_text(value) for value in values)] for key, values in differing(runs)]
    return Table(["setting", *_names(runs)], rows)


def targets(runs: list[Run]) -> list[float]:
    """Round accuracies, ascending, that a run reached and not all runs began with: the highest few.

    Five points apart, or as close as it takes to have any.
    """
    column = Comparison.of(runs).column
    curves = [[row[column] for row in run.metrics if column in row] for run in runs]
    curves = [curve for curve in curves if curve]
    begun = min((curve[0] for curve in curves), default=0.0)
    highest = max((max(curve) for curve in curves), default=0.0)
    for parts in (20, 50, 100, 200):
        steps = [k / parts for k in range(1, parts + 1) if begun < k / parts <= highest]
        if steps:
            return steps[-MOST_TARGETS:]
    return []


def reached(run: Run, target: float, column: str = "mean_accuracy") -> dict[str, float | None] | None:
    """Where on each axis the mean accuracy in `column` first was `target` or more; None if it never was."""
    for at, row in enumerate(run.metrics):
        if row.get(column, -math.inf) >= target:
            axes = {name: run.axis(name) for name in ("round", "mib", "channel", "wall")}
            return {name: None if values is None else values[at] for name, values in axes.items()}
    return None


def time_to_accuracy(runs: list[Run]) -> list[tuple[str, list[tuple[int, list[str]]]]]:
    """For each target: its text, and for each run its number and the cells round, MiB, channel, wall."""
    table, column = [], Comparison.of(runs).column
    for target in targets(runs):
        lines = []
        for number, run in enumerate(runs):
            found = reached(run, target, column)
            cells = ["not reached", "", "", ""]
            if found is not None:
                of = {name: NONE if value is None else seconds(value) for name, value in found.items()}
                sent = found["mib"]
                cells = [f"{found['round']:.0f}", NONE if sent is None else mib(sent), of["channel"], of["wall"]]
            lines.append((number, cells))
        table.append((f"{100 * target:g} %", lines))
    return table


def _at_best(run: Run, column: str, shown: str) -> str:
    """`shown` in the round that is best by `column`."""
    accuracy, number = best(run.metrics, column)
    chosen = next((row for row in run.metrics if row["round"] == number), {}).get(shown, math.nan)
    return NONE if math.isnan(accuracy) or math.isnan(chosen) else f"{percent(chosen)} (round {number})"


def _last(run: Run, column: str) -> str:
    judged = [row for row in run.metrics if column in row]
    return f"{percent(judged[-1][column])} (round {judged[-1]['round']:.0f})" if judged else NONE


def on_global_test(runs: list[Run]) -> list[list[str]]:
    """The rows of what came out on the test set of all clients, for each kind of model that a run scored on it."""
    shown = []
    for kind, words in MODELS.items():
        column = ACCURACY.on_global_test(kind)
        if any(run.has(column) for run in runs):
            begin = f"test set of all, {words}: "
            shown.append([f"{begin}best round (optimistic)", *(_at_best(run, column, column) for run in runs)])
            shown.append([f"{begin}last judged round", *(_last(run, column) for run in runs)])
            ended = [run.summary.get(f"final_{column}") if run.finished else None for run in runs]
            shown.append([f"{begin}all clients at the end", *(_known(value, percent) for value in ended)])
    return shown


def by_judge(runs: list[Run]) -> list[list[str]]:
    """The rows of what came out: by the kind of model that runs are compared by, then by their own judges."""
    by = Comparison.of(runs)

    def of_clients(run: Run, kind: str | None) -> str:
        score, clients = mean_of_bests(run.judged_clients, f"accuracy_{kind}")
        return f"{percent(score)} ({clients} clients)" if clients else NONE

    def of_kind(before: str, column: str, kinds: list[str | None]) -> list[list[str]]:
        return [
            [f"{before}model", *map(_model, kinds)],
            [f"{before}best round, chosen on test data (optimistic)", *(_at_best(run, column, column) for run in runs)],
            [f"{before}mean of each client's best round (more so)", *map(of_clients, runs, kinds)],
            [f"{before}last judged round", *(_last(run, column) for run in runs)],
        ]

    own = "own judge: " if by.differ else ""
    judges = [run.judge for run in runs]
    shown = of_kind("", by.column, [by.kind] * len(runs)) if by.differ and by.kind else []
    shown += of_kind(own, "mean_accuracy", judges)
    chosen = [_at_best(run, "validation_accuracy", "mean_accuracy") for run in runs]
    shown += [[f"{own}round chosen on validation data", *chosen]] if set(chosen) != {NONE} else []
    ended = [final_words(run.summary) if run.finished else NONE for run in runs]
    shown.append([f"{own}all clients at the end: model", *ended])
    for key, words in (("mean", "mean"), ("worst", "worst 10 %"), ("std", "spread (std)")):
        values = (run.summary.get(f"final_{key}_accuracy") if run.finished else None for run in runs)
        shown.append([f"{own}all clients at the end: {words}", *(_known(value, percent) for value in values)])
    for name, metric in FURTHER.items():
        cells = [_averaged(run, name) for run in runs]
        shown += [[f"{own}all clients at the end: mean {metric.words}", *cells]] if set(cells) != {NONE} else []
    return shown


def _averaged(run: Run, name: str) -> str:
    """The mean of one of `FURTHER` over the final models, and of how many clients it is."""
    mean, clients = (run.summary.get(f"final_{what}_{name}") if run.finished else None for what in ("mean", "clients"))
    return f"{percent(mean)} (of {clients} clients)" if isinstance(mean, int | float) else NONE


def scores(runs: list[Run]) -> Table:
    """What came out and what it cost."""

    def summed(*columns: str) -> Callable[[Run], str]:
        return lambda run: _known(run.total(*columns), mib, MIB)

    def peak(column: str) -> Callable[[Run], str]:
        return lambda run: _known(max((row[column] for row in run.metrics if column in row), default=None), mib)

    facts: dict[str, Callable[[Run], str]] = {
        "upload": summed("upload_bytes"),
        "upload, parameters only": summed("upload_parameter_bytes"),
        "download": summed("download_bytes"),
        "download, parameters only": summed("download_parameter_bytes"),
        "modelled channel time": lambda run: _known(run.total("channel_s"), seconds),
        "wall time of the rounds": lambda run: _known(run.total("seconds"), seconds),
        "operations": lambda run: _known(flops(run), operations),
        "peak memory, host": peak("memory_mib"),
        "peak memory, GPU": peak("memory_device_mib"),
        "peak memory, server's share": peak("memory_server_mib"),
    }
    rows = [[name, *(fact(run) for run in runs)] for name, fact in facts.items()]
    optional = ("modelled", "operations", "peak")
    kept = [row for row in rows if not row[0].startswith(optional) or set(row[1:]) != {NONE}]
    return Table(["", *_names(runs)], by_judge(runs) + on_global_test(runs) + kept)


def fairness(runs: list[Run]) -> Table:
    """How far apart the clients of a run are."""
    kind = Comparison.of(runs).kind

    def spread(run: Run) -> list[str]:
        found, which = run.scores(kind)
        if not found:
            return [NONE] * 8
        values = np.sort(list(found.values()))
        numbers = (values.mean(), values.std(), values[0], worst_tenth(values), np.median(values), values[-1])
        return [which, str(len(values)), *(percent(float(number)) for number in numbers)]

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


def worst_tenth(scores: np.ndarray) -> float:
    """Mean over the worst tenth of the clients, at least one."""
    return float(np.sort(scores)[: max(1, len(scores) // 10)].mean())


def flops(run: Run) -> float | None:
    """Floating-point operations of the whole run, of clients and server; None where they were not counted."""
    columns = [name for name in FLOPS if run.has(name)]
    return run.total(*columns) if columns else None


FLOPS = {
    "flops_forward": "forward",
    "flops_backward": "backward",
    "flops_extra": "further passes",
    "flops_penalty": "pull",
    "flops_server": "server",
}
"""Columns of metrics.csv that count operations, in words."""


# ---------------------------------------------------------------- numbers with their units


def percent(value: float) -> str:
    """An accuracy in 0..1."""
    return f"{100 * value:.2f} %"


def mib(value: float) -> str:
    """MiB, or GiB where that reads better."""
    return (
        f"{value / 1024:,.1f} GiB" if value >= 10_240 else f"{value:,.0f} MiB" if value >= 100 else f"{value:.2f} MiB"
    )


def seconds(value: float) -> str:
    """Seconds, minutes or hours."""
    if value >= 7200:
        return f"{value / 3600:,.1f} h"
    return f"{value / 60:.1f} min" if value >= 600 else f"{value:.1f} s"


def operations(value: float) -> str:
    """Floating-point operations, in the unit that suits them."""
    unit, size = flop_unit(value)
    return f"{value / size:.3g} {unit}"


def flop_unit(value: float) -> tuple[str, int]:
    """FLOP to EFLOP, as suits `value`, and how many operations that is."""
    power = min(6, int(math.log10(value) // 3)) if value >= 1 else 0
    return f"{('', 'k', 'M', 'G', 'T', 'P', 'E')[power]}FLOP", 1000**power


def _known(value: Any, write: Callable[[float], str], unit: float = 1) -> str:
    return write(value / unit) if isinstance(value, int | float) and math.isfinite(value) else NONE


# ---------------------------------------------------------------- settings in words


def component(value: Any) -> str:
    """A method or model as config.yaml gives it: its name and what it is built with."""
    if isinstance(value, list):
        return ", ".join(component(item) for item in value)
    if not isinstance(value, dict):
        return _text(value)
    name = _text(value.get("name") or value.get("class_path"))
    count = f"{value['count']} x " if value.get("count") else ""
    given = value.get("init_args")
    inside = ", ".join(f"{key} {_text(item)}" for key, item in given.items()) if isinstance(given, dict) else ""
    return f"{count}{name} ({inside})" if inside else f"{count}{name}"


def _method(run: Run, runs: list[Run]) -> Any:
    """A run's method; beside other runs, with those arguments alone in which runs of the same method differ."""

    def parts(of: Run) -> tuple[Any, dict[str, Any]]:
        value = of.config.get("method")
        if not isinstance(value, dict) or not isinstance(value.get("init_args"), dict):
            return value, {}
        return component({**value, "init_args": None}), value["init_args"]

    name, given = parts(run)
    same = [others for other, others in map(parts, runs) if other == name]
    if len(runs) == 1 or not given:
        return run.config.get("method")
    return {"name": name, "init_args": {k: v for k, v in given.items() if any(args.get(k) != v for args in same)}}


def _data(run: Run) -> str:
    words = [_text(run.setting("data.source")), _text(run.setting("data.partition"))]
    if run.setting("data.partition") in ("dirichlet", "hsu"):
        words.append(f"alpha {_text(run.setting('data.alpha'))}")
    if run.setting("data.partition") == "pathological":
        words.append(f"{_text(run.setting('data.classes_per_client'))} classes a client")
    if run.setting("data.planted") in ("labels", "rotation"):
        words.append(f"{_text(run.setting('data.groups'))} planted groups by {_text(run.setting('data.planted'))}")
    return ", ".join(words)


def _participation(run: Run) -> str:
    share = run.setting("federation.participation")
    return f"{share:.0%} of the clients a round" if isinstance(share, int | float) else _text(share)


def _judge(run: Run) -> str:
    words = {
        "before": "what the client begins a round with, before local training",
        "after": "the client's model after local training",
        "global": "the global model",
        "finetuned": "a copy of the global model (else of the client's own), fine-tuned by the client",
    }
    return words.get(run.judge or "", NONE)


def _model(kind: str | None) -> str:
    return MODELS.get(kind or "", "kind of model unknown")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items()) or NONE
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    return NONE if value is None or value is ABSENT else str(value)


def _names(runs: list[Run]) -> list[str]:
    return [run.name for run in runs]
