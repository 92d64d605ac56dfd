"""The page's charts as files, SVG, PDF or PNG, drawn by matplotlib from the same numbers."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from fl_lightning.configuration.config import check
from fl_lightning.drawing.heatmap import MISSING, NEGATIVE, WEIGHT_TICKS, extension, weight_scale
from fl_lightning.foundation.files import write_whole
from fl_lightning.lab.report import clients, figures, newcomers
from fl_lightning.results.ledger import Ledger
from fl_lightning.results.result import RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Kind = Literal["svg", "pdf", "png"]
LISTED = "figures.json"
"""Names of the pictures that reports have made in a folder."""
_RECEIVERS = 3
"""Clients whose layers are drawn, as by the callback `heatmaps`."""
_DASHES = {"solid": "-", "dot": ":", "dash": "--"}
_WIDTH = 5.5
"""Inches: a column of most papers, or the text of a page with one."""
_ABREAST = 45
"""Letters of all names below a picture, beyond which they would run into each other."""


def write(runs: list[RunResult], folder: Path, kind: Kind) -> list[Path]:
    """Write the charts on `runs`, each to a file of its own in `folder`; returns the files."""
    drawn = (
        figures.training(runs) | figures.fairness(runs) | figures.ledger(runs) | figures.costs(runs)
    )
    drawn |= newcomers.curve(runs) | figures.accuracy(runs)
    drawn.pop("fairness-box", None)  # the same as in order, for eyes that want both
    made = {name: _image(kind, name, _chart, figure) for name, figure in drawn.items()}
    for number, split in enumerate(clients.splits(runs)):
        made[f"split-{number}"] = _image(kind, f"split-{number}", _split, split)
    for number, run in enumerate(runs):
        heats = [(f"relation-{number}{end}", heat) for end, heat in _relations(run)]
        if run.ledger and not figures.constant(run.ledger.share):
            heats += [(f"ledger-{way}-{number}", heat) for way, heat in _shares(run.ledger)]
        made |= {name: _image(kind, name, _heat, heat) for name, heat in heats}
    return keep(folder, kind, made)


def keep(folder: Path, kind: Kind, pictures: Mapping[str, bytes]) -> list[Path]:
    """Have `folder` hold these pictures in place of those of the report before; returns their
    files.

    Raises:
        BadInput: a file that no report has made has one of their names.
    """
    try:
        before = [str(name) for name in json.loads((folder / LISTED).read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        before = []
    made = {f"{name}.{kind}": content for name, content in pictures.items()}
    strange = next(
        (folder / name for name in made if name not in before and (folder / name).exists()), folder
    )
    allowed = (
        f"{strange} exists and is of no report before, and is not written over: move it, or give "
        f"another --out"
    )
    check("figures", kind, strange is folder, allowed)
    # first: after a kill the next report knows them
    write_whole(folder / LISTED, json.dumps(sorted({*before, *made})))
    for name, content in made.items():
        write_whole(folder / name, content)
    for name in before:
        if name not in made and Path(name).name == name and name.endswith(f".{kind}"):
            (folder / name).unlink(missing_ok=True)
    write_whole(
        folder / LISTED,
        json.dumps(sorted({*made, *(n for n in before if not n.endswith(f".{kind}"))})),
    )
    return [folder / name for name in made]


def _image(kind: Kind, name: str, draw: Any, *what: Any) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, 0.62 * _WIDTH), layout="constrained")
    draw(figure.add_subplot(), *what)
    return image(name, figure, kind)


def image(name: str, figure: Figure, kind: Kind, made_by: str | None = None) -> bytes:
    """A figure in a format; letters stay letters, and equal numbers give equal bytes. `made_by`:
    kept in a PNG."""
    import matplotlib as mpl

    undated: dict[Kind, Any] = {
        "svg": {"Date": None},
        "pdf": {"CreationDate": None},
        "png": {"Software": made_by},
    }
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "none", "pdf.fonttype": 42, "svg.hashsalt": name}):
        figure.savefig(buffer, format=kind, dpi=150, metadata=undated[kind])
    return buffer.getvalue()


def _chart(axes: Axes, figure: dict[str, Any]) -> None:
    """A chart of curves or of stacked bars, from what plotly would draw."""
    data, layout = figure["data"], figure["layout"]
    before: dict[str, float] = {}
    named: list[tuple[Any, str]] = []
    edge: list[float] = []
    places = layout.get("xaxis", {}).get("categoryarray")
    if places:
        axes.set_xticks(range(len(places)), places)
    for trace in data:
        label = _plain(trace["name"])
        if trace["type"] == "bar":
            rows = [_plain(row) for row in trace["y"]]
            values = [value or 0.0 for value in trace["x"]]
            left = [before.get(row, 0.0) for row in rows]
            named.append(
                (axes.barh(rows, values, left=left, color=trace["marker"]["color"]), label)
            )
            before |= {
                row: before.get(row, 0.0) + value for row, value in zip(rows, values, strict=True)
            }
        # an edge of a band over seeds; the second is filled to the first
        elif trace["line"].get("width") == 0:
            x, y = _known(trace["x"], trace["y"])
            if trace.get("fill"):
                axes.fill_between(x, edge, y, color=trace["line"]["color"], alpha=0.2, lw=0)
            edge = y
        else:
            look = {
                "color": trace["line"]["color"],
                "linestyle": _DASHES[trace["line"].get("dash", "solid")],
            }
            look["marker"] = "o" if len(trace["x"]) == 1 else ""
            x, y = _known(
                [places.index(place) for place in trace["x"]] if places else trace["x"], trace["y"]
            )
            spread = trace.get("error_y", {}).get("array")
            named.append((axes.errorbar(x, y, spread, linewidth=1.4, capsize=3, **look), label))
    if before:
        axes.invert_yaxis()
    x, y = (layout.get(axis, {}).get("title", {}).get("text", "") for axis in ("xaxis", "yaxis"))
    _finish(axes, named, x, y, above=bool(before))  # bars fill the axes


def _split(axes: Axes, split: dict[str, Any]) -> None:
    """A dot for each client and class, its area in proportion to the samples."""
    counts = np.array(split["counts"])
    rows, columns = np.nonzero(counts)
    axes.scatter(columns, rows, s=counts[rows, columns] / counts.max() * 90, color="#440154")
    _name(axes, split["clients"], split["classes"], "client", "class")


class _Heat(NamedTuple):
    """Values from 0 to 1, (rows, columns), as colours: weights, or shares of the cohort."""

    values: np.ndarray
    rows: Sequence[Any]
    columns: Sequence[Any]
    x: str
    y: str
    words: str
    """What the colours mean."""
    weights: bool


def _relations(run: RunResult) -> Iterator[tuple[str, _Heat]]:
    """Of the last round that is kept: who receives from whom, and what the first receivers get of
    each layer.

    Each with the end of its file's name. None where there is no relation that can be read.
    """
    rounds = run.relation_rounds
    view = run.files.intact_relation(rounds[-1]) if rounds else None
    if view is None:
        return
    overall, words = view.rows.mean(axis=1), f"weight in round {rounds[-1]}"
    receivers, sources = ([*map(run.called, clients)] for clients in (view.receivers, view.sources))
    mean = f"{words}, mean over the layers"
    yield "", _Heat(overall, receivers, sources, "source client", "receiving client", mean, True)
    for receiver, rows in list(zip(view.receivers, view.rows, strict=True))[:_RECEIVERS]:
        yield (
            f"-client-{receiver:03d}",
            _Heat(rows, view.layers, sources, "source client", "layer", words, True),
        )


def _shares(ledger: Ledger) -> Iterator[tuple[str, _Heat]]:
    """The share of the cohort that received and sent each layer, by round; `down` and `up` are in
    files' names."""
    for way, verb, share in zip(("down", "up"), ("received", "sent"), ledger.share, strict=True):
        words = f"share of the cohort that {verb} the layer"
        yield way, _Heat(share, ledger.layers, ledger.rounds, "round", "layer", words, False)


