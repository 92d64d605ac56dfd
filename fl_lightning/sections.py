"""What viewers (TensorBoard, W&B) call a run's numbers: `section/name`, since they draw a section together.

A viewer draws what has one name into one picture, and runs have different judges: what a run's own judge says is
`own_judge_...`, and runs are to be compared by `accuracy/after` and its like, which speak of one kind of model in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fl_lightning.metric import BY_TASK, FURTHER, MODELS, Metric

_BEGINNINGS = {
    "communication": ("upload_", "download_", "layers_", "channel_"),
    "cost": ("flops_", "seconds", "memory_", "wall_seconds"),
    "training": ("train_loss", "coaching_loss", "objective", "gradient_norm_"),
    "privacy": ("privacy_",),
    "clients": ("clients_",),
    "data": ("heterogeneity_",),
    "relation": ("rand_index",),
    "newcomers": ("newcomer_",),
}
"""Sections of columns that are no scores, by how those begin."""
_AT_THE_END = ("best_", "last_", "final_", "validation_", "mean_best_")
_ALL: tuple[Metric, ...] = (*BY_TASK.values(), *FURTHER.values())
_SCORES = {
    **{metric.of(what): (metric, what) for metric in BY_TASK.values() for what in ("mean", "weighted", "validation")},
    **{metric.of(what): (metric, what) for metric in FURTHER.values() for what in ("mean", "clients")},
    **{metric.by(kind): (metric, kind) for metric in _ALL for kind in MODELS},
    **{metric.on_global_test(kind): (metric, f"global_test_{kind}") for metric in _ALL for kind in MODELS},
}
"""Columns of a metric's own section, named after it. `clients_f1`: of how many clients a mean is."""
_SPREADS = {metric.of(what): (metric, what) for metric in BY_TASK.values() for what in ("worst", "std")}
"""Columns that say how clients differ."""
OF_JUDGE = frozenset(
    metric.of(f"{part}{what}")
    for metric in BY_TASK.values()
    for part in ("", "best_", "last_", "final_", "validation_")
    for what in ("mean", "worst", "std", "weighted", "validation", "mean_best")
) | frozenset(
    metric.of(f"{part}{what}") for metric in FURTHER.values() for part in ("", "final_") for what in ("mean", "clients")
)
"""Columns and keys that speak of the judge's kind of model, whichever that is."""


def shown(column: str) -> str:
    """What viewers call a column of `metrics.csv`."""
    own = "own_judge_" if column in OF_JUDGE else ""
    if column in _SCORES:
        metric, what = _SCORES[column]
        return f"{metric.name}/{own}{what}"
    if column in _SPREADS:
        return f"fairness/{own}{column}"
    if column.rpartition("_")[2] in MODELS:
        return f"scores/{column}"  # what else models are scored by
    return f"{_section(column) or 'other'}/{column}"


def in_summary(key: str) -> str:
    """What viewers call a key of `summary.json`: totals beside what they sum up, scores of the end by themselves."""
    if key in OF_JUDGE:
        return f"final/own_judge_{key}"
    if key.startswith(_AT_THE_END):
        return f"final/{key}"
    return f"{_section(key.removeprefix('total_')) or 'run'}/{key}"


def best_of(column: str) -> str:
    """What a viewer's summary keeps of a column, in W&B's words: the best value and the last, or the last alone."""
    metric, what = (_SCORES | _SPREADS).get(column, (None, ""))
    if what == "std":
        return "min,last"
    if metric is not None and what != "clients":
        return "max,last" if metric.rises else "min,last"
    return "min,last" if shown(column).startswith("training/") else "last"


def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `metrics.csv` by viewers' names."""
    return {shown(name): value for name, value in values.items()}


class SoFar:
    """What a run has cost until the end of each round: axes to draw accuracy over. Rounds are added in order."""

    def __init__(self, rows: Iterable[Mapping[str, float]] = ()) -> None:
        self._sums: dict[str, float] = {}
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, float]) -> dict[str, float]:
        """Add a row of `metrics.csv`; returns the sums by viewers' names: MiB both ways, modelled and real seconds."""
        mib = [row[name] / 2**20 for name in ("upload_bytes", "download_bytes") if name in row]
        new = {"communication/mib_so_far": sum(mib)} if mib else {}
        new |= {name: row[column] for name, column in _SECONDS.items() if column in row}
        for name, value in new.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        return dict(self._sums)


_SECONDS = {"communication/channel_s_so_far": "channel_s", "cost/seconds_so_far": "seconds"}


def spread(rounds: int, most: int) -> list[int]:
    """At most `most` of the rounds 1 to `rounds`, evenly apart, the first and the last among them."""
    if rounds <= most:
        return list(range(1, rounds + 1))
    return [1 + round(k * (rounds - 1) / (most - 1)) for k in range(most)] if most > 1 else [rounds]


def _section(name: str) -> str | None:
    return next((section for section, begins in _BEGINNINGS.items() if name.startswith(begins)), None)
