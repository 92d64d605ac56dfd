"""The comparison of methods as a listing."""

from __future__ import annotations

import dataclasses
from operator import itemgetter
from typing import Any

from pandas import DataFrame, isna

from fl_lightning.foundation.metric import MODELS
from fl_lightning.lab.report.tables import known, percent, seconds
from fl_lightning.lab.report.words import NONE
from fl_lightning.lab.study.compare import Compared, Ranks
from fl_lightning.lab.study.listing import Listing

MARK = "fl-train compare"
"""Text in all written files; a file that has it may be overwritten."""


def comparison_listing(compared: Compared) -> Listing:
    """The table of a comparison as a listing, in blocks of judge and setting. Its `more`, for JSON,
    has the notes and the ranks over settings."""
    table = compared.table
    titles = []
    for row in table.itertuples():
        block = table[(table.judge == row.judge) & (table.setting == row.setting)]
        baselines = block.baseline.dropna()
        against = f"differences to {baselines.iloc[0]}" if len(baselines) else ""
        judge = f"judge: {MODELS[row.judge]}"
        titles.append(
            "; ".join(
                filter(
                    None,
                    [
                        judge,
                        row.setting,
                        against,
                    ],
                )
            )
        )
    heads = _heads(compared)
    words = DataFrame([_row_texts(row) for row in table.itertuples()], index=titles)
    notes = [line for rank in compared.ranks for line in _rank_notes(rank)] + compared.notes
    ranks = [dataclasses.asdict(rank) for rank in compared.ranks]
    more = {"ranks": ranks, "notes": compared.notes}
    return Listing(
        MARK,
        table.copy(),
        words[list(heads)],
        heads,
        notes,
        more,
        best=compared.best,
    )


def _rank_notes(rank: Ranks) -> list[str]:
    """Notes on the ranks of a judge's methods."""
    order = sorted(zip(rank.ranks, rank.methods, strict=True), key=itemgetter(0))
    places = ", ".join(f"{method} {place:.2f}" for place, method in order)
    cliques = "; ".join(" = ".join(clique) for clique in rank.cliques) or "none"
    return [
        f"{MODELS[rank.judge]}: Friedman over {rank.settings} settings: chi-square "
        f"{rank.chi_square:.2f}, p {rank.p:.2g}",
        f"{MODELS[rank.judge]}: mean ranks: {places}; alike by pairwise Wilcoxon-Holm: {cliques}",
    ]


def _heads(compared: Compared) -> dict[str, str]:
    """Heads of the columns, by key."""
    to = "" if compared.target is None else f" to {percent(compared.target)}"
    heads = {
        "method": "method",
        "seeds": "seeds",
        "mean": "mean ± std",
        "worst_tenth": "worst 10 %",
        "harmed": "harmed",
        "difference": "difference",
        "interval": "95 % interval",
        "p": "p (Holm)",
        "wins": "win/tie/loss",
        "mib": f"MiB{to}",
        "time": f"time{to}",
    }
    if compared.table.channel_seconds.notna().any():
        heads["channel"] = f"channel{to}"
    if compared.table.chosen.notna().any():
        heads["chosen"] = "chosen"
    return heads


def _row_texts(row: Any) -> dict[str, str]:
    """A row as texts, by column."""
    std_text = "" if isna(row.std) else f" ± {100 * row.std:.2f}"
    costs = {
        "mib": known(row.mib, "{:,.1f}".format),
        "time": known(row.seconds, seconds),
        "channel": known(row.channel_seconds, seconds),
    }
    if not isna(row.reached) and row.reached < row.runs:
        costs = dict.fromkeys(costs, NONE) | {"mib": f"{row.reached} of {row.runs} reached"}
    interval = f"[{100 * row.low:+.2f}, {100 * row.high:+.2f}]"
    return costs | {
        "method": row.method,
        "seeds": str(row.seeds),
        "mean": known(row.mean, "{:.2f}".format, 0.01) + std_text,
        "worst_tenth": known(row.worst_tenth, "{:.2f}".format, 0.01),
        "harmed": known(row.harmed, "{:.0%}".format),
        "difference": known(
            row.difference,
            "{:+.2f}".format,
            0.01,
        )
        + row.star,
        "interval": NONE if isna(row.low) else interval,
        "p": known(row.p_holm, "{:.3g}".format),
        "wins": NONE if isna(row.wins) else f"{row.wins}/{row.ties}/{row.losses}",
        "chosen": NONE if isna(row.chosen) else row.chosen,
    }
