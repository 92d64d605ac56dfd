"""Pictures of a whole run: accuracy by round, how much travelled, which layers, and what accuracy that bought."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_lightning.csvtable import Row
from fl_lightning.drawing.heatmap import heatmap
from fl_lightning.metric import MODELS, of_rows
from fl_lightning.record import KINDS, RoundRecord
from fl_lightning.results.folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MIB = 2**20
_WAYS = ("download", "upload")
# Two of the heatmaps' colours. The download is broad and pale: where both lines are one, both are seen.
_LOOKS: dict[str, dict[str, Any]] = {
    "download": {"color": "#22a884", "linewidth": 5, "markersize": 9, "alpha": 0.5, "solid_capstyle": "butt"},
    "upload": {"color": "#440154", "linewidth": 1.5, "markersize": 4},
}
_KINDS = ("#440154", "#b8860b", "#2a78d6", "#22a884", "#d6455d")  # of kinds of model, in the order of `MODELS`
_MOST_COLUMNS = 160  # of a heatmap: more rounds share columns
_FEW = 30  # rounds up to which each has its dot
_PLAIN = 1e9  # from here on, numbers on an axis have powers of ten


@dataclass(frozen=True)
class Series:
    """What travelled in T rounds, ascending. The second axis is download and upload."""

    rounds: list[int]
    mib: np.ndarray
    """All that travelled, summed over the cohort, (T, 2)."""
    parameter_mib: np.ndarray
    """Parameters alone, (T, 2)."""
    layers: np.ndarray
    """Layers sent: mean, least and most over the cohort, (T, 2, 3)."""
    shares: np.ndarray
    """Share of the cohort whose layer travelled, (T, 2, L)."""

    @classmethod
    def of(cls, rounds: Mapping[int, tuple[np.ndarray, np.ndarray]]) -> Series:
        """From `traffic` and `sent` of each round, as in `RoundRecord`."""
        known = sorted(rounds)
        tables, sent = zip(*(rounds[t] for t in known), strict=True)
        counts = [s.sum(axis=2) for s in sent]
        return cls(
            known,
            np.stack([table.sum(axis=(0, 2, 3)) for table in tables]) / _MIB,
            np.stack([table[..., KINDS.index("parameters")].sum(axis=(0, 2)) for table in tables]) / _MIB,
            np.stack([np.stack([n.mean(axis=0), n.min(axis=0), n.max(axis=0)], axis=1) for n in counts]),
            np.stack([s.mean(axis=0) for s in sent]),
        )


NAMES = ("bytes", "layers", *_WAYS, "accuracy", "time")


def draw(folder: Path, record: RoundRecord, rows: Sequence[Row], judge: str) -> dict[str, np.ndarray]:
    """Those of `NAMES` that show something, from `rows` of metrics.csv, and the ledger until the round of `record`.

    No `accuracy` without scores, no `time` without a channel, no `bytes` where none travelled. Of `layers` and of a
    way's shares none that would be one colour, since every layer always travelled, or none did.
    """
    run_folder = RunFolder(folder)
    kept = [t for row in rows if (t := int(row["round"])) < record.round and run_folder.traffic_file(t).exists()]
    traffic = Series.of(
        {t: (traffic.bytes, traffic.sent) for t in kept for traffic in [run_folder.read_traffic(t)]}
        | {record.round: (record.traffic, record.sent)}
    )
    pictures = {"bytes": draw_bytes(traffic)} if traffic.mib.any() else {}
    if np.ptp(traffic.shares) > 0:
        pictures["layers"] = draw_layers(traffic)
    for k, way in enumerate(_WAYS):
        if np.ptp(traffic.shares[:, k]) > 0:
            pictures[way] = draw_shares(traffic, way, record.layers)
    judged = [row for row in rows if of_rows(rows).of("mean") in row]
    if judged:
        pictures["accuracy"] = draw_accuracy(rows, judge)
    if any("channel_s" in row for row in judged):
        pictures["time"] = draw_time(rows, judge)
    return pictures


def draw_bytes(traffic: Series) -> np.ndarray:
    """MiB by round and summed up, parameters alone dashed where that shows; uint8 (height, width, 3)."""
    figure, panels = _figure("Bytes that travelled, whole cohort")
    for axes, summed in zip(panels, (False, True), strict=True):
        top = 0.0
        for k, way in enumerate(_WAYS):
            both = (traffic.mib[:, k], traffic.parameter_mib[:, k])
            everything, parameters = (np.cumsum(values) if summed else values for values in both)
            top = max(top, everything.max())
            _line(axes, traffic.rounds, everything, way, label=way)
            if (everything - parameters).max() > 0.01 * everything.max():  # else one line hides the other
                dashes = {"linestyle": "--", "marker": "", "linewidth": _LOOKS[way]["linewidth"] / 1.5}
                _line(axes, traffic.rounds, parameters, way, label=f"{way}, parameters alone", **dashes)
        axes.set(ylabel="MiB since the first round" if summed else "MiB in a round")
        axes.set_ylim(0, 1.1 * top or 1.0)
        _by_round(axes, traffic.rounds)
    figure.legend(handles=panels[0].lines, loc="outside lower center", ncols=4, handlelength=4, frameon=False)
    return _pixels(figure)


def draw_layers(traffic: Series) -> np.ndarray:
    """Layers sent to and by a client, over the cohort (figure 8 of KAPC+BLS); uint8 (height, width, 3)."""
    figure, panels = _figure("Layers sent: mean over the cohort, and from the fewest to the most")
    total = traffic.shares.shape[2]
    for k, (way, axes) in enumerate(zip(_WAYS, panels, strict=True)):
        mean, fewest, most = traffic.layers[:, k].T
        axes.fill_between(traffic.rounds, fewest, most, color=_LOOKS["download"]["color"], alpha=0.25, linewidth=0)
        _line(axes, traffic.rounds, mean, "upload")
        axes.axhline(total, color="grey", linestyle=":")
        axes.set(ylabel=f"layers in a client's {way} (of {total})", ylim=(0, 1.1 * total))
        _by_round(axes, traffic.rounds)
        _whole_numbers(axes.yaxis)
    return _pixels(figure)


def draw_shares(traffic: Series, way: str, layers: Sequence[str]) -> np.ndarray:
    """Layers × rounds: the share of the cohort whose layer travelled; uint8 (height, width, 3)."""
    shares, labels = in_columns(traffic.shares[:, _WAYS.index(way)], traffic.rounds)
    step = labels[0] - traffic.rounds[0] + 1
    what = {
        "download": "Share of the cohort that each layer was sent to",
        "upload": "Share of the cohort that sent each layer",
    }
    title = what[way] + (f" (mean over {step} rounds a column)" if step > 1 else "")
    return heatmap(shares.T, layers, labels, title, "round", "layer", low=0.0, high=1.0)


def draw_accuracy(rows: Sequence[Row], judge: str) -> np.ndarray:
    """Mean of each kind of model by round, and for the judge's the worst tenth and the spread over clients."""
    metric = of_rows(rows)
    figure, panels = _figure(f"{metric.words.capitalize()} by round")
    for kind, words in MODELS.items():
        judged = [row for row in rows if metric.by(kind) in row]
        if judged:
            rounds, means = zip(*((int(row["round"]), row[metric.by(kind)]) for row in judged), strict=True)
            dots, width = "o" if len(rounds) <= _FEW else "", 2.5 if kind == judge else 1.5
            panels[0].plot(rounds, means, label=words, color=_colour(kind), linewidth=width, marker=dots, markersize=4)
    judged = [row for row in rows if metric.of("mean") in row]
    scored, colour = [int(row["round"]) for row in judged], _colour(judge)
    mean, worst, std = (
        np.array([row.get(metric.of(what), np.nan) for row in judged]) for what in ("mean", "worst", "std")
    )
    most = 1.0 if metric.rises else np.inf  # no accuracy is above 1
    low, high = np.maximum(mean - std, 0.0), np.minimum(mean + std, most)
    panels[1].fill_between(scored, low, high, color=colour, alpha=0.2, linewidth=0, label="± std")
    panels[1].plot(scored, mean, color=colour, label="mean")
    panels[1].plot(scored, worst, color=colour, linestyle="--", label="worst tenth of the clients")
    for axes, words in zip(panels, ("mean over clients", f"clients, {MODELS[judge]}"), strict=True):
        axes.set(ylabel=f"{metric.words} ({words})")
        _by_round(axes, scored)
        if axes.lines:
            axes.legend(frameon=False)
    return _pixels(figure)


