"""Clients over seeds: a row for each, with its samples, its score alone and by each method, and
paired differences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fl_lightning.foundation.metric import MODELS
from fl_lightning.lab.report.words import NONE
from fl_lightning.lab.study import statistics
from fl_lightning.lab.study.cells import Cell
from fl_lightning.lab.study.grid import by_key
from fl_lightning.lab.study.groups import Group, choose_baseline, grouped, training_alone
from fl_lightning.lab.study.sheet import Block, Sheet
from fl_lightning.lab.study.tables import MARK

INTERVALS = (
    f"intervals: {1 - statistics.LEVEL:.0%}, Student's t over the seeds of one client; they are "
    f"not corrected for the "
    "number of clients: some lie beside 0 by chance"
)
COLUMNS = {
    "client": "client",
    "train": "samples",
    "test": "test samples",
    "seeds": "seeds",
    "alone": "alone",
}
"""The first columns: what they are called on the command line, and their heads."""
REDRAWN = (
    "a client has other samples with each seed (the split is drawn): its row is a mean over "
    "different data"
)


def sheet_of(cells: Sequence[Cell], baseline: str | None = None) -> Sheet:
    """A block for each judge and setting, a row for each client that all methods have scored.

    Raises:
        BadInput: as `compare`.
    """
    groups, notes = grouped(cells)
    notes += choose_baseline(groups, baseline)
    alone = training_alone(cells)
    own = {cell.label for cell in alone.values()}  # has a column already: `alone`
    labels = [
        label
        for label in dict.fromkeys(label for group in groups for label in group.cells)
        if label not in own
    ]
    keys, head = _columns(labels)
    blocks, records = [], []
    for group in groups:
        for setting in group.settings:
            rows = _records(group, setting, alone)
            records += rows
            title = "; ".join(filter(None, [f"judge: {MODELS[group.judge]}", setting]))
            blocks.append(Block(f"{title}; differences to {group.baseline}", _lines(rows, labels)))
    shown = {
        key
        for block in blocks
        for row in block.rows
        for key, cell in zip(keys, row, strict=True)
        if cell != NONE
    }
    columns = [k for k, key in enumerate(keys) if key in shown]
    blocks = [
        Block(block.title, [[row[k] for k in columns] for row in block.rows]) for block in blocks
    ]
    notes += [REDRAWN] if any(row["redrawn"] for row in records) else []
    notes += [INTERVALS] if any(row["low"] is not None for row in records) else []
    head = [head[k] for k in columns]
    return Sheet(
        MARK, head, blocks, notes, records, {"notes": notes}, keys=[keys[k] for k in columns]
    )


def _columns(labels: Sequence[str]) -> tuple[list[str], list[str]]:
    """Keys and heads of the columns: two for each label. A key is there once: where a label, or the
    key of its differences, is a column's already, `method:` is before it."""
    keys, head = [*COLUMNS], [*COLUMNS.values()]
    for label in labels:
        taken = {*keys, *head}
        own, difference = (
            f"method:{key}" if key in taken else key for key in (label, f"{label}-difference")
        )
        keys += [own, difference]
        head += [own, f"{own}: difference"]
    return keys, head


def _records(
    group: Group, setting: str, alone: dict[tuple[str, int], Cell]
) -> list[dict[str, Any]]:
    """A record for each client and method; a client is there with the seeds with which it was
    scored."""
    records = []
    by_client: dict[int, dict[str, dict[int, float]]] = {}
    for label, cells in group.cells.items():
        for (at, seed), cell in cells.items():
            for client, score in cell.scores.items() if at == setting else ():
                by_client.setdefault(client, {}).setdefault(label, {})[seed] = score
    units = [
        cell for cells in group.cells.values() for (at, _), cell in cells.items() if at == setting
    ]
    splits = [{int(row["client"]): row for row in cell.run.rows("split")} for cell in units]
    for client, scores in sorted(by_client.items()):
        known = [split[client] for split in splits if client in split]
        own = [
            cell.scores[client]
            for (at, _), cell in alone.items()
            if at == setting and client in cell.scores
        ]
        for label, by_seed in scores.items():
            against = scores.get(str(group.baseline), {}) if label != group.baseline else {}
            pairs = [
                by_seed[seed] - against[seed] for seed in sorted(by_seed.keys() & against.keys())
            ]
            low, high = _interval(pairs)
            records.append(
                {
                    "judge": group.judge,
                    "setting": setting,
                    "client": client,
                    "name": str(known[0].get("name", client) if known else client),
                    "train_samples": sorted({int(row["train_samples"]) for row in known}),
                    "test_samples": sorted({int(row["test_samples"]) for row in known}),
                    "redrawn": any(row != known[0] for row in known),
                    "method": label,
                    "seeds": len(by_seed),
                    "alone": float(np.mean(own)) if own else None,
                    "mean": float(np.mean([*by_seed.values()])),
                    "baseline": group.baseline if against else None,
                    "difference": float(np.mean(pairs)) if pairs else None,
                    "low": low,
                    "high": high,
                }
            )
    return records


def _interval(pairs: list[float]) -> tuple[float | None, float | None]:
    """Of the mean of differences over seeds; None of one seed, or where all seeds differ alike."""
    differences = [[np.array([pair])] for pair in pairs]
    if len(pairs) < 2 or statistics.alike(differences):
        return None, None
    low, high = statistics.students(differences)
    return float(low), float(high)


def _lines(records: list[dict[str, Any]], labels: list[str]) -> list[list[str]]:
    """A line for each client, in the order of the sheet's columns."""
    lines = []
    for of_client in by_key(records, lambda record: record["client"]).values():
        by_label, any_of = {record["method"]: record for record in of_client}, of_client[0]
        sizes = [_span(any_of[f"{part}_samples"]) for part in ("train", "test")]
        seeds = _span(sorted({record["seeds"] for record in by_label.values()}))
        of_methods = []
        for record in map(by_label.get, labels):
            of_methods += (
                [NONE, NONE] if record is None else [_percent(record["mean"]), _difference(record)]
            )
        lines.append([any_of["name"], *sizes, seeds, _percent(any_of["alone"]), *of_methods])
    return lines


def _span(counts: list[int]) -> str:
    """So many samples or seeds, or from so many to so many."""
    return (
        NONE if not counts else str(counts[0]) if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"
    )


def _percent(score: float | None) -> str:
    return NONE if score is None else f"{100 * score:.1f}"


def _difference(record: dict[str, Any]) -> str:
    if record["difference"] is None:
        return NONE
    ends = (
        ""
        if record["low"] is None
        else f" [{100 * record['low']:+.1f}, {100 * record['high']:+.1f}]"
    )
    return f"{100 * record['difference']:+.1f}{ends}"
