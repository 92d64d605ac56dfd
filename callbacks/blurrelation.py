"""Defences of a relation: its rows are changed before the server mixes by them, sends the mixes and
logs them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from fl_lightning.callbacks.base import Observer, Transform
from fl_lightning.configuration.config import check
from fl_lightning.configuration.ranges import PositiveFloat, PositiveInt, Range
from fl_lightning.core import RoundRecord, RunContext
from fl_lightning.foundation.rng import generator


def blurred(
    rows: Tensor,
    own: Tensor,
    decimals: int | None,
    noise: Tensor | None,
    top: int | None,
) -> Tensor:
    """Rows with the own weight and the sum that they had, and others' weights noised, then thinned
    out, then rounded.

    Negative weights count as 0. Where nothing of a row's others is left, all of them have the same
    weight.

    Args:
        rows: (L, m, n), float64.
        own: whether a weight is the receiver's own, bool (m, n).
        decimals: others' weights are rounded to so many; None: not.
        noise: is added to them, (L, m, n); None: none is.
        top: so many of them, the greatest, stay (of equals the first), and the rest become 0; None:
            all stay.

    Returns:
        Shape (L, m, n).
    """
    others = rows if noise is None else rows + noise
    others = torch.where(own, 0.0, others).clamp_min(0.0)
    if top is not None and top < rows.shape[-1]:
        order = others.sort(dim=-1, descending=True, stable=True).indices
        others = others.scatter(-1, order[..., top:], 0.0)
    if decimals is not None:
        others = others.round(decimals=decimals)
    mass = others.sum(-1, keepdim=True)
    equal = (~own).to(rows)
    equal_shares = equal / equal.sum(-1, keepdim=True)
    shares = torch.where(mass > 0, others / mass, equal_shares)
    former_mass = torch.where(own, 0.0, rows).sum(-1, keepdim=True)
    return torch.where(own, rows, shares * former_mass)


@dataclass
class BlurRelation(Transform, Observer):
    """Before the server mixes by a relation and logs it: round others' weights, add noise, keep the
    greatest.

    The method computes its relation as always, and what it learns of it stays exact. A client's
    weight of its own stays, and so does the sum of the others'. In this order: noise, then `top`,
    then `decimals`. Clients that receive mixes, and readers of the logged relation, see the changed
    rows; the server, which computes it, knows it.

    Args:
        decimals: to which others' weights are rounded, before they are brought to their sum again.
            null: not rounded.
        noise: standard deviation of Gaussian noise on each weight of another client, anew in each
            round, for each layer; a row sums to 1. It is drawn for (seed, round, receiver). null:
            none.
        top: how many other clients a row keeps, those of the greatest weights. null: all.
    """

    decimals: Annotated[int, Range(0, 15)] | None = None
    noise: PositiveFloat | None = None
    top: PositiveInt | None = None
    _seed = 0
    _used = False

    def __post_init__(self) -> None:
        super().__post_init__()
        is_set = any(value is not None for value in (self.decimals, self.noise, self.top))
        check(self.config_key, ..., is_set, "give one of decimals, noise and top")

    def on_fit_start(self, run: RunContext) -> None:
        """Raise `BadInput` where there is no relation to change, or two would change it; from now
        on this one does."""
        relation = run.relation
        key = self.config_key
        why = relation.fixed
        if relation.is_global:
            why = "all clients of this method receive the same"
        requirement = f"it changes a relation, and {why}; choose another --method, such as kapc"
        check(key, run.method_name, not why, requirement)
        count = sum(isinstance(callback, BlurRelation) for callback in run.callbacks)
        check(
            key,
            f"{count} times",
            count == 1,
            "only one callback may change the relation",
        )
        share = run.config.data.held_out_clients
        requirement = f"{key} does not cover clients that join: set it to 0"
        check("data.held_out_clients", share, not share, requirement)
        relation.blur = self._changed
        self._seed = run.config.seed

    def _changed(
        self,
        rows: Tensor,
        receivers: Sequence[int],
        sources: Sequence[int],
        round: int,
    ) -> Tensor:
        """The rows (L, m, n) of `receivers` by `sources`, as they are mixed by in `round`."""
        self._used = True
        is_own = torch.tensor(receivers)[:, None] == torch.tensor(sources, dtype=torch.int64)
        noise = None
        if self.noise is not None:
            drawn = []
            for client in receivers:
                draws = generator(self._seed, "noise of the relation", round, client)
                drawn.append(torch.randn(rows[:, 0].shape, generator=draws, dtype=rows.dtype))
            noise = self.noise * torch.stack(drawn, 1)
        return blurred(
            rows,
            is_own,
            self.decimals,
            noise,
            self.top,
        )

    def on_round_end(
        self,
        run: RunContext,
        record: RoundRecord,
    ) -> None:
        """Raise `BadInput` where the method has passed the changed rows by."""
        requirement = "its server mixes by rows of its own, past its relation's (`mix_by`)"
        check(self.config_key, run.method_name, self._used, requirement)
