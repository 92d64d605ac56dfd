"""Write an audit's rows as `audit.json`, `audit.csv` and `audit.html`. The page has no scripts and
opens offline."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pandas import DataFrame

from fl_lightning import __version__
from fl_lightning.lab.audit.attacks import AttackResult
from fl_lightning.lab.audit.claims import PrivacyClaim
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
BOOTSTRAPS = "Intervals of 95 % are bootstraps over samples"
PERMUTATIONS = "The interval is what 95 % of permutations of the clients give."
ATTACKS = {
    "LiRA": "Was a sample trained on? Online LiRA over the study's runs: each sample was trained "
    f"on in some, and only tested on in others. {BOOTSTRAPS}, not over runs.",
    "LiRA, mean over rounds": MEAN,
    "LiRA, rise over rounds": RISE,
    "loss threshold": "Was a sample trained on? Its loss under one model, training against test "
    f"samples of the same client. {BOOTSTRAPS}.",
    "loss threshold, mean over rounds": MEAN,
    "loss threshold, rise over rounds": RISE,
    "who shares a group": "Do weights of the last round's relation tell which clients share a "
    f"planted group? {PERMUTATIONS}",
    "how alike label mixes are": "Do weights of the last round's relation follow how alike label "
    f"mixes are? {PERMUTATIONS}",
    "label mix from the classifier's bias": "Do the biases of an uploaded classifier follow how "
    f"often the client has each class? {PERMUTATIONS}",
}
"""Question and method of each attack, in words."""
PERMUTED = ("who", "how", "label")
"""Beginnings of the names of attacks whose interval comes from permutations."""


def as_json(rows: Sequence[AttackResult], claims: dict[str, PrivacyClaim]) -> str:
    """Format rows, and claims by method; NaN becomes null."""
    content = {
        "version": __version__,
        "rows": records(_table(rows)),
        "claims": {method: claim.as_json() for method, claim in claims.items()},
    }
    return json.dumps(content, indent=1) + "\n"


def as_csv(rows: Sequence[AttackResult]) -> str:
    """Format one line for each row; NaN becomes an empty cell."""
    return str(_table(rows).to_csv(index=False, lineterminator="\n"))


def as_html(
    rows: Sequence[AttackResult],
    title: str,
    claims: dict[str, PrivacyClaim],
    notes: Sequence[str],
) -> str:
    """Render the page: a table for each attack, in which rows better than chance are marked.

    Args:
        rows: results of the attacks.
        title: name of the run or study.
        claims: privacy claims by method.
        notes: sentences on attacks that were not possible.
    """
    table = _table(rows)
    # better than chance: above the permutations' interval, or with a bootstrap interval above it
    is_permuted = table.attack.str.startswith(PERMUTED)
    beyond = (table.value > table.high).where(is_permuted, table.low > table.chance)
    heading = table.attack + table.method + table.viewer
    shown = table.join(_places(table)).assign(beyond=beyond, first=heading != heading.shift())
    attacks = {name: shown[shown.attack == name] for name in ATTACKS if name in set(shown.attack)}
    return template("fl_lightning.lab.audit").render(
        mark=f"fl-train audit {__version__}",
        title=title,
        words=ATTACKS,
        attacks=attacks,
        claims={claim.sentence(method): claim.broken for method, claim in claims.items()},
        notes=notes,
    )


def _places(table: DataFrame) -> DataFrame:
    """Place values on each row's bar, in percent from the left; the bar goes from 0 to 1, for
    correlations from -1 to 1."""
    start = -1.0 * ((table.chance == 0) & table.measure.str.contains("correlation"))
    numbers = table[["value", "low", "high", "chance"]].clip(
        start,
        1.0,
        axis=0,
    )
    percents = numbers.sub(start, axis=0).div(1 - start, axis=0) * 100
    percents["width"] = (percents.high - percents.low).clip(lower=0.5)
    return percents.round(1).add_suffix("_at")


def _table(rows: Sequence[AttackResult]) -> DataFrame:
    table = DataFrame(rows, columns=list(AttackResult._fields))
    return table.astype(
        dict.fromkeys(
            [
                "value",
                "low",
                "high",
                "chance",
            ],
            float,
        )
    )
