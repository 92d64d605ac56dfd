"""The page's charts as plotly reads them: plain dicts of `data` and `layout`, each run in its
colour."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fl_lightning.foundation.metric import ACCURACY, MODELS, Metric
from fl_lightning.lab.report.pictures import encode
from fl_lightning.lab.report.tables import FLOPS, flop_unit, flops
from fl_lightning.results.result import AXES, MIB, RunResult
from fl_lightning.results.runs import Comparison, same_but_seed, seeds_apart

Figure = dict[str, Any]

COLOURS = (
    *("#2a78d6", "#e8672c", "#1a9e6d", "#b8860b", "#7a5cd0"),
    *("#d6455d", "#0f9bb3", "#c456a8", "#6b8e23", "#8a7f74"),
)
"""Of methods and settings, legible on white and on black; from the eleventh on they begin anew."""
EVERY_ROUND = 20
"""Rounds up to which each has a tick; of more, plotly's own ticks are whole numbers."""
_PARTS = ("#4e79a7", "#f2a65a", "#76b7b2", "#b07aa1", "#9c9c9c")

_OWN = {
    "mean": "mean, by each run's own judge",
    "worst": "worst 10 %, by each run's own judge",
    "validation": "on validation data, by each run's own judge",
}


def kinds(metric: Metric) -> dict[str, str]:
    """Columns of metrics.csv that may be drawn by round, in words."""
    own = {metric.of(what): words for what, words in _OWN.items()}
    return own | {metric.by(kind): words for kind, words in MODELS.items()}


def colours(runs: list[RunResult]) -> list[str]:
    """The colour of each run; runs that differ in nothing but their seed share one."""
    return [COLOURS[group % len(COLOURS)] for group in same_but_seed(runs)]


def labels(names: list[str], longest: int = 28) -> list[str]:
    """Names for plotly, which takes some HTML: escaped, and shortened in the middle unless two
    would then be one."""
    half = (longest - 1) // 2
    short = [name if len(name) <= longest else f"{name[:half]}…{name[-half:]}" for name in names]
    return [
        html.escape(name, quote=False) for name in (short if len({*short}) == len(names) else names)
    ]


def run_labels(runs: list[RunResult]) -> list[str]:
    """The names of runs, for plotly."""
    return labels([run.name for run in runs])


def curves(runs: list[RunResult]) -> dict[str, Any]:
    """Accuracies by round, and where the rounds lie on each axis, for the page to draw as the
    reader chooses."""
    axes = {name: [run.axis(name) or [] for run in runs] for name in AXES}
    unit, size = _unit([mib * MIB for values in axes["mib"] for mib in values])
    axes["mib"] = [[mib * MIB / size for mib in values] for values in axes["mib"]]
    words = AXES | {"mib": f"{unit} sent"}
    metric = runs[0].metric if runs else ACCURACY
    known = kinds(metric)
    return {
        "metric": metric.words,
        "tick": "~%" if metric.rises else "~g",
        "hover": ".2%" if metric.rises else ".4~g",
        "axes": {name: words[name] for name in AXES if any(axes[name])},
        "first": Comparison.of(runs).column,
        "kinds": {
            name: words for name, words in known.items() if any(run.has(name) for run in runs)
        },
        "runs": [
            {
                "x": {name: _short(axes[name][at]) for name in AXES},
                "y": {name: _short(run.column(name)) for name in known if run.has(name)},
            }
            for at, run in enumerate(runs)
        ],
        "bands": [_band(runs, members) for members in together(runs, tuple(known))],
        "ticks": round_ticks(max((run.rounds_done for run in runs), default=0)),
    }


def together(runs: list[RunResult], columns: Sequence[str]) -> list[list[int]]:
    """Numbers of runs that differ in their seed alone, by group, each of two or more that a band is
    made of.

    A run that has a value in one of `columns` of metrics.csv in no more than half as many rounds as
    the furthest, or none at all, is in no group: it would cut the others' band.
    """
    groups = []
    for members in seeds_apart(runs):
        done = {
            k: sum(any(name in row for name in columns) for row in runs[k].rows("metrics"))
            for k in members
        }
        groups.append([k for k in members if 2 * done[k] > max(done.values())])
    return [members for members in groups if len(members) > 1]


