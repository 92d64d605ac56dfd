"""A comparison as a sheet, which is then written in one of its forms."""

from __future__ import annotations

import dataclasses

from fl_lightning.foundation.metric import MODELS
from fl_lightning.lab.report.tables import known, percent, seconds
from fl_lightning.lab.report.words import NONE
from fl_lightning.lab.study.compare import Compared, Ranks, Row
from fl_lightning.lab.study.grid import by_key
from fl_lightning.lab.study.sheet import Block, Sheet, Span

MARK = "fl-train compare"
"""In all that is written: a file that has it may be written over."""


def sheet_of(compared: Compared) -> Sheet:
    """A block for each judge and setting; JSON has the ranks over settings, too."""
    head, blocks = _head(compared), []
    for (judge, setting), rows in by_key(
        compared.rows, lambda row: (row.judge, row.setting)
    ).items():
        against = next((f"differences to {row.baseline}" for row in rows if row.baseline), "")
        title = "; ".join(filter(None, [f"judge: {MODELS[judge]}", setting, against]))
        cells = [[text[key] for key in head] for text in map(_cells, rows)]
        blocks.append(
            Block(title, cells, [*map(_span, rows)], compared.best.get((judge, setting), ""))
        )
    lines = [line for rank in compared.ranks for line in _ranked(rank)] + compared.notes
    records = [
        {**dataclasses.asdict(row), "star": row.star, "target": compared.target}
        for row in compared.rows
    ]
    more = {"ranks": [dataclasses.asdict(rank) for rank in compared.ranks], "notes": compared.notes}
    return Sheet(MARK, [*head.values()], blocks, lines, records, more, keys=[*head])


def _ranked(rank: Ranks) -> list[str]:
    order = sorted(range(len(rank.methods)), key=lambda k: rank.ranks[k])
    places = ", ".join(f"{rank.methods[k]} {rank.ranks[k]:.2f}" for k in order)
    alike = "; ".join(" = ".join(clique) for clique in rank.cliques) or "none"
    friedman = (
        f"Friedman over {rank.settings} settings: chi-square {rank.chi_square:.2f}, p {rank.p:.2g}"
    )
    means = f"mean ranks: {places}; alike by pairwise Wilcoxon-Holm: {alike}"
    return [f"{MODELS[rank.judge]}: {friedman}", f"{MODELS[rank.judge]}: {means}"]


def _head(compared: Compared) -> dict[str, str]:
    """The columns' words by their keys."""
    to = "" if compared.target is None else f" to {percent(compared.target)}"
    channel = (
        {"channel": f"channel{to}"}
        if any(row.channel_seconds is not None for row in compared.rows)
        else {}
    )
    chosen = {"chosen": "chosen"} if any(row.chosen for row in compared.rows) else {}
    return {
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
        **channel,
        **chosen,
    }


def _cells(row: Row) -> dict[str, str]:
    """By the columns' keys."""
    spread = "" if row.std is None else f" ± {100 * row.std:.2f}"
    costs = {
        "mib": known(row.mib, lambda mib: f"{mib:,.1f}"),
        "time": known(row.seconds, seconds),
        "channel": known(row.channel_seconds, seconds),
    }
    if row.reached not in (None, row.runs):
        costs = dict.fromkeys(costs, NONE) | {"mib": f"{row.reached} of {row.runs} reached"}
    return costs | {
        "method": row.method,
        "seeds": str(row.seeds),
        "mean": known(row.mean, lambda mean: f"{100 * mean:.2f}{spread}"),
        "worst_tenth": known(row.worst_tenth, lambda worst: f"{100 * worst:.2f}"),
        "harmed": known(row.harmed, lambda share: f"{share:.0%}"),
        "difference": known(row.difference, lambda points: f"{100 * points:+.2f}{row.star}"),
        "interval": NONE
        if row.low is None or row.high is None
        else f"[{100 * row.low:+.2f}, {100 * row.high:+.2f}]",
        "p": known(row.p_holm, lambda p: f"{p:.3g}"),
        "wins": NONE if row.wins is None else f"{row.wins}/{row.ties}/{row.losses}",
        "chosen": row.chosen or NONE,
    }


def _span(row: Row) -> Span | None:
    """The interval of the difference, in points."""
    if row.low is None or row.high is None or row.difference is None:
        return None
    return 100 * row.low, 100 * row.difference, 100 * row.high
