"""Rules by which a newcomer, a client that was in no round, obtains its model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Rule:
    """How a newcomer obtains its model. It takes part in a few rounds in which no other client
    does.

    Args:
        description: the rule in words, for tables.
        trains: `all`: the method's phases; `personal`: the blocks that clients do not share;
            `nothing`.
        gives: whether the newcomer receives a model before it trains.
        unlabelled: whether the newcomer trains on public data, so that it needs no labels.
        remembers: whether `Method.aggregate` stores data of each client that `Method.broadcast`
            reads. The newcomer's rounds then include `aggregate` on a copy of the server, which
            keeps the other clients' entries unchanged.
    """

    description: str
    trains: Literal["all", "personal", "nothing"] = "all"
    gives: bool = True
    unlabelled: bool = False
    remembers: bool = False


GLOBAL = Rule("global model, then local training")
PERSONAL = Rule("global part; the personal part is trained under it", "personal")
MIX = Rule("own mix of all models, then local training")
ALONE = Rule("own training only", gives=False)
