"""Heatmaps as bytes: the relation by round, and which layers travelled.

A page of a long run must stay small. So a cell is one byte, 254 steps between the ends of its
picture's colours; the few cells beyond the end (a client's own weight, mostly) are numbers beside
it; and long runs show some rounds only.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from fl_lightning.results.ledger import unread
from fl_lightning.results.record import RelationView
from fl_lightning.results.result import RunResult

STEPS, OVER, MISSING = 253, 254, 255
"""Greatest code of a value within the colours, codes of a value beyond them and of one that is not
finite."""
BUDGET = 6_000_000
"""Characters of the page that all relations together may take."""
MOST_ROUNDS, FEWEST_ROUNDS = 100, 4
"""Rounds that the slider shows at most, and at least as long as leaving out clients makes room for
them."""
ROUNDED = 1e-6
"""By how much equal weights may differ: they were worked out and kept as 32-bit numbers."""
MOST_NAMES = 6
"""Layers that a sentence names."""

Picture = dict[str, Any]


def encode(values: np.ndarray, high: float | None = None) -> Picture:
    """A picture of `values` (rows, columns): `low` and `high` ends of the colours, `codes`
    (base64), `over`."""
    values = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(values)
    low = float(values[finite].min(initial=0.0))
    end = float(values[finite].max(initial=low)) if high is None else high
    end = end if end > low else low + 1.0
    level = (np.where(finite, values, low) - low) / (end - low)
    codes = (level.clip(0, 1) * STEPS).round().astype(np.uint8)
    beyond = finite & (level > 1)
    codes[beyond], codes[~finite] = OVER, MISSING
    over = [float(f"{value:.4g}") for value in values[beyond]]
    return {
        "low": low,
        "high": float(f"{end:.6g}"),
        "codes": base64.b64encode(codes.tobytes()).decode(),
        "over": over,
    }


def top(values: np.ndarray, own: np.ndarray) -> float | None:
    """Where the colours of a relation end: at 1.5 times the greatest weight of another client's
    model, beside which a client's `own` weight would leave the rest one colour; None: at the
    greatest value."""
    others = values[~own & np.isfinite(values)].max(initial=0.0)
    return float(1.5 * others) if 0 < 1.5 * others < values.max() else None


def relations(runs: list[RunResult]) -> dict[str, Any]:
    """The pictures of all runs: `rounds` of the slider, and for each run its `layers`, `pictures`
    by round, `names` of clients by number, and in words what is `constant` in all of them: empty
    where there is something to see.

    A round's picture has `receivers`, `sources`, `overview` (receivers x sources) and `clients`
    (layers x sources by receiver). What is left out is noted in the runs.
    """
    from matplotlib import colormaps

    kept = {run.name: run.relation_rounds for run in runs}
    for run in runs:
        absent = run.rounds_done - len(
            [number for number in kept[run.name] if number <= run.rounds_done]
        )
        if absent > 0:
            run.notes["relation"].append(
                f"{absent} of {run.rounds_done} rounds have no relation file"
            )
    rounds, most = _plan(runs, kept)
    shown = []
    for run in runs:
        pictures: dict[int, Any] = {}
        layers: list[str] = []
        same: set[str] = set()
        details = most[run.name]
        due = (
            [number for number in rounds if number in kept[run.name]] if details is not None else []
        )
        for number in due:
            view = run.files.intact_relation(number)
            if view is not None:
                layers, same = view.layers, same | {_same(view)}
                pictures[number] = _round(view, details or 0)
        run.notes["relation"] += unread([number for number in due if number not in pictures])
        constant = same.pop() if len(same) == 1 else ""
        named = {"names": run.client_names} if run.client_names else {}
        shown.append({"layers": layers, "pictures": pictures, "constant": constant, **named})
    rounds = [number for number in rounds if any(number in run["pictures"] for run in shown)]
    viridis = colormaps["viridis"](np.arange(256), bytes=True)
    return {
        "rounds": rounds,
        "of": len({number for numbers in kept.values() for number in numbers}),
        "runs": shown,
        "palette": base64.b64encode(viridis[:, :3].tobytes()).decode(),
    }


def _plan(
    runs: list[RunResult], kept: dict[str, list[int]]
) -> tuple[list[int], dict[str, int | None]]:
    """Which rounds to show, and how many receivers of each run in detail (None: not even the
    overview)."""
    every = sorted({number for numbers in kept.values() for number in numbers})
    shown_rounds = keep = min(len(every), MOST_ROUNDS)
    most: dict[str, int | None] = dict.fromkeys(kept)
    sizes = {}
    for run in runs:
        views = (run.files.intact_relation(number) for number in reversed(kept[run.name]))
        view = next((view for view in views if view is not None), None)
        if view is not None:
            receivers, layers, sources = view.rows.shape
            sizes[run.name] = (
                receivers,
                _cost(receivers, sources, receivers),
                _cost(layers, sources, layers),
            )
        elif kept[run.name]:
            run.notes["relation"].append("no relation file can be read")
    everything = sum(
        overview + receivers * detail for receivers, overview, detail in sizes.values()
    )
    for run in (run for run in runs if run.name in sizes):
        receivers, overview, detail = sizes[run.name]
        share = BUDGET * (overview + receivers * detail) / everything
        for_details = share / min(shown_rounds, FEWEST_ROUNDS) - overview
        if for_details < 0:
            run.notes["relation"].append(f"{receivers} clients are too many for this page")
            continue
        most[run.name] = count = min(receivers, int(for_details // detail))
        if count < receivers:
            run.notes["relation"].append(
                f"layer by layer, only the first {count} of each round's cohort are shown"
            )
        keep = min(keep, int(share // (overview + count * detail)))
    if not every:
        return [], most
    spread = {every[at] for at in np.linspace(0, len(every) - 1, keep).round().astype(int)}
    return sorted(spread | {numbers[-1] for numbers in kept.values() if numbers}), most


def _cost(rows: int, columns: int, over: int) -> int:
    """Characters of a picture: its codes in base64, the numbers beyond, labels."""
    return rows * columns * 4 // 3 + 8 * over + 90


def _same(view: RelationView) -> str:
    """In words a relation in which no client differs from another: of each layer all receive one
    mix, or their own.

    Empty for any other.
    """
    own = np.array(view.receivers)[:, None] == np.array(view.sources)
    kept = [layer for k, layer in enumerate(view.layers) if np.array_equal(view.rows[:, k], own)]
    mixed = np.ptp(view.rows, axis=0).max(axis=1) <= ROUNDED
    if len(view.receivers) < 2 or len(kept) + mixed.sum() < len(view.layers):
        return ""
    if not mixed.any():
        return "every client receives its own model alone"
    names = f"{len(kept)} layers" if len(kept) > MOST_NAMES else ", ".join(kept)
    but = f", but for {names}: of these each has its own" if kept else ""
    return f"all clients receive one and the same mix{but}"


def _round(view: RelationView, most: int) -> dict[str, Any]:
    own = np.array(view.receivers)[:, None] == np.array(view.sources)
    overview = view.rows.mean(axis=1)
    clients = {}
    for receiver, rows, is_own in zip(view.receivers[:most], view.rows, own, strict=False):
        clients[receiver] = encode(rows, top(rows, np.broadcast_to(is_own, rows.shape)))
    return {
        "receivers": view.receivers,
        "sources": view.sources,
        "overview": encode(overview, top(overview, own)),
        "clients": clients,
    }