def _band(runs: list[RunResult], members: list[int]) -> dict[str, Any]:
    """Runs that differ in their seed alone: of each kind, by round, the mean and the standard
    deviation on either side.

    Rounds are those that all of them have done; the deviation is the sample's (n - 1). `cut`: the
    number of the run that ends it before the others', None where they are equally long.
    """
    lengths = [len(runs[k].rows("metrics")) for k in members]
    done = min(lengths)
    band: dict[str, Any] = {
        "runs": members,
        "round": _short(runs[members[0]].column("round")[:done]),
        "y": {},
        "cut": None if done == max(lengths) else members[lengths.index(done)],
    }
    for kind in kinds(runs[members[0]].metric):
        if all(runs[k].has(kind) for k in members):
            values = _over_seeds([runs[k].column(kind) for k in members])
            band["y"][kind] = {
                key: _short(each) for key, each in zip(("mean", "low", "high"), values, strict=True)
            }
    return band


def _over_seeds(columns: list[list[float]]) -> tuple[list[float], list[float], list[float]]:
    """By round, over the rounds that all have done: the mean, and a standard deviation (n - 1)
    below and above it."""
    done = min(map(len, columns))
    values = np.array([column[:done] for column in columns])
    mean, std = values.mean(axis=0), values.std(axis=0, ddof=1)
    return mean.tolist(), (mean - std).tolist(), (mean + std).tolist()


def training(runs: list[RunResult]) -> dict[str, Figure]:
    """Losses of local training by round, the proximal term alone where there is one; a band over
    seeds."""
    drawn = {"train_loss": ("solid", " · loss"), "coaching_loss": ("dot", " · proximal term alone")}
    lines = _over_rounds(runs, together(runs, ("train_loss",)), drawn)
    return {"losses": _by_round(lines, "mean over the clients")} if lines else {}


def accuracy(runs: list[RunResult]) -> dict[str, Figure]:
    """Accuracies by round, by what runs are compared by, and a band over seeds: what the page draws
    of `curves`."""
    known, first = kinds(runs[0].metric), Comparison.of(runs).column
    bands = [
        members
        for members in together(runs, tuple(known))
        if all(runs[k].has(first) for k in members)
    ]
    lines = _over_rounds(runs, bands, {first: ("solid", "")})
    title = f"{runs[0].metric.words} ({known.get(first, first)})"
    return {"accuracy": _by_round(lines, title)} if any(run.has(*known) for run in runs) else {}


def _over_rounds(
    runs: list[RunResult], bands: list[list[int]], drawn: dict[str, tuple[str, str]]
) -> list[dict[str, Any]]:
    """Lines of columns of metrics.csv by round; of `bands` the mean, behind it the edges of its
    band.

    `drawn`: of each column the dashes, and how the names of its lines end.
    """
    lines, labels, colour = [], run_labels(runs), colours(runs)
    apart = [[k] for k in range(len(runs)) if not any(k in members for members in bands)]
    for members in sorted(bands + apart):
        first = members[0]
        for column, (dash, ending) in drawn.items():
            columns = [runs[k].column(column) for k in members]
            if not any(value > 0 for values in columns for value in values):
                continue
            line, x = (
                {"color": colour[first], "dash": dash, "width": 2},
                runs[first].column("round"),
            )
            if len(members) == 1:
                lines.append(_line(f"{labels[first]}{ending}", line, x, columns[0]))
                continue
            mean, low, high = _over_seeds(columns)
            edge = {
                "line": {"width": 0, "color": colour[first]},
                "hoverinfo": "skip",
                "showlegend": False,
            }
            fill = {"fill": "tonexty", "fillcolor": f"{colour[first]}33"}
            more = f"{labels[first]} and {len(members) - 1} more seed{'s' * (len(members) > 2)}"
            shared = _line(f"{more}{ending}", line, x[: len(mean)], mean)
            lines += [
                shared | edge | {"y": _short(low)},
                shared | edge | fill | {"y": _short(high)},
                shared,
            ]
    return lines