def _colour(kind: str) -> str:
    return _KINDS[list(MODELS).index(kind)]


def draw_time(rows: Sequence[Row], judge: str) -> np.ndarray:
    """Mean accuracy of the judge's kind of model against the channel's seconds and MiB, both since the first round."""
    words = f"{of_rows(rows).mean_words} ({MODELS[judge]})"
    figure, panels = _figure(f"{words.capitalize()} by what it cost")
    seconds, mib, accuracy = costs(rows)
    for axes, cost, unit in zip(panels, (seconds, mib), ("seconds over the channel", "MiB up and down"), strict=True):
        axes.plot(cost, accuracy, color="#440154", marker="o" if len(cost) <= _FEW else "", markersize=4)
        axes.set(xlabel=f"{unit}, since the first round", ylabel=words)
        axes.set_xlim(left=0)
        axes.locator_params(axis="x", nbins=6)
        if cost.max(initial=0.0) < _PLAIN:  # else the labels would be wider than the picture
            axes.ticklabel_format(axis="x", style="plain")
    return _pixels(figure)


def in_columns(values: np.ndarray, rounds: Sequence[int]) -> tuple[np.ndarray, list[int]]:
    """`values` (T, L) with 2, 5, 10, ... rounds averaged where there are many, and each column's last round."""
    steps = (factor * 10**power for power in range(7) for factor in (1, 2, 5))
    step = next(step for step in steps if len(rounds) <= step * _MOST_COLUMNS)
    starts = range(0, len(rounds), step)
    return np.stack([values[k : k + step].mean(axis=0) for k in starts]), [rounds[k : k + step][-1] for k in starts]


