"""Encode relations as small heatmaps that the page's script draws.

To keep pages of long runs small, a cell is one byte: one of 254 steps between the ends of the
picture's colours. The few values above the end (mostly a client's own weight) are listed as
numbers, and long runs show some of their rounds only.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from fl_lightning.results.ledger import unread_note
from fl_lightning.results.record import RelationView
from fl_lightning.results.runs import Runs

STEPS, OVER, MISSING = 253, 254, 255
"""Greatest code of a value within the colours; code of a value above them; code of NaN and
infinity."""
BUDGET = 6_000_000
"""Characters of the page that all relations may take together."""
MOST_ROUNDS, FEWEST_ROUNDS = 100, 4
"""Greatest number of rounds of the slider, and the number below which clients are left out
first."""
ROUNDED = 1e-6
"""Greatest difference between weights that count as equal: they were stored with 32 bits."""
MOST_NAMES = 6
"""Layers that a sentence names at most."""

Picture = dict[str, Any]


def encode(values: np.ndarray, high: float | None = None) -> Picture:
    """Encode a matrix as a picture.

    Args:
        values: (rows, columns).
        high: value at the end of the colours; None: the greatest.

    Returns:
        Keys `low` and `high` (values at the ends of the colours), `codes` (one byte a cell, in
        base64) and `over` (the values above `high`, in reading order).
    """
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


def colour_end(values: np.ndarray, is_own: np.ndarray) -> float | None:
    """Choose the weight at which a relation's colour scale ends: 1.5 times the greatest weight that
    a client gives another one. Clients' weights on themselves are often far greater; if the scale
    ended there, all other weights would look alike.

    Args:
        values: weights.
        is_own: which of them are clients' weights on themselves; bool, of the same shape.

    Returns:
        The end; None if no weight is greater, so that the scale ends at the greatest weight.
    """
    others = values[~is_own & np.isfinite(values)].max(initial=0.0)
    end = float(1.5 * others)
    return end if 0 < end < values.max() else None


def relations(runs: Runs) -> dict[str, Any]:
    """Encode the relations of all runs for the page's script; adds notes to runs of which rounds or
    clients are left out.

    Returns:
        Keys `rounds` (numbers on the slider), `of` (number of rounds with a relation), `palette`
        (RGB bytes, in base64) and `runs`. Each run has `layers`, `names` of clients by number,
        `pictures` by round, and `constant`: a sentence if all clients are alike in all pictures,
        else "". A round has `receivers`, `sources`, the picture `overview` (receivers, sources) and
        by receiver in `clients` a picture (layers, sources).
    """
    from matplotlib import colormaps

    rounds_of = {run.name: run.relation_rounds for run in runs}
    for run in runs:
        present = sum(number <= run.rounds_done for number in rounds_of[run.name])
        if present < run.rounds_done:
            absent = f"{run.rounds_done - present} of {run.rounds_done}"
            run.notes["relation"].append(f"{absent} rounds have no relation file")
    rounds, details = _plan(runs, rounds_of)
    entries = []
    for run in runs:
        pictures: dict[int, Any] = {}
        layers: list[str] = []
        sentences: set[str] = set()
        unread_rounds = []
        for number in rounds if run.name in details else []:
            if number not in rounds_of[run.name]:
                continue
            view = run.files.intact_relation(number)
            if view is None:
                unread_rounds.append(number)
            else:
                layers = view.layers
                sentences.add(_words_if_alike(view))
                pictures[number] = _round(view, details[run.name])
        run.notes["relation"] += unread_note(unread_rounds)
        constant = sentences.pop() if len(sentences) == 1 else ""
        entry = {
            "layers": layers,
            "pictures": pictures,
            "constant": constant,
        }
        entries.append(entry | ({"names": run.client_names} if run.client_names else {}))
    viridis = colormaps["viridis"](np.arange(256), bytes=True)
    return {
        "rounds": [t for t in rounds if any(t in entry["pictures"] for entry in entries)],
        "of": len(set().union(*rounds_of.values())),
        "runs": entries,
        "palette": base64.b64encode(viridis[:, :3].tobytes()).decode(),
    }


def _plan(runs: Runs, rounds_of: dict[str, list[int]]) -> tuple[list[int], dict[str, int]]:
    """Choose the rounds to show, and for each run the number of receivers with pictures of their
    own, so that each run stays within its equal part of `BUDGET`. Runs for which even overviews are
    too large are left out."""
    every = sorted(set().union(*rounds_of.values()))
    count_of_rounds = min(len(every), MOST_ROUNDS)
    fewest = min(count_of_rounds, FEWEST_ROUNDS)
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
        # as many receivers as fit with the fewest rounds, then as many rounds as fit
        count = int((budget / fewest - overview) // detail)
        if count < 0:
            run.notes["relation"].append(f"{receivers} clients are too many for this page")
            continue
        details[run.name] = count = min(receivers, count)
        if count < receivers:
            run.notes["relation"].append(
                f"layer by layer, only the first {count} of each round's cohort are shown"
            )
        count_of_rounds = min(count_of_rounds, int(budget // (overview + count * detail)))
    indices = np.linspace(0, len(every) - 1, count_of_rounds).round().astype(int)
    last = {numbers[-1] for numbers in rounds_of.values() if numbers}
    return sorted(last | {every[k] for k in indices}), details


def _cost(rows: int, columns: int) -> int:
    """Estimate the characters of a picture: codes in base64, numbers in `over`, and keys."""
    return rows * columns * 4 // 3 + 8 * rows + 90


def _words_if_alike(view: RelationView) -> str:
    """Describe a relation in which all clients are alike: of each layer all receive the same mix,
    or each its own model. Empty for any other relation."""
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
        end = colour_end(rows, np.broadcast_to(sources, rows.shape))
        clients[receiver] = encode(rows, end)
    return {
        "receivers": view.receivers,
        "sources": view.sources,
        "overview": encode(overview, colour_end(overview, is_own)),
        "clients": clients,
    }
