"""The scores of a run by round, drawn by matplotlib as an array of pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fl_lightning.foundation.metric import MODELS, Metric

COLOURS = {
    "before": "#e8672c",
    "distilled": "#b8860b",
    "after": "#2a78d6",
    "global": "#1a9e6d",
    "finetuned": "#7a5cd0",
}
"""The colour of each kind of model, the same as on the report's page."""


def draw_scores(
    rows: Sequence[Mapping[str, float]],
    metric: Metric,
    judge: str,
    name: str,
) -> np.ndarray:
    """Draw curves of the scores by round, uint8 (height, width, 3): the clients' mean for each kind
    of model, and the worst tenth of the clients by the judge.

    Args:
        rows: the rows of the run's `metrics.csv`.
        metric: the run's metric.
        judge: the kind of model by which the run is judged.
        name: the run's name.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), dpi=100, layout="constrained")
    canvas, axes = FigureCanvasAgg(figure), figure.add_subplot()
    scale, unit = (100.0, ", %") if metric.rises else (1.0, "")
    lines = {metric.by(kind): (words, COLOURS[kind], "-") for kind, words in MODELS.items()}
    lines |= {metric.of("worst"): ("worst tenth of the clients", COLOURS[judge], ":")}
    for column, (label, colour, dashes) in lines.items():
        points = [(row["round"], scale * row[column]) for row in rows if column in row]
        if points:
            rounds, scores = zip(*points, strict=True)
            marker = "o" if len(points) == 1 else ""
            look: dict[str, Any] = {
                "color": colour,
                "linestyle": dashes,
                "marker": marker,
            }
            axes.plot(
                rounds,
                scores,
                label=label,
                **look,
            )
    axes.locator_params(axis="x", integer=True)
    axes.set(xlabel="round", ylabel=f"{metric.mean_words}{unit}")
    title = f"{name}, by the judge: {MODELS[judge]}".replace("$", r"\$")
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.lines:
        axes.legend(frameon=False, fontsize="small")
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
