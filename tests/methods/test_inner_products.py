"""What `fl-train plan` counts of inner products is what relations, aggregators and methods declare of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from every import BESIDE, NAMES, method_of

from fl_lightning.callbacks.robust import Krum
from fl_lightning.config import Component, DataConfig
from fl_lightning.core.mixing import Mixer
from fl_lightning.data import FederatedData, prepare
from fl_lightning.engine.federation import Federation
from fl_lightning.methods import Method
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.planning.memory import Products, Setup
from fl_lightning.planning.setting import DataSizes, Hardware

WITH_PRODUCTS = (
    "cfl", "confree", "crosskapc", "fedamp", "fedapa", "heurfedamp", "kapc", "ktpflmodels", "pfedgraph", "pfedla",
    "selfkapc",
)  # fmt: skip
COUNTED: list[tuple[str, dict[str, str]]] = [*((name, {}) for name in NAMES), ("confree", {"by": "layer"})]


@cache
def _few_digits() -> FederatedData:
    return prepare(DataConfig(fraction=0.2, partition="iid", public="held_back", validation=0.2), 4, 0)


def _products(
    method: Method, callbacks: Any, made: Any, federation: Callable[..., Federation], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Products], list[Products]]:
    """Gram matrices of a round: declared, and taken in the second one of a run of four clients."""
    taken: list[Products] = []
    real = Mixer.gram

    def gram(self: Mixer, segments: Any, layers: int) -> Any:
        taken.append(Products(len(self.sources), layers > 1))
        return real(self, segments, layers)

    monkeypatch.setattr(Mixer, "gram", gram)
    fed = federation(method, callbacks=callbacks, data=_few_digits(), local_epochs=None, local_steps=1)
    fed.prepare()
    fed.round(1)
    taken.clear()
    fed.round(2)
    profile: Any = SimpleNamespace(mask=fed.run.groups[0].down_mask)
    config = replace(fed.run.config, callbacks=made)
    return Setup(config, Hardware("cpu", 1, 1, 0.0), DataSizes([], [], (), 0, 0), [profile], method).products, taken


@pytest.mark.sampled(*(f"[{name}-" for name in (*WITH_PRODUCTS, "fedavg")))
@pytest.mark.parametrize(("name", "arguments"), COUNTED, ids=[f"{n}-{''.join(a.values())}" for n, a in COUNTED])
def test_inner_products_are_declared_as_they_are_taken(
    name: str, arguments: dict[str, str], federation: Callable[..., Federation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By every method, in a round in which all that can be mixed is: the second."""
    given = arguments | BESIDE.get(name, {}) | ({"first_round": "1"} if name == "cfl" else {})
    method = method_of(name, **given)
    declared, taken = _products(method, (), {}, federation, monkeypatch)
    assert declared == taken
    assert bool(taken) is (name in WITH_PRODUCTS)


def test_inner_products_of_an_aggregator_are_declared(
    federation: Callable[..., Federation], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"krum": Component("fl_lightning.callbacks.robust.Krum", {"attackers": 0})}
    declared, taken = _products(FedAvg(), [Krum(attackers=0)], made, federation, monkeypatch)
    assert declared == taken == [Products(4, False)]
