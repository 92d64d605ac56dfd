"""What a method gives a client that has been in no round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Rule:
    """How a newcomer comes to its model. It takes part in a few rounds, alone, while the federation
    pauses.

    Args:
        says: in words, as tables name it.
        trains: `all`: as the method's clients do; `personal`: the blocks that clients do not
            share; `nothing`.
        gives: whether there is a model for it before it has trained one.
        unlabelled: whether it trains on public data, so that it comes to a model without labels.
        remembers: whether `Method.aggregate` keeps something of each client that `Method.broadcast`
            goes by; it then runs on a copy of the server, of which only what concerns the newcomer
            stays.
    """

    says: str
    trains: Literal["all", "personal", "nothing"] = "all"
    gives: bool = True
    unlabelled: bool = False
    remembers: bool = False


GLOBAL = Rule("global model, then local training")
PERSONAL = Rule("global part; the personal part is trained under it", "personal")
MIX = Rule("own mix of all models, then local training")
ALONE = Rule("own training only", gives=False)
