"""`audit.json`, `audit.csv` and `audit.html`: the same rows three times. The page needs no script
and no network."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import Any

from fl_lightning import __version__
from fl_lightning.lab.audit.attacks import Row
from fl_lightning.lab.audit.claims import Claim

MARKER = '<meta name="generator" content="fl-train audit'
STYLE = """
*{box-sizing:border-box}
body{margin:0;color:#1d2430;background:#fff;font:16px/1.5 system-ui,"Segoe UI",Roboto,Arial,sans-serif}
main{max-width:88rem;margin:0 auto;padding:1.5rem 1rem 4rem}
h1{font-size:clamp(1.5rem,1rem + 2vw,2.3rem);line-height:1.2}
h2{font-size:1.25rem;margin:2.4rem 0 .4rem}p{max-width:48rem;margin:.4rem 0}.note{color:#5a6474;font-size:.92rem}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.92rem;font-variant-numeric:tabular-nums;width:100%}
th,td{padding:.3rem .7rem;border-bottom:1px solid #dde2e8;text-align:left;white-space:nowrap}.n{text-align:right}
.bar{width:clamp(5rem,12vw,14rem);position:relative;height:1.1rem;background:#f1f3f6}
.bar i{position:absolute;display:block}
.range{top:.3rem;height:.5rem;background:#8fb3c2}.dot{top:.1rem;width:.25rem;height:.9rem;background:#1f6f8b}
.guess{top:0;bottom:0;border-left:2px dotted #8b95a3}
.again{color:#a9b2be}.first td{border-top:2px solid #b9c2cd}
.false{color:#b3261e;font-weight:700}
.much .dot{background:#b3261e}.much .v{color:#b3261e;font-weight:700}
@media(max-width:80rem){th,td{padding:.3rem .45rem}}
@media(max-width:44rem){main{padding:1rem .6rem}th,td{padding:.3rem .2rem;white-space:normal;font-size:.8rem}
:is(th,td):nth-child(6){white-space:nowrap;font-size:.72rem}.again{font-size:0}
:is(th,td):is(:nth-child(5),:nth-child(n+7)){display:none}}
"""  # noqa: E501
MEAN = (
    "The same by an attacker who saw the models of several rounds, on the mean of a sample's "
    "confidence over them."
)
RISE = (
    "The same by an attacker who saw several rounds, on how a sample's confidence rose from the "
    "first to the last."
)
ATTACKS = {
    "LiRA": "Was a sample trained on? Online LiRA over the study's runs: each sample was trained "
    "on in "
    "some, and only "
    "tested on in others. Intervals of 95 % are bootstraps over samples, not over runs.",
    "LiRA, mean over rounds": MEAN,
    "LiRA, rise over rounds": RISE,
    "loss threshold": "Was a sample trained on? Its loss under one model, training against test "
    "samples of the "
    "same "
    "client. Intervals of 95 % are bootstraps over samples.",
    "loss threshold, mean over rounds": MEAN,
    "loss threshold, rise over rounds": RISE,
    "who shares a group": "Do weights of the last round's relation tell which clients share a "
    "planted group? The "
    "interval is what 95 % of permutations of the clients give.",
    "how alike label mixes are": "Do weights of the last round's relation follow how alike label "
    "mixes are? The "
    "interval is what 95 % of permutations of the clients give.",
    "label mix from the classifier's bias": "Do the biases of an uploaded classifier follow how "
    "often the client has "
    "each class? The interval is what 95 % of permutations of the clients give.",
}
"""What each attack asks, in words."""
PERMUTED = ("who", "how", "label")


def as_json(rows: Sequence[Row], claims: dict[str, Claim]) -> str:
    """Rows, and what is claimed by method; what is not a number is null."""
    plain = [
        {k: None if _odd(v) else v for k, v in dataclasses.asdict(row).items()} for row in rows
    ]
    content = {
        "version": __version__,
        "rows": plain,
        "claims": {k: claim.as_json() for k, claim in claims.items()},
    }
    return json.dumps(content, indent=1) + "\n"


def as_csv(rows: Sequence[Row]) -> str:
    """One line for each row; what is not a number is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in dataclasses.fields(Row)])
    writer.writerows(["" if _odd(v) else v for v in dataclasses.astuple(row)] for row in rows)
    return text.getvalue()


def as_html(rows: Sequence[Row], title: str, claims: dict[str, Claim], notes: Sequence[str]) -> str:
    """The page: a table for each attack, methods and viewers one below the other."""
    order = {attack: k for k, attack in enumerate(ATTACKS)}
    parts = []
    for attack, group in groupby(
        sorted(rows, key=lambda row: order[row.attack]), key=lambda row: row.attack
    ):
        listed = list(group)
        firsts = [
            k == 0 or (a.method, a.viewer) != (b.method, b.viewer)
            for k, (a, b) in enumerate(zip(listed, listed[:1] + listed, strict=False))
        ]
        lines = "".join(map(_line, listed, firsts))
        head = "<tr><th>method</th><th>viewer</th><th>measure</th><th class=n>value</th><th></th>"
        head += (
            "<th class=n>95 %</th><th class=n>chance</th><th class=n>of</th><th class=n>runs</th>"
        )
        head += "<th class=n>rounds</th></tr>"
        parts.append(
            f"<h2>{escape(attack)}</h2><p>{escape(ATTACKS[attack])}</p>"
            f'<div class="wide"><table>{head}{lines}</table></div>'
        )
    claimed = "".join(
        f"<p{' class=false' * c.broken}>{escape(c.words(m))}.</p>" for m, c in claims.items()
    )
    more = "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{MARKER} {__version__}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Audit of {escape(title)}</title><style>{STYLE}</style></head><body><main>"
        f"<h1>What {escape(title)} tells of its clients</h1>"
        '<p class="note">Measured, not guaranteed: a stronger attack may learn more. Red: the '
        "interval lies beyond "
        f"chance.</p>{claimed}{more}{''.join(parts)}</main></body></html>\n"
    )


def _line(row: Row, first: bool) -> str:
    """A row of a table; `first`: of its method and viewer."""
    low, high = row.low, row.high
    beyond = (row.value > high) if row.attack.startswith(PERMUTED) else (low > row.chance)
    least, most = (-1.0, 1.0) if row.chance == 0 and "correlation" in row.measure else (0.0, 1.0)

    def at(x: float) -> float:
        return 100 * (min(max(x, least), most) - least) / (most - least)

    bar = f'<i class="guess" style="left:{at(row.chance):.1f}%"></i>'
    if not _odd(low):
        bar += (
            f'<i class="range" '
            f'style="left:{at(low):.1f}%;width:{max(at(high) - at(low), 0.5):.1f}%"></i>'
        )
    if not _odd(row.value):
        bar += f'<i class="dot" style="left:{at(row.value):.1f}%"></i>'
    interval = "" if _odd(low) else f"{low:.3f} to {high:.3f}"
    again = "" if first else " class=again"
    return (
        f"<tr class='{'much' * beyond} {'first' * first}'><td{again}>{escape(row.method)}</td>"
        f"<td{again}>{escape(row.viewer)}</td>"
        f"<td>{escape(row.measure)}</td><td class='n v'>{_number(row.value)}</td><td><div "
        f"class=bar>{bar}</div></td>"
        f"<td class=n>{interval}</td><td class=n>{row.chance:g}</td><td "
        f"class=n>{row.samples:,}</td>"
        f"<td class=n>{row.runs}</td><td class=n>{row.rounds}</td></tr>"
    )


def _number(value: float) -> str:
    return "" if _odd(value) else f"{value:.3f}"


def _odd(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
