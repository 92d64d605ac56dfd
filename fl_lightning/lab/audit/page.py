"""`audit.json`, `audit.csv` and `audit.html`: the same rows three times. The page needs no script
and no network."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pandas import DataFrame

from fl_lightning import __version__
from fl_lightning.lab.audit.attacks import Finding
from fl_lightning.lab.audit.claims import Claim
from fl_lightning.lab.report.page import template
from fl_lightning.lab.study.listing import records

MARKER = '<meta name="generator" content="fl-train audit'
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
"""Beginnings of attacks whose interval is what permutations give."""


def as_json(rows: Sequence[Finding], claims: dict[str, Claim]) -> str:
    """Rows, and what is claimed by method; what is not a number is null."""
    content = {
        "version": __version__,
        "rows": records(_table(rows)),
        "claims": {method: claim.as_json() for method, claim in claims.items()},
    }
    return json.dumps(content, indent=1) + "\n"


def as_csv(rows: Sequence[Finding]) -> str:
    """One line for each row; what is not a number is empty."""
    return str(_table(rows).to_csv(index=False, lineterminator="\n"))


def as_html(
    rows: Sequence[Finding], title: str, claims: dict[str, Claim], notes: Sequence[str]
) -> str:
    """The page: a table for each attack, methods and viewers one below the other."""
    table = _table(rows)
    permuted = table.attack.str.startswith(PERMUTED)
    beyond = (table.value > table.high).where(permuted, table.low > table.chance)
    least = -1.0 * ((table.chance == 0) & table.measure.str.contains("correlation"))
    ends = table[["value", "low", "high", "chance"]]
    places = ends.clip(least, 1.0, axis=0).sub(least, axis=0).div(1 - least, axis=0) * 100
    places["width"] = (places.high - places.low).clip(lower=0.5)
    named = table.attack + table.method + table.viewer
    shown = table.join(places.round(1).add_suffix("_at")).assign(
        beyond=beyond, first=named != named.shift()
    )
    attacks = {name: shown[shown.attack == name] for name in ATTACKS if name in set(shown.attack)}
    return template("fl_lightning.lab.audit").render(
        mark=f"fl-train audit {__version__}",
        title=title,
        words=ATTACKS,
        attacks=attacks,
        claims={claim.words(method): claim.broken for method, claim in claims.items()},
        notes=notes,
    )


def _table(rows: Sequence[Finding]) -> DataFrame:
    table = DataFrame(rows, columns=list(Finding._fields))
    return table.astype(dict.fromkeys(["value", "low", "high", "chance"], float))
