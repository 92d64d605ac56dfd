"""Blurring of a relation, so that mixes and logs reveal less of it."""

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
    """Return rows in which others' weights have been changed: noise is added, then only the `top`
    greatest are kept, then weights are rounded.

    The receiver's own weight and the sum of the others' weights stay as they were: after rounding,
    weights are scaled back to that sum (so only their ratios are rounded). Negative weights count
    as 0. If all others' weights become 0, they get equal shares of the sum.

    Args:
        rows: (L, m, n), float64.
        own: bool (m, n), true where a weight is the receiver's own.
        decimals: number of decimals to which others' weights are rounded; None: no rounding.
        noise: added to others' weights, (L, m, n); None: no noise.
        top: number of others' weights that are kept, the greatest (of equal ones the first); None:
            all.

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
    """Blurs the relation before the server mixes by it and logs it: adds noise to others' weights,
    keeps the greatest, rounds them.

    The changes are made in this order: noise, `top`, `decimals`. A client's own weight and the sum
    of the others' stay the same. A relation that learns continues from its exact rows. Clients,
    which receive mixes, and readers of the logged relation see only the blurred rows; the server
    knows the exact ones.

    Args:
        decimals: number of decimals to which others' weights are rounded, before they are scaled
            back to their sum. null: no rounding.
        noise: standard deviation of Gaussian noise on each weight of another client, where a row
            sums to 1; drawn for each layer from (seed, round, receiver). null: no noise.
        top: number of other clients that keep a weight in a row: those of the greatest weights.
            null: all.
    """

    decimals: Annotated[int, Range(0, 15)] | None = None
    noise: PositiveFloat | None = None
    top: PositiveInt | None = None
    _seed = 0
    _used = False

    def __post_init__(self) -> None:
        super().__post_init__()
        is_set = any(value is not None for value in (self.decimals, self.noise, self.top))
        check(self.config_key, ..., is_set, "give at least one of decimals, noise and top")

    def on_fit_start(self, run: RunContext) -> None:
        """Install this callback as the one that changes the relation; raise `BadInput` if the
        relation cannot be changed, or another callback would change it too."""
        relation = run.relation
        key = self.config_key
        why = "all its clients receive the same" if relation.is_global else relation.fixed
        problem = f"the method's relation cannot be changed, since {why}"
        requirement = f"{problem}; choose another --method, such as kapc"
        check(key, run.method_name, not why, requirement)
        count = sum(isinstance(callback, BlurRelation) for callback in run.callbacks)
        requirement = f"{count} callbacks of this kind would change the relation; keep one"
        check(key, ..., count == 1, requirement)
        share = run.config.data.held_out_clients
        requirement = f"{key} does not cover clients that join; set it to 0"
        check(
            "data.held_out_clients",
            share,
            not share,
            requirement,
        )
        relation.blur = self._blurred
        self._seed = run.config.seed

    def _blurred(
        self,
        rows: Tensor,
        receivers: Sequence[int],
        sources: Sequence[int],
        round: int,
    ) -> Tensor:
        """Return the blurred rows (L, m, n) of `receivers` by `sources` in `round`."""
        self._used = True
        is_own = torch.tensor(receivers)[:, None] == torch.tensor(sources, dtype=torch.int64)
        noise = None
        if self.noise is not None:
            drawn = []
            for client in receivers:
                draws = generator(
                    self._seed,
                    "noise of the relation",
                    round,
                    client,
                )
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
        """Raise `BadInput` if the method has not mixed by the blurred rows in this round: a method
        that passes rows of its own to `mix_by` cannot be blurred."""
        problem = "its server mixes by rows of its own (`mix_by`), which are not blurred"
        requirement = f"{problem}; choose another --method, such as kapc"
        check(
            self.config_key,
            run.method_name,
            self._used,
            requirement,
        )
