"""Types of what a round is put together of: methods, relations and what these look at, aggregators.

`run`, `server`, `group` and `client` are the handles `RunContext`, `Server`, `GroupServer` and
`Client`. Their modules import this one, which therefore does not name their types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from fl_lightning.core.beside import Beside
from fl_lightning.core.mixing import Gram
from fl_lightning.core.payload import Payload
from fl_lightning.core.phase import Phase, Slot
from fl_lightning.core.traits import Traits
from fl_lightning.data.part import Part

Sources = Literal["cohort", "known", "uploaded", "all"]
"""Clients whose models a relation mixes (`callbacks.relations.Relation.sources`)."""


class Cost(Protocol):
    """Operations for one sample (`engine.phases.SampleCost`)."""

    @property
    def forward(self) -> float: ...
    @property
    def backward(self) -> float: ...


class Configured(Protocol):
    """What every callback and relation has (`callbacks.base.Callback`)."""

    @property
    def config_key(self) -> str: ...
    def on_fit_start(self, run: Any) -> None: ...


@dataclass
class RelationInputs:
    """What a relation may look at when the server composes what a round's receivers are sent."""

    receivers: list[int]
    """Clients that will receive (m), among the sources."""
    sources: list[int]
    """Clients whose last-received models are mixed (n), ascending."""
    samples: Tensor
    """Training samples of each source, float64 (n,)."""
    layers: int
    """Layers the relation tells apart (1 where it does not)."""
    clients: int
    """Clients in the federation, N."""
    memory: dict[str, Tensor]
    """The server's named tensors: a relation that learns keeps its cube there."""
    gram: Callable[..., Gram]
    """Computes inner products of the sources' last-received layers (all that travels);
    `gram("parameters")`: without running statistics; `gram("initial")`: of the parameters' changes
    since the initial model."""

    @property
    def places(self) -> Tensor:
        """Index of each receiver among the sources, int64 (m,)."""
        return places(self.receivers, self.sources)


def places(clients: Sequence[int], among: Sequence[int]) -> Tensor:
    """Index of each of the `clients` in the list `among`, int64 (m,)."""
    place_of = {c: k for k, c in enumerate(among)}
    return torch.tensor([place_of[c] for c in clients], dtype=torch.int64)


class Relation(Configured, Protocol):
    """Who receives whose model (`callbacks.relations.Relation`)."""

    is_global: ClassVar[bool]
    several: ClassVar[bool]
    per_layer: ClassVar[bool]
    measures: ClassVar[bool]

    @property
    def sources(self) -> Sources: ...
    @property
    def sums_to_one(self) -> bool: ...
    def init_server(self, run: Any) -> dict[str, Tensor]: ...
    def weights(self, inputs: RelationInputs) -> Tensor: ...
    def as_mixed(
        self,
        rows: Tensor,
        receivers: Sequence[int],
        sources: Sequence[int],
        round: int,
    ) -> Tensor: ...
    def learn(self, server: Any) -> None: ...
    def measured(self, clients: list[dict[str, Any]]) -> dict[str, float]: ...
    def newcomer(
        self,
        run: Any,
        part: Part,
        labelled: bool,
    ) -> Tensor | None: ...
    def flops(
        self,
        layers: int,
        receivers: int,
        sources: int,
    ) -> int: ...


class Reducer(Configured, Protocol):
    """How a round's uploads become one model (`callbacks.base.Aggregator`)."""

    def weights(self, p: Tensor, inputs: RelationInputs) -> Tensor: ...
    def combine(self, W: Tensor, p: Tensor) -> Tensor: ...
    def finished(
        self,
        mean: Tensor,
        group: Any,
        who: Sequence[int],
    ) -> Tensor: ...


class Method(Protocol):
    """A method's declarations and hooks (`methods.base.Method`)."""

    traits: ClassVar[Traits]

    def check(self, run: Any) -> None: ...
    def build(self, model: nn.Module, num_classes: int) -> nn.Module: ...
    def slots(self) -> dict[str, Slot]: ...
    def init_server(self, run: Any) -> dict[str, Tensor]: ...
    def broadcast(self, server: Any) -> dict[int, Payload]: ...
    def aggregate(self, server: Any) -> None: ...
    def init_client(self, run: Any) -> dict[str, Tensor]: ...
    def receive(self, client: Any, payload: Payload) -> Iterable[Phase] | None: ...
    def phases(self, client: Any, payload: Payload) -> Iterable[Phase]: ...
    def upload(self, client: Any, payload: Payload) -> Payload: ...
    def beside(self) -> dict[str, Beside]: ...
    def private_phases(self) -> tuple[float | None, ...] | str: ...
    def admit(self, server: Any, client: Any) -> None: ...
    def newcomer_phases(self, client: Any, payload: Payload) -> Iterable[Phase]: ...
    def personal(self, client: Any) -> Tensor: ...
    def global_model(self, group: Any, client: int) -> Tensor | None: ...
    def prepare(
        self,
        client: Any,
        vector: Tensor,
        kind: str,
    ) -> dict[str, Tensor]: ...
    def outputs(
        self,
        client: Any,
        x: Tensor,
        kind: str,
    ) -> Tensor: ...
    def summary(self, run: Any) -> dict[str, Any]: ...
