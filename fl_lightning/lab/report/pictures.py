"""Heatmaps as bytes: the relation by round, and which layers travelled.

A page of a long run must stay small. So a cell is one byte, 254 steps between the ends of its
picture's colours; the few cells beyond the end (a client's own weight, mostly) are numbers beside
it; and long runs show some rounds only.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from fl_lightning.results.ledger import unread_note
from fl_lightning.results.record import RelationView
from fl_lightning.results.runs import Runs

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
    return {
        "low": low,
        "high": float(f"{end:.6g}"),
        "codes": base64.b64encode(codes.tobytes()).decode(),
        "over": [float(f"{value:.4g}") for value in values[beyond]],
    }


def top(values: np.ndarray, is_own: np.ndarray) -> float | None:
    """Where the colours of a relation end: at 1.5 times the greatest weight of another client's
    model, beside which a client's own weight (`is_own`) would leave the rest one colour; None: at
    the greatest value."""
    others = values[~is_own & np.isfinite(values)].max(initial=0.0)
    end = float(1.5 * others)
    return end if 0 < end < values.max() else None


def relations(runs: Runs) -> dict[str, Any]:
    """The pictures of all runs: `rounds` of the slider, and for each run its `layers`, `pictures`
    by round, `names` of clients by number, and in words what is `constant` in all of them: empty
    where there is something to see.

    A round's picture has `receivers`, `sources`, `overview` (receivers x sources) and `clients`
    (layers x sources by receiver). What is left out is added to the runs' notes.
    """
    from matplotlib import colormaps

    rounds_of = {run.name: run.relation_rounds for run in runs}
    for run in runs:
        present = sum(number <= run.rounds_done for number in rounds_of[run.name])
        if present < run.rounds_done:
            absent = f"{run.rounds_done - present} of {run.rounds_done}"
            run.notes["relation"].append(f"{absent} rounds have no relation file")
    rounds, details = _plan(runs, rounds_of)
    shown = []
    for run in runs:
        pictures: dict[int, Any] = {}
        layers: list[str] = []
        words: set[str] = set()
        unread_rounds = []
        for number in rounds if run.name in details else []:
            if number not in rounds_of[run.name]:
                continue
            view = run.files.intact_relation(number)
            if view is None:
                unread_rounds.append(number)
            else:
                layers = view.layers
                words.add(_same(view))
                pictures[number] = _round(view, details[run.name])
        run.notes["relation"] += unread_note(unread_rounds)
        constant = words.pop() if len(words) == 1 else ""
        of_run = {
            "layers": layers,
            "pictures": pictures,
            "constant": constant,
        }
        shown.append(of_run | ({"names": run.client_names} if run.client_names else {}))
    viridis = colormaps["viridis"](np.arange(256), bytes=True)
    return {
        "rounds": [t for t in rounds if any(t in of_run["pictures"] for of_run in shown)],
        "of": len(set().union(*rounds_of.values())),
        "runs": shown,
        "palette": base64.b64encode(viridis[:, :3].tobytes()).decode(),
    }


def _plan(runs: Runs, rounds_of: dict[str, list[int]]) -> tuple[list[int], dict[str, int]]:
    """Rounds to show, and by run the number of receivers in detail: `BUDGET` is shared out evenly.
    A run that is too large even for overviews is left out."""
    every = sorted(set().union(*rounds_of.values()))
    shown = min(len(every), MOST_ROUNDS)
    fewest = min(shown, FEWEST_ROUNDS)
    details: dict[str, int] = {}
    for run in runs:
        views = map(run.files.intact_relation, reversed(rounds_of[run.name]))
        view = next((view for view in views if view is not None), None)
        if view is None:
            run.notes["relation"] += ["no relation file can be read"] * bool(rounds_of[run.name])
            continue
        receivers, layers, sources = view.rows.shape
        overview, detail = _cost(receivers, sources), _cost(layers, sources)
        budget = BUDGET / len(runs)
        # as many receivers as fit where few rounds are shown, then as many rounds as fit
        count = int((budget / fewest - overview) // detail)
        if count < 0:
            run.notes["relation"].append(f"{receivers} clients are too many for this page")
            continue
        details[run.name] = count = min(receivers, count)
        if count < receivers:
            run.notes["relation"].append(
                f"layer by layer, only the first {count} of each round's cohort are shown"
            )
        shown = min(shown, int(budget // (overview + count * detail)))
    places = np.linspace(0, len(every) - 1, shown).round().astype(int)
    last = {numbers[-1] for numbers in rounds_of.values() if numbers}
    return sorted(last | {every[place] for place in places}), details


def _cost(rows: int, columns: int) -> int:
    """Characters of a picture: its codes in base64, the numbers beyond, labels."""
    return rows * columns * 4 // 3 + 8 * rows + 90


def _same(view: RelationView) -> str:
    """In words a relation in which no client differs from another: of each layer all receive one
    mix, or their own.

    Empty for any other.
    """
    identity = np.equal.outer(view.receivers, view.sources)
    unmixed = [
        name for k, name in enumerate(view.layers) if np.array_equal(view.rows[:, k], identity)
    ]
    mixed = np.ptp(view.rows, axis=0).max(axis=1) <= ROUNDED
    if len(view.receivers) < 2 or len(unmixed) + mixed.sum() < len(view.layers):
        return ""
    if not mixed.any():
        return "every client receives its own model alone"
    names = ", ".join(unmixed)
    if len(unmixed) > MOST_NAMES:
        names = f"{len(unmixed)} layers"
    exceptions = f", but for {names}: of these each has its own" if unmixed else ""
    return f"all clients receive one and the same mix{exceptions}"


def _round(view: RelationView, details: int) -> Picture:
    is_own = np.equal.outer(view.receivers, view.sources)
    overview = view.rows.mean(axis=1)
    clients = {}
    for receiver, rows, sources in zip(
        view.receivers[:details],
        view.rows,
        is_own,
        strict=False,
    ):
        clients[receiver] = encode(rows, top(rows, np.broadcast_to(sources, rows.shape)))
    return {
        "receivers": view.receivers,
        "sources": view.sources,
        "overview": encode(overview, top(overview, is_own)),
        "clients": clients,
    }
