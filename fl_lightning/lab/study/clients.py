"""The table of `fl-train compare --clients`: a row for each client with its samples, its scores
over seeds, and paired differences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from pandas import Categorical, DataFrame, notna

from fl_lightning.foundation.metric import MODELS
from fl_lightning.lab import statistics
from fl_lightning.lab.report.words import NONE
from fl_lightning.lab.study.groups import JudgeGroup, group_by_judge, training_alone
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
"""Heads of the first columns, by their keys on the command line."""
REDRAWN = (
    "a client has other samples with each seed (the split is drawn): its row is a mean over "
    "different data"
)
"""Note if the split differs between seeds."""


def clients_listing(runs: DataFrame, baseline: str | None = None) -> Listing:
    """The table of clients: a row for each client, in a block for each judge and setting.

    Args:
        runs: the table of runs (`scores.read`).
        baseline: label of the method to compare with; None: training alone. Under a judge without
            runs of that method, the baseline is training alone, else the judge's first method.

    Raises:
        BadInput: no method has the label `baseline`, or methods of a setting and seed scored
            different clients.
    """
    groups, notes = group_by_judge(runs, baseline)
    local = training_alone(runs)
    of_local = tidy(runs[runs.method == local])
    alone = of_local.groupby(["setting", "client"]).value.mean()
    numbers = DataFrame([row for group in groups for row in _numbers(group, alone)])
    numbers = numbers.astype(
        dict.fromkeys(
            [
                "alone",
                "difference",
                "low",
                "high",
            ],
            float,
        )
    )
    labels = dict.fromkeys(label for group in groups for label in group.methods)
    methods = [label for label in labels if label != local]
    heads = _heads(methods)
    baselines = {group.judge: group.baseline for group in groups}
    words, titles = [], []
    clients = numbers.groupby(["judge", "setting", "client"], sort=False)
    for (judge, setting, _), of_client in clients:
        parts = [
            f"judge: {MODELS[judge]}",
            setting,
            f"differences to {baselines[judge]}",
        ]
        titles.append("; ".join(filter(None, parts)))
        words.append(_row_texts(of_client, methods))
    table = DataFrame(words, columns=list(heads), index=titles)
    with_values = table.loc[:, (table != NONE).any()]
    if numbers.redrawn.any():
        notes.append(REDRAWN)
    if numbers.low.notna().any():
        notes.append(INTERVALS)
    return Listing(
        MARK,
        numbers,
        with_values,
        heads,
        notes,
        {"notes": notes},
    )


def _heads(methods: Sequence[str]) -> dict[str, str]:
    """The columns' heads by key, two columns for each method. A label or key that another column
    has gets the prefix `method:`."""
    heads = dict(HEADS)
    for label in methods:
        used = {*heads, *heads.values()}
        difference = f"{label}-difference"
        mean = f"method:{label}" if label in used else label
        key = f"method:{difference}" if difference in used else difference
        heads |= {mean: mean, key: f"{mean}: difference"}
    return heads


def _numbers(
    group: JudgeGroup,
    alone: Any,
) -> Iterable[dict[str, Any]]:
    """Yield a row of numbers for each setting, client and method.

    Args:
        group: the runs of one judge.
        alone: scores of training alone, by setting and client.
    """
    splits: dict[tuple[str, int], list[Any]] = defaultdict(list)
    for run in group.runs.itertuples():
        for row in run.run.rows("split"):
            splits[run.setting, int(row["client"])].append(row)
    scores = tidy(group.runs)
    keys = ["setting", "client", "seed"]
    baseline = scores[scores.method == group.baseline].set_index(keys).value
    scores = scores.join(baseline.rename("baseline"), on=keys).sort_values("seed")
    scores["setting"] = Categorical(scores.setting, group.settings)
    scores["method"] = Categorical(scores.method, group.methods)
    by_client = scores.groupby(["setting", "client", "method"], observed=True)
    for (setting, client, method), rows in by_client:
        split = splits[setting, client]
        pairs = (rows.value - rows.baseline).dropna()
        if method == group.baseline:
            pairs = pairs.head(0)
        low, high = statistics.interval_of_mean(pairs.to_numpy()) or (None, None)
        yield {
            "judge": group.judge,
            "setting": setting,
            "client": int(client),
            "name": str(split[0].get("name", client) if split else client),
            "train_samples": sorted({int(row["train_samples"]) for row in split}),
            "test_samples": sorted({int(row["test_samples"]) for row in split}),
            "redrawn": any(row != split[0] for row in split),
            "method": method,
            "seeds": len(rows),
            "alone": alone.get((setting, client)),
            "mean": float(rows.value.mean()),
            "baseline": group.baseline if len(pairs) else None,
            "difference": float(pairs.mean()) if len(pairs) else None,
            "low": low,
            "high": high,
        }


def _row_texts(of_client: DataFrame, methods: Sequence[str]) -> list[str]:
    """A client's row as texts, in the order of the columns."""
    first_row = of_client.iloc[0]
    sizes = [_range_text(first_row[f"{part}_samples"]) for part in ("train", "test")]
    seeds = sorted(set(of_client.seeds))
    words = [first_row["name"], *sizes, _range_text(seeds), _percent(first_row.alone)]
    by_method = of_client.set_index("method")
    for label in methods:
        mean = difference = NONE
        if label in by_method.index:
            row = by_method.loc[label]
            mean = _percent(row["mean"])
            ends = f" [{100 * row.low:+.1f}, {100 * row.high:+.1f}]" if notna(row.low) else ""
            if notna(row.difference):
                difference = f"{100 * row.difference:+.1f}{ends}"
        words += [mean, difference]
    return words


def _range_text(counts: Sequence[int]) -> str:
    """The least and the greatest of ascending counts as text: `8`, or `8-12`."""
    if not counts:
        return NONE
    least, most = counts[0], counts[-1]
    return f"{least}" if least == most else f"{least}-{most}"


def _percent(score: float) -> str:
    return f"{100 * score:.1f}" if notna(score) else NONE
