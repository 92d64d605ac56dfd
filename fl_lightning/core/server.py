"""The server of a round, as methods see it: what it keeps, who answered, and means, mixes and inner
products of the clients' vectors. Every method of it runs on all ranks; client vectors lie on their
home ranks and are reached only through it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fl_lightning.configuration.ranges import bounded_fields
from fl_lightning.core.layout import Segment
from fl_lightning.core.mixing import Gram, Mixer, mean_of
from fl_lightning.core.payload import Payload
from fl_lightning.core.protocols import Reducer, Relation, RelationInputs, places
from fl_lightning.core.relation import Weights, one_view
from fl_lightning.core.run import ModelGroup, RunContext
from fl_lightning.core.traits import undeclared
from fl_lightning.foundation import log
from fl_lightning.foundation.errors import BadInput, RunFailed
from fl_lightning.results.record import RelationView
from fl_lightning.storage.state import MODEL

Since = Literal["zero", "initial", "sent"]


class Server:
    """The server in one round: valid from its first to its last line. `reducer` makes one vector of
    many."""

    def __init__(
        self, run: RunContext, round: int, cohort: Sequence[int], reducer: Reducer
    ) -> None:
        self.run = run
        self.round = round
        self.cohort = list(cohort)
        self.reducer = reducer
        self.memory = run.server.memory
        """Named tensors that survive the round, equal on every rank (on the CPU)."""
        self.answered: list[int] = []
        """The clients whose upload has arrived, once it has."""
        self._statistics: dict[int, dict[str, Tensor]] = {}
        self.sent: dict[int, Payload] = {}
        """What this rank's clients of the cohort were sent."""
        self.groups = [
            GroupServer(self, g, [c for c in cohort if run.group_of(c) is g]) for g in run.groups
        ]
        self.scratch: dict[int, Tensor] = {}
        """Vectors of this rank's clients that `broadcast` leaves for `aggregate`."""
        self.reduced = False
        """Whether the reducer was asked for: a method that only calls `mean` passes a robust one
        by."""
        self.flops = 0
        """Operations of the server so far."""
        self.working_bytes = 0
        """The most work space at once on this rank."""
        self.metrics: dict[str, float] = {}
        """Further metrics of the round, which observers add."""
        self.view: RelationView | None = None
        """Who received whose knowledge, where a method says so; None: what relations were asked
        for."""

    @property
    def clients(self) -> int:
        """N."""
        return self.run.clients

    @property
    def statistics(self) -> dict[int, dict[str, Tensor]]:
        """What those who answered uploaded beside vectors, by client and name, on every rank (on
        the CPU).

        Raises:
            BadInput: the method does not declare `statistics`: they have not been gathered.
        """
        if not self.run.method.traits.statistics:
            raise undeclared(self.run.method, "statistics", "its hooks ask for server.statistics")
        return self._statistics

    @property
    def only(self) -> GroupServer:
        """The only group of clients; a method that asks for it takes one architecture.

        Raises:
            BadInput: there are several.
        """
        if len(self.groups) > 1:
            name = type(self.run.method).__name__
            allowed = (
                f"{name} asks for the only group (server.only, server[...]): set `several = False` "
                f"in its class"
            )
            raise BadInput("model", [g.group.name for g in self.groups], allowed)
        return self.groups[0]

    def __getitem__(self, name: str) -> Tensor:
        return self.only[name]

    def __setitem__(self, name: str, vector: Tensor) -> None:
        self.only[name] = vector

    def samples(self, clients: Sequence[int]) -> Tensor:
        """Training samples, float64 (n,)."""
        return torch.tensor([self.run.data.train_sizes[c] for c in clients], dtype=torch.float64)

    def shares(self, clients: Sequence[int]) -> Tensor:
        """Shares of the training samples, float64 (n,), summing to 1."""
        samples = self.samples(clients)
        return samples / samples.sum()

    def collect(self, answered: Sequence[int], statistics: Mapping[int, dict[str, Tensor]]) -> None:
        """The uploads of `answered` have arrived (the engine's call)."""
        self.answered = list(answered)
        self._statistics = dict(statistics)
        here = set(answered)
        for group in self.groups:
            group.answered = [c for c in group.cohort if c in here]

    def relation_view(self) -> RelationView:
        """Who received whom in this round, ready to be drawn; nobody, and that is said, where it is
        too large."""
        if self.view is not None:
            return self.view
        run = self.run
        parts = [g.weighed for g in self.groups if g.weighed is not None]
        several = len(self.groups) > 1
        receivers = sum(len(part.receivers) for part in parts)
        sources = sum(len(part.sources) for part in parts)
        size = receivers * sources * (1 if several else len(run.layer_names))
        if size > MOST_KEPT:
            if "relation" not in run.warned and run.is_main:
                what = (
                    f"{receivers:,} receivers by {sources:,} sources by layer is "
                    f"{4 * size / 2**30:.1f} GiB a round"
                )
                log.say(
                    f"relation: {what}: it is not kept, nor drawn; with a lower "
                    f"federation.participation it is"
                )
            run.warned.add("relation")
        if not parts or size > MOST_KEPT:
            return RelationView(np.zeros((0, 0, 0), np.float32), [], [], [])
        return one_view(parts) if several else parts[0].view(run.layer_names)