def fairness(runs: list[RunResult]) -> dict[str, Figure]:
    """Every client's score: in order from the worst, and as a box for each run."""
    by = Comparison.of(runs)
    metric, kind = by.metric, by.kind
    tick, hover = ("~%", ".2%") if metric.rises else ("~g", ".4~g")
    colour = colours(runs)
    ordered, boxes = [], []
    for number, (run, label) in enumerate(zip(runs, run_labels(runs), strict=True)):
        ranked = sorted(run.scores(kind)[0].items(), key=lambda item: metric.merit(item[1]))
        if not ranked:
            continue
        count = len(ranked)
        values = _short([score for _, score in ranked])
        names = [f"client {run.called(client)}" for client, _ in ranked]
        shared = {"name": label, "text": names}
        line = {"color": colour[number], "width": 2}
        ordered.append(
            {
                **shared,
                "type": "scatter",
                "mode": "lines+markers",
                "line": line,
                "marker": {"size": 6},
                "x": _short([(at + 0.5) / count for at in range(count)]),
                "y": values,
                "hovertemplate": f"%{{text}}: %{{y:{hover}}}",
            }
        )
        boxes.append(
            {
                **shared,
                "type": "box",
                "y": values,
                "boxpoints": "all",
                "jitter": 0.5,
                "pointpos": 0,
                "marker": {"color": colour[number], "size": 5, "opacity": 0.7},
                "line": {"width": 1.5},
                "fillcolor": "rgba(128,128,128,0.12)",
                "hovertemplate": f"%{{text}}: %{{y:{hover}}}",
            }
        )
    if not ordered:
        return {}
    words = metric.words if kind is None else f"{metric.words} ({MODELS[kind]})"
    y = {"title": {"text": words}, "tickformat": tick}
    return {
        "fairness-order": {
            "data": ordered,
            "layout": {
                "xaxis": {
                    "title": {"text": "clients, from worst to best"},
                    "tickformat": ".0%",
                    "range": [0, 1],
                },
                "yaxis": y,
            },
        },
        "fairness-box": {"data": boxes, "layout": {"yaxis": y, "showlegend": False}},
    }


def ledger(runs: list[RunResult]) -> dict[str, Figure]:
    """MiB and layers by round, and what the bytes were."""
    colour = colours(runs)
    sent, layers = [], []
    columns = ("upload_bytes", "download_bytes")
    unit, size = _unit(
        [value for run in runs for column in columns for value in run.column(column)]
    )
    for number, (run, label) in enumerate(zip(runs, run_labels(runs), strict=True)):
        for column, way, dash in zip(columns, ("up", "down"), ("solid", "dot"), strict=True):
            line = {"color": colour[number], "dash": dash, "width": 2}
            if run.has(column):
                y = [value / size for value in run.column(column)]
                sent.append(_line(f"{label} · {way}", line, run.column("round"), y))
            if run.ledger:
                y = run.ledger.share[int(way == "up")].sum(axis=0).tolist()
                layers.append(
                    _line(f"{label} · {way}", line, list(map(float, run.ledger.rounds)), y)
                )
    made = {}
    if sent:
        made["ledger-bytes"] = _by_round(sent, f"{unit} in the round")
    # words say it, then
    if layers and not all(constant(run.ledger.share) for run in runs if run.ledger):
        made["ledger-layers"] = _by_round(layers, "layers, mean over the cohort")
    kinds = [run.ledger.kinds for run in runs if run.ledger]
    unit, size = _unit([value for of_run in kinds for sizes in of_run.values() for value in sizes])
    parts = {
        name: [value / size for of_run in kinds for value in reversed(of_run.get(name, (0, 0)))]
        for name in dict.fromkeys(
            name for of_run in kinds for name, sizes in of_run.items() if any(sizes)
        )
    }
    if parts:
        rows = [
            f"{name} {way}"
            for name in run_labels([run for run in runs if run.ledger])
            for way in ("up", "down")
        ]
        made["ledger-kinds"] = _bars(rows, parts, f"{unit} in all")
    return made


def shares(runs: list[RunResult]) -> list[dict[str, Any]]:
    """For each run that has a ledger: which share of the cohort sent, and received, each layer, by
    round.

    `constant`: what a picture of one colour would say; empty where there is something to see.
    """
    return [
        {
            "run": number,
            "rounds": run.ledger.rounds,
            "layers": labels(run.ledger.layers),
            "down": encode(run.ledger.share[0], high=1.0),
            "up": encode(run.ledger.share[1], high=1.0),
            "constant": constant(run.ledger.share),
        }
        for number, run in enumerate(runs)
        if run.ledger
    ]