def costs(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each judged round: the channel's seconds and MiB up and down until its end, and its mean accuracy."""
    seconds = np.cumsum([row.get("channel_s", 0.0) for row in rows])
    mib = np.cumsum([row["upload_bytes"] + row["download_bytes"] for row in rows]) / _MIB
    mean = of_rows(rows).of("mean")
    judged = [k for k, row in enumerate(rows) if mean in row]
    return seconds[judged], mib[judged], np.array([rows[k][mean] for k in judged])


def _figure(title: str) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure  # here: a run that draws heatmaps alone need not import it
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    apart = ConstrainedLayoutEngine(w_pad=0.1)  # inches: a label of the right panel keeps off the left one
    figure = Figure(figsize=(11.0, 4.0), dpi=100, layout=apart)
    figure.suptitle(title)
    every = [figure.add_subplot(1, 2, k) for k in (1, 2)]
    for axes in every:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    return figure, every


def _line(axes: Axes, rounds: Sequence[int], values: np.ndarray, way: str, **look: Any) -> None:
    axes.plot(rounds, values, **{"marker": "o" if len(rounds) <= _FEW else "", **_LOOKS[way], **look})


def _by_round(axes: Axes, rounds: Sequence[int]) -> None:
    axes.set(xlabel="round", xlim=(rounds[0] - 0.5, rounds[-1] + 0.5))
    _whole_numbers(axes.xaxis)


def _whole_numbers(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))


def _pixels(figure: Figure) -> np.ndarray:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