MOST_KEPT = 10**8
"""Numbers of a round's relation as it is kept and drawn: 400 MB, 2,000 clients at once and 25
layers (ours)."""


class GroupServer:
    """The clients of one architecture, and what the server keeps for them."""

    def __init__(self, server: Server, group: ModelGroup, cohort: list[int]) -> None:
        self.server = server
        self.group = group
        self.cohort = cohort
        self.answered: list[int] = []
        self.layout = group.layout
        self.members = group.members
        self.initial = group.initial
        self.here = server.run.at_home(cohort)
        """The clients of the cohort whose home is this rank."""
        self.weighed: Weights | None = None
        """What the relation was last asked for in this round."""

    def __getitem__(self, name: str) -> Tensor:
        return self.group.vectors[name]

    def __setitem__(self, name: str, vector: Tensor) -> None:
        self.group.vectors[name] = vector

    def __contains__(self, name: str) -> bool:
        return name in self.group.vectors

    def send(self, vectors: Mapping[int, Tensor]) -> dict[int, Payload]:
        """`vectors` by client (this rank's) as payloads with all that clients share."""
        return {
            c: Payload(self.layout, vector, self.group.down_mask.copy())
            for c, vector in vectors.items()
        }

    # ---------------------------------------------------------------- by a relation

    def mix_by(self, relation: Relation) -> dict[int, Payload]:
        """Each client's own mix of the last-received models, by the rows of `relation`."""
        run = self.server.run
        receivers = self.cohort
        sources = self._candidates(relation.sources)
        inputs = self.inputs(relation, receivers, sources)
        if relation.sources == "uploaded":
            weights = among_uploaded(relation, inputs, run.server.uploaded)
        else:
            weights = relation.weights(inputs)
            self._warn(relation, weights, receivers, sources)
        weights = relation.as_mixed(weights, receivers, sources, self.server.round)
        self._weighed(relation, weights, receivers, sources, len(receivers))
        sent = self.send(self.mix(weights, receivers, sources, by_layer=relation.per_layer))
        assert self.weighed is not None
        for c, own in zip(receivers, self.weighed.own(), strict=True):
            if c in sent:
                sent[c].own_weights = own
        return sent

    def mean_by(self, relation: Relation, who: list[int] | None = None) -> Tensor:
        """One model (D,) from this round's uploads of `who` (None: all who answered), by the only
        row of `relation` and the reducer."""
        who = self.answered if who is None else who
        inputs = self.inputs(relation, who, who)
        weights = self.server.reducer.weights(relation.weights(inputs)[:, 0], inputs)
        self._weighed(relation, weights[:, None].expand(-1, len(who), -1), who, who, 1)
        self.server.reduced = True
        how = self.server.reducer.combine
        mean = self.mean(weights, who, by_layer=relation.per_layer, like=self[MODEL], combine=how)
        return self.server.reducer.finished(mean, self, who)

    def inputs(
        self, relation: Relation, receivers: Sequence[int], sources: Sequence[int]
    ) -> RelationInputs:
        """What a relation may look at."""
        server = self.server

        @cache
        def gram(of: Since | Literal["parameters"] = "zero") -> Gram:
            parameters = self.layout.is_parameter
            down = self.group.down_mask
            blocks = {"zero": down, "parameters": parameters & down}.get(of, parameters)
            since: Since = "zero" if of == "parameters" else of
            return self.gram(sources, since=since, by_layer=relation.per_layer, blocks=blocks)

        samples = server.samples(sources)
        layers = self._layers(relation)
        return RelationInputs(
            list(receivers), list(sources), samples, layers, server.clients, server.memory, gram
        )

    def _layers(self, relation: Relation) -> int:
        return len(self.layout.layers) if relation.per_layer else 1

    def _candidates(self, sources: str) -> list[int]:
        run = self.server.run
        if sources == "all":
            return list(self.members)
        known = self.cohort if sources == "cohort" else run.server.uploaded.union(self.cohort)
        return sorted(c for c in known if run.group_of(c) is self.group)

    def _weighed(
        self,
        relation: Relation,
        weights: Tensor,
        receivers: list[int],
        sources: list[int],
        rows: int,
    ) -> None:
        self.server.flops += relation.flops(self._layers(relation), rows, len(sources))
        self.weighed = Weights(self.group, weights, receivers, sources)

    def _warn(
        self, relation: Relation, weights: Tensor, receivers: list[int], sources: list[int]
    ) -> None:
        """Say once how much of what is received are initial models, of clients that have not
        uploaded yet."""
        run = self.server.run
        uploaded = self.server.run.server.uploaded
        strange = torch.tensor([c not in uploaded for c in sources])
        if "initial" in run.warned or not uploaded or not strange.any():
            return
        others = strange & (torch.tensor(receivers)[:, None] != torch.tensor(sources))
        share = float((weights * others).sum(-1).mean())
        if share <= 0:
            return
        run.warned.add("initial")
        kind: type = type(run.method)
        choices = str(bounded_fields(kind).get("sources", ""))
        way = "; --method.sources uploaded leaves them out" if "uploaded" in choices else ""
        mixed = f"{int(strange.sum())} of the {len(sources)} models that are mixed"
        if run.is_main:
            what = (
                f"{mixed} are of clients that have not uploaded yet: the initial model makes up "
                f"{share:.0%}"
            )
            log.say(f"round {self.server.round}: {what} of what is received{way}")

    # ---------------------------------------------------------------- on vectors

    def mean(
        self,
        weights: Tensor,
        sources: Sequence[int],
        slot: str = MODEL,
        since: Since = "zero",
        *,
        by_layer: bool = False,
        like: Tensor | None = None,
        combine: Callable[[Tensor, Tensor], Tensor] = mean_of,
    ) -> Tensor:
        """sum_j weights_j v_j of what the server last received of `sources`, as v_0 + sum_j
        weights_j (v_j - v_0).

        Args:
            weights: (n,), or (L, n) with `by_layer`, float64; each row sums to 1.
            sources: clients, ascending.
            slot: which of their vectors.
            since: `sent`: their changes since what they were sent in this round; `initial`: since
                the initial model.
            by_layer: every layer has weights of its own.
            like: what the blocks hold that do not travel; None: 0.
            combine: makes one row of a tile of rows and their weights: this mean, or a robust one.

        Returns:
            Shape (D,), equal on every rank.

        Raises:
            RunFailed: a row of weights does not sum to 1: differences would silently give another
                vector.
        """
        weights = weights.reshape(-1, len(sources))
        if not torch.allclose(
            weights.sum(1), torch.ones(len(weights), dtype=weights.dtype), atol=1e-6, rtol=0
        ):
            raise RunFailed(f"the weights of a mean sum to {weights.sum(1).tolist()}, not to 1")
        into = torch.zeros_like(self.initial) if like is None else like.clone()
        mixer = self._mixer(sources, slot, since)
        mixer.mean(self._segments(by_layer, slot), weights, into, combine)
        self._count(mixer)
        return into

    def mix(
        self,
        weights: Tensor,
        receivers: Sequence[int],
        sources: Sequence[int],
        *,
        by_layer: bool = False,
        fresh: bool = False,
    ) -> dict[int, Tensor]:
        """What each of `receivers` (this rank's) is to receive: rows of `weights` applied to the
        sources' models.

        Args:
            weights: (1 or L, m, n), float64; rows sum to 1, but where a relation goes without a
                projection.
            receivers: m clients among the sources.
            sources: n clients, ascending.
            by_layer: every layer has weights of its own.
            fresh: into new vectors, on the device, and not into those that the round's downloads
                lie in.
        """
        mine = self.server.run.at_home(receivers)
        segments = self._segments(by_layer, MODEL)
        mixer = self._mixer(sources, MODEL, "zero")
        if not segments:  # where nothing is sent, nothing is read
            return dict.fromkeys(mine, self.initial)
        into = {
            c: torch.zeros_like(self.initial) if fresh else self._buffer(k)
            for k, c in enumerate(mine)
        }
        layers = len(self.layout.layers) if by_layer else 1
        mixer.mix(
            segments,
            weights.expand(layers, -1, -1),
            list(receivers),
            into,
            self.server.run.relation.sums_to_one,
        )
        self._count(mixer)
        return into

    def gram(
        self,
        sources: Sequence[int],
        slot: str = MODEL,
        since: Since = "zero",
        *,
        by_layer: bool = False,
        blocks: np.ndarray | None = None,
    ) -> Gram:
        """Inner products of the sources' vectors, or of their changes `since`, by layer (else L =
        1).

        `blocks` (bool [B]): those that count; None: all that travel.
        """
        mixer = self._mixer(sources, slot, since)
        segments = self._segments(by_layer, slot)
        if blocks is not None:
            segments = self.layout.segments(blocks, by_layer=by_layer)
        products = mixer.gram(segments, len(self.layout.layers) if by_layer else 1)
        self._count(mixer)
        return products

    def vector(self, client: int, slot: str = MODEL, since: Since = "zero") -> Tensor:
        """What the server last received of one client (D,), on every rank: for methods that learn
        from each upload."""
        return self.mean(torch.ones(1, dtype=torch.float64), [client], slot, since)

    def _segments(self, by_layer: bool, slot: str) -> list[Segment]:
        mask = self.group.down_mask if slot == MODEL else self.layout.is_parameter
        return self.layout.segments(mask, by_layer=by_layer)

    def _mixer(self, sources: Sequence[int], slot: str, since: Since) -> Mixer:
        """The kernel over the server's last copies of `sources`; of what never arrived that is the
        first value."""
        run = self.server.run
        first = self.initial if slot == MODEL else run.method.slots()[slot].first(self.initial)
        vectors: dict[int, Tensor] = {}
        copied = 0
        for c in run.at_home(sources):
            vector = run.states[c].received[slot] if c in run.states else first
            if since != "zero":  # the store may have its vectors elsewhere than where clients train
                base = self.initial if since == "initial" else self.server.sent[c].vector
                vector = vector.to(run.device) - base.to(run.device)
                copied += vector.numel() * vector.element_size()
            vectors[c] = vector
        self.server.working_bytes = max(self.server.working_bytes, copied)
        return Mixer(run.processes, run.home, vectors, list(sources), run.dtype)

    def _count(self, mixer: Mixer) -> None:
        self.server.flops += mixer.flops
        self.server.working_bytes = max(self.server.working_bytes, mixer.working_bytes)

    def _buffer(self, k: int) -> Tensor:
        """The vector (D,) that the mix for the k-th of a round's receivers here is written into."""
        if k not in self.group.buffers:
            self.group.buffers[k] = self.server.run.store.allocate(self.initial)
        return self.group.buffers[k]


def among_uploaded(relation: Relation, inputs: RelationInputs, uploaded: set[int]) -> Tensor:
    """Rows of `relation`, (layers or 1, m, n), in which no client counts whose upload has not
    arrived yet.

    A receiver that has not uploaded itself counts in its own row, with the initial model.
    """
    known = [c for c in inputs.sources if c in uploaded]
    groups = [([c for c in inputs.receivers if c in uploaded], known)]
    groups += [([c], sorted([*known, c])) for c in inputs.receivers if c not in uploaded]
    shape = len(inputs.receivers), len(inputs.sources)
    rows_of_all: Tensor | None = None
    for receivers, sources in groups:
        if not receivers:
            continue
        index = places(sources, inputs.sources)
        rows = places(receivers, inputs.receivers)

        def gram(*since: str, index: Tensor = index) -> Gram:
            return inputs.gram(*since).among(index)

        within = replace(
            inputs,
            receivers=receivers,
            sources=sources,
            samples=inputs.samples[index],
            gram=gram,
        )
        part = relation.weights(within)
        if rows_of_all is None:
            rows_of_all = part.new_zeros(len(part), *shape)
        rows_of_all[:, rows[:, None], index] = part
    assert rows_of_all is not None
    return rows_of_all
