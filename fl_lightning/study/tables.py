"""A comparison as a sheet, which is then written in one of its forms."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from fl_lightning.metric import MODELS
from fl_lightning.report.tables import known, percent, seconds
from fl_lightning.report.words import NONE
from fl_lightning.study.compare import Compared, Ranks, Row
from fl_lightning.study.sheet import Block, Sheet, Span

MARK = "fl-train compare"
"""In all that is written: a file that has it may be written over."""


def sheet_of(compared: Compared) -> Sheet:
    """A block for each judge and setting; JSON has the ranks over settings, too."""
    blocks = [
        Block(
            _title(judge, setting, rows), [_cells(row, compared) for row in rows], [_span(row) for row in rows],
            compared.best.get((judge, setting), ""),
        )
        for (judge, setting), rows in _blocks(compared)
    ]  # fmt: skip
    head = _head(compared)
    records = [_record(row, compared) for row in compared.rows]
    more = {"ranks": [dataclasses.asdict(rank) for rank in compared.ranks], "notes": compared.notes}
    return Sheet(MARK, [*head.values()], blocks, lines(compared), records, more, keys=[*head])


def lines(compared: Compared) -> list[str]:
    """What is said below the table."""
    return [line for rank in compared.ranks for line in _ranked(rank)] + compared.notes


def _ranked(rank: Ranks) -> list[str]:
    order = sorted(range(len(rank.methods)), key=lambda k: rank.ranks[k])
    places = ", ".join(f"{rank.methods[k]} {rank.ranks[k]:.2f}" for k in order)
    alike = "; ".join(" = ".join(clique) for clique in rank.cliques) or "none"
    friedman = f"Friedman over {rank.settings} settings: chi-square {rank.chi_square:.2f}, p {rank.p:.2g}"
    means = f"mean ranks: {places}; alike by pairwise Wilcoxon-Holm: {alike}"
    return [f"{MODELS[rank.judge]}: {friedman}", f"{MODELS[rank.judge]}: {means}"]


def _blocks(compared: Compared) -> list[tuple[tuple[str, str], list[Row]]]:
    groups = itertools.groupby(compared.rows, key=lambda row: (row.judge, row.setting))
    return [(key, list(rows)) for key, rows in groups]


def _title(judge: str, setting: str, rows: list[Row]) -> str:
    against = next((f"differences to {row.baseline}" for row in rows if row.baseline), "")
    return "; ".join(filter(None, [f"judge: {MODELS[judge]}", setting, against]))


def _head(compared: Compared) -> dict[str, str]:
    """The columns' words by their keys."""
    to = "" if compared.target is None else f" to {percent(compared.target)}"
    channel = {"channel": f"channel{to}"} if any(row.channel_seconds is not None for row in compared.rows) else {}
    return {
        "method": "method", "seeds": "seeds", "mean": "mean ± std", "worst_tenth": "worst 10 %", "harmed": "harmed",
        "difference": "difference", "interval": "95 % interval", "p": "p (Holm)", "wins": "win/tie/loss",
        "mib": f"MiB{to}", "time": f"time{to}", **channel, **({"chosen": "chosen"} if _tuned(compared) else {}),
    }  # fmt: skip


def _cells(row: Row, compared: Compared) -> list[str]:
    """In the order of `_head`."""
    spread = "" if row.std is None else f" ± {100 * row.std:.2f}"
    met = row.reached is None or row.reached == row.runs
    costs = [known(row.mib, lambda mib: f"{mib:,.1f}"), known(row.seconds, seconds)]
    if any(other.channel_seconds is not None for other in compared.rows):
        costs.append(known(row.channel_seconds, seconds))
    span = NONE if row.low is None or row.high is None else f"[{100 * row.low:+.2f}, {100 * row.high:+.2f}]"
    return [
        row.method, str(row.seeds), known(row.mean, lambda mean: f"{100 * mean:.2f}{spread}"),
        known(row.worst_tenth, lambda worst: f"{100 * worst:.2f}"), known(row.harmed, lambda share: f"{share:.0%}"),
        known(row.difference, lambda points: f"{100 * points:+.2f}{row.star}"), span,
        known(row.p_holm, lambda p: f"{p:.3g}"),
        NONE if row.wins is None else f"{row.wins}/{row.ties}/{row.losses}",
        *(costs if met else [f"{row.reached} of {row.runs} reached", *[NONE] * (len(costs) - 1)]),
        *([row.chosen or NONE] if _tuned(compared) else []),
    ]  # fmt: skip


def _tuned(compared: Compared) -> bool:
    """Whether a search has chosen values for any row."""
    return any(row.chosen for row in compared.rows)


def _span(row: Row) -> Span | None:
    """The interval of the difference, in points."""
    if row.low is None or row.high is None or row.difference is None:
        return None
    return 100 * row.low, 100 * row.difference, 100 * row.high


def _record(row: Row, compared: Compared) -> dict[str, Any]:
    return {**dataclasses.asdict(row), "star": row.star, "target": compared.target}