def constant(share: np.ndarray) -> str:
    """In words what shares (2, L, rounds) are, where both ways are the same for every layer in
    every round."""
    if not share.any():
        return "no layer was ever sent or received"
    least, most = share.min(axis=(1, 2)), share.max(axis=(1, 2))
    if (least != most).any():
        return ""
    down, up = (f"{value:.0%} of the cohort" for value in least)
    return f"in every round every layer was sent by {up} and received by {down}"


def costs(runs: list[RunResult]) -> dict[str, Figure]:
    """Seconds by phase, modelled seconds by what they went into, operations by what they were for.

    Operations are of runs that counted all of theirs alone: a part would look like the whole.
    """
    phases = {
        "seconds_client": "clients train",
        "seconds_server": "server mixes",
        "seconds_evaluation": "models are judged",
    }
    channel = {
        "channel_download_s": "download",
        "channel_compute_s": "local training",
        "channel_upload_s": "upload",
    }
    made = {}
    for name, columns, title in (
        ("cost-seconds", phases, "wall seconds"),
        ("cost-channel", channel, "modelled seconds, slowest clients"),
        ("cost-flops", FLOPS, "floating-point operations"),
    ):
        having = [run for run in runs if any(run.has(column) for column in columns)]
        if columns is FLOPS:
            having = [run for run in having if flops(run) is not None]
        parts = {
            words: [
                sum(value for value in run.column(column) if math.isfinite(value)) for run in having
            ]
            for column, words in columns.items()
            if any(run.has(column) for run in having)
        }
        if parts and name == "cost-flops":
            title, size = flop_unit(max(map(sum, zip(*parts.values(), strict=True))))
            parts = {words: [value / size for value in values] for words, values in parts.items()}
        if parts:
            made[name] = _bars(run_labels(having), parts, title)
    return made


def _unit(sizes: Sequence[float]) -> tuple[str, int]:
    """The unit that suits the greatest of `sizes` (bytes), and its bytes."""
    greatest = max((value for value in sizes if math.isfinite(value)), default=0)
    return ("GiB", 1024 * MIB) if greatest >= 10 * 1024 * MIB else ("MiB", MIB)


def _line(name: str, line: dict[str, Any], x: list[float], y: list[float]) -> dict[str, Any]:
    hover = "round %{x}: %{y:.4~g}"
    return {
        "type": "scatter",
        "mode": "lines" if len(x) > 1 else "lines+markers",
        "name": name,
        "line": line,
        "x": _short(x),
        "y": _short(y),
        "hovertemplate": hover,
    }


def round_ticks(last: int) -> dict[str, int]:
    """What plotly is told of an axis of rounds, so that no tick lies between two of them."""
    return {"tick0": 0, "dtick": 1} if last <= EVERY_ROUND else {}


def _by_round(data: list[dict[str, Any]], title: str) -> Figure:
    last = max((int(number) for line in data for number in line["x"]), default=0)
    x = {"title": {"text": "round"}, **round_ticks(last)}
    return {
        "data": data,
        "layout": {"xaxis": x, "yaxis": {"title": {"text": title}, "rangemode": "tozero"}},
    }


def _bars(rows: list[str], parts: dict[str, list[float]], title: str) -> Figure:
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": html.escape(name, quote=False),
            "x": _short(values),
            "y": rows,
            "marker": {"color": _PARTS[at % len(_PARTS)]},
            "hovertemplate": "%{y}: %{x:.4~s}",
        }
        for at, (name, values) in enumerate(parts.items())
    ]
    layout = {
        "barmode": "stack",
        "bargap": 0.35,
        "height": 150 + 34 * len(rows),
        "xaxis": {"title": {"text": title}},
        "yaxis": {"autorange": "reversed", "type": "category"},
        "legend": {"traceorder": "normal"},
        "showlegend": True,
    }
    return {"data": data, "layout": layout}


def _short(values: list[float]) -> list[float | None]:
    """Five digits are more than a chart shows; JSON has no nan."""
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values]
