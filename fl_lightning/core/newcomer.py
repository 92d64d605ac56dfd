"""Rules by which a newcomer, a client that was in no round, obtains its model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Rule:
    """Describes how a newcomer obtains its model, in a few rounds in which it is the only client.

    Args:
        description: the rule in words, for tables.
        trains: the blocks that train in the method's phases. `all`: those of any client;
            `personal`: of these only the blocks that clients do not share; `nothing`: none.
        gives: whether the server gives the newcomer a model before it trains.
        unlabelled: whether the newcomer trains on public data, so that its own samples need no
            labels.
        remembers: whether the server keeps an entry for each client that `Method.aggregate` writes
            and `Method.broadcast` reads. Each of the newcomer's rounds then also runs `aggregate`,
            on a copy of the server, in which only the newcomer's entry changes.
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
