"""Clients over seeds: a row for each, with its samples, its score alone and by each method, and
paired differences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pandas import DataFrame

from fl_lightning.foundation.metric import MODELS
from fl_lightning.lab import statistics
from fl_lightning.lab.report.words import NONE
from fl_lightning.lab.study.groups import Group, grouped, training_alone
from fl_lightning.lab.study.listing import Listing
from fl_lightning.lab.study.scores import tidy
from fl_lightning.lab.study.tables import MARK

INTERVALS = (
    f"intervals: {1 - statistics.LEVEL:.0%}, Student's t over the seeds of one client; they are "
    "not corrected for the number of clients: some lie beside 0 by chance"
)
HEADS = {
    "client": "client",
    "train": "samples",
    "test": "test samples",
    "seeds": "seeds",
    "alone": "alone",
}
"""The first columns: their keys on the command line, and their heads."""
REDRAWN = (
    "a client has other samples with each seed (the split is drawn): its row is a mean over "
    "different data"
)


def listing_of(runs: DataFrame, baseline: str | None = None) -> Listing:
    """A block for each judge and setting, a row for each client.

    Raises:
        BadInput: as `compare`.
    """
    groups, notes = grouped(runs, baseline)
    local = training_alone(runs)
    alone = tidy(runs[runs.method == local]).groupby(["setting", "client"]).value.mean()
    numbers = DataFrame([row for group in groups for row in _numbers(group, alone)])
    numbers = numbers.astype(dict.fromkeys(["alone", "difference", "low", "high"], float))
    labels = dict.fromkeys(label for group in groups for label in group.methods)
    methods = [label for label in labels if label != local]
    heads = _heads(methods)
    words, titles = [], []
    baselines = {group.judge: group.baseline for group in groups}
    blocks = numbers.groupby(["judge", "setting", "client"], sort=False)
    for (judge, setting, _), of_client in blocks:
        title = "; ".join(filter(None, [f"judge: {MODELS[judge]}", setting]))
        titles.append(f"{title}; differences to {baselines[judge]}")
        words.append(_words(of_client, methods))
    table = DataFrame(words, columns=list(heads), index=titles)
    known = table.loc[:, (table != NONE).any()]
    notes += [REDRAWN] if numbers.redrawn.any() else []
    notes += [INTERVALS] if numbers.low.notna().any() else []
    return Listing(MARK, numbers, known, heads, notes, {"notes": notes})


def _heads(methods: Sequence[str]) -> dict[str, str]:
    """The columns' heads by keys, two for each method: where a label, or the key of its
    differences, is a column's already, `method:` is before it."""
    heads = dict(HEADS)
    for label in methods:
        taken = {*heads, *heads.values()}
        mean, difference = (
            f"method:{key}" if key in taken else key for key in (label, f"{label}-difference")
        )
        heads |= {mean: mean, difference: f"{mean}: difference"}
    return heads


def _numbers(group: Group, alone: Any) -> Iterable[dict[str, Any]]:
    """A row for each setting, client and method; a client is there with the seeds with which it was
    scored."""
    splits = [
        (run.setting, int(row["client"]), row)
        for run in group.runs.itertuples()
        for row in run.run.rows("split")
    ]
    scores = tidy(group.runs)
    baseline = scores[scores.method == group.baseline]
    keys = ["setting", "client", "seed"]
    scores = scores.join(baseline.set_index(keys).value.rename("theirs"), on=keys)
    order = {setting: place for place, setting in enumerate(group.settings)}
    methods = {label: place for place, label in enumerate(group.methods)}
    scores = scores.assign(at=scores.setting.map(order), place=scores.method.map(methods))
    by_client = scores.groupby(["at", "client", "place"])
    for _, rows in by_client:
        method, setting, client = rows.method.iloc[0], rows.setting.iloc[0], rows.client.iloc[0]
        known = [row for at, number, row in splits if (at, number) == (setting, client)]
        rows = rows.sort_values("seed")
        pairs = (rows.value - rows.theirs).dropna() if method != group.baseline else rows.value[:0]
        low, high, *_ = statistics.of_means(pairs.to_numpy()) or (None, None)
        yield {
            "judge": group.judge,
            "setting": setting,
            "client": int(client),
            "name": str(known[0].get("name", client) if known else client),
            "train_samples": sorted({int(row["train_samples"]) for row in known}),
            "test_samples": sorted({int(row["test_samples"]) for row in known}),
            "redrawn": any(row != known[0] for row in known),
            "method": method,
            "seeds": len(rows),
            "alone": alone.get((setting, client)),
            "mean": float(rows.value.mean()),
            "baseline": group.baseline if len(pairs) else None,
            "difference": float(pairs.mean()) if len(pairs) else None,
            "low": low,
            "high": high,
        }


def _words(of_client: DataFrame, methods: Sequence[str]) -> list[str]:
    """A client's line, in the order of the columns."""
    first = of_client.iloc[0]
    sizes = [_span(first[f"{part}_samples"]) for part in ("train", "test")]
    words = [first["name"], *sizes, _span(sorted(set(of_client.seeds))), _percent(first.alone)]
    by_method = of_client.set_index("method")
    for label in methods:
        if label not in by_method.index:
            words += [NONE, NONE]
            continue
        row = by_method.loc[label]
        ends = f" [{100 * row.low:+.1f}, {100 * row.high:+.1f}]" if row.low == row.low else ""
        difference = f"{100 * row.difference:+.1f}{ends}"
        words += [_percent(row["mean"]), difference if row.difference == row.difference else NONE]
    return words


def _span(counts: Sequence[int]) -> str:
    """So many samples or seeds, or from so many to so many."""
    return "-".join(map(str, dict.fromkeys([counts[0], counts[-1]]))) if counts else NONE


def _percent(score: float) -> str:
    return f"{100 * score:.1f}" if score == score else NONE