def _heat(axes: Axes, heat: _Heat) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import Normalize

    values = heat.values
    colours = colormaps["viridis"].with_extremes(bad=MISSING, under=NEGATIVE)
    norm = weight_scale() if heat.weights else Normalize(0.0, 1.0)
    picture = axes.imshow(values, norm=norm, aspect="auto", interpolation="nearest", cmap=colours)
    assert axes.figure is not None
    ends = extension(
        float(np.nanmin(values, initial=0.0)), float(np.nanmax(values, initial=0.0)), 1.0
    )
    ticks: dict[str, Any] = {"ticks": WEIGHT_TICKS, "format": "%g"} if heat.weights else {}
    axes.figure.colorbar(picture, ax=axes, label=heat.words, extend=ends, **ticks).minorticks_off()
    _name(axes, heat.columns, heat.rows, heat.x, heat.y)


def _name(axes: Axes, columns: Sequence[Any], rows: Sequence[Any], x: str, y: str) -> None:
    """Name both axes and the places on them, of many some ten each; long names below are turned,
    side by side."""
    from matplotlib.figure import Figure

    for axis, names in ((axes.xaxis, columns), (axes.yaxis, rows)):
        shown = range(0, len(names), max(1, len(names) // 10))
        texts = [_literal(str(names[k])) for k in shown]
        axis.set_ticks([*shown], texts)
        if axis is axes.xaxis and sum(map(len, texts)) > _ABREAST:
            axis.set_ticks([*shown], texts, rotation=40, ha="right")
            assert isinstance(axes.figure, Figure)
            # what else is there keeps its room
            axes.figure.set_figheight(0.62 * _WIDTH + 0.06 * max(map(len, texts)))
    axes.set(xlabel=x, ylabel=y)


def _plain(label: str) -> str:
    """A label for plotly as matplotlib takes it: without HTML."""
    return _literal(html.unescape(label))


def _literal(text: str) -> str:
    """No formula between dollars."""
    return text.replace("$", r"\$")


def _known(x: Sequence[Any], y: list[float | None]) -> tuple[list[Any], list[float]]:
    """The points that have a value: a line goes on over rounds without one."""
    points = [(place, value) for place, value in zip(x, y, strict=True) if value is not None]
    return [place for place, _ in points], [value for _, value in points]


def _finish(axes: Axes, named: list[tuple[Any, str]], x: str, y: str, above: bool) -> None:
    """Axes' names, grid and the legend of what is `named`, within the axes or `above` them."""
    # one round: matplotlib would find no whole number beside it
    if x == "round" and axes.dataLim.width == 0:
        axes.set_xticks([axes.dataLim.x0])
    elif x == "round":
        axes.locator_params(axis="x", integer=True)
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    handles, words = [each for each, _ in named], [label for _, label in named]
    # Matplotlib would leave out a label that begins with an underscore.
    place: Any = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "ncols": 3} if above else {}
    legend = axes.legend(
        handles, [str(at) for at in range(len(named))], frameon=False, fontsize="small", **place
    )
    for text, label in zip(legend.get_texts(), words, strict=True):
        text.set_text(label)
