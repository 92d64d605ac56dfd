"""The server of a round: its memory, the clients that have uploaded, and means, mixes and inner
products of clients' vectors. These lie on their home ranks; call every method on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from fl_lightning.configuration.ranges import bounded_fields
from fl_lightning.core.layout import Segment
from fl_lightning.core.mixing import Gram, Mixer, mean_of
from fl_lightning.core.payload import Payload
from fl_lightning.core.relation import RelationInputs, Weights, joint_view, places
from fl_lightning.core.run import ModelGroup, RunContext
from fl_lightning.core.traits import undeclared
from fl_lightning.foundation import log
from fl_lightning.foundation.errors import BadInput, RunFailed
from fl_lightning.results.record import RelationView
from fl_lightning.storage.state import MODEL

if TYPE_CHECKING:
    from fl_lightning.callbacks.base import Aggregator
    from fl_lightning.callbacks.relations import Relation

Since = Literal["zero", "initial", "sent"]


@dataclass(eq=False, repr=False)
class Server:
    """Handle on the server in one round.

    Args:
        reducer: the aggregator callback, which combines a round's uploads into one vector.
    """

    run: RunContext
    round: int
    cohort: list[int]
    reducer: Aggregator
    answered: list[int] = field(default_factory=list)
    """The clients whose upload has arrived."""
    sent: dict[int, Payload] = field(default_factory=dict)
    """Downloads of this rank's clients of the cohort."""
    scratch: dict[int, Tensor] = field(default_factory=dict)
    """Vectors of this rank's clients that `broadcast` stores for `aggregate`."""
    reduced: bool = False
    """Whether the reducer was used; a method that calls `mean` alone does not use it."""
    flops: int = 0
    """The server's FLOPs so far."""
    working_bytes: int = 0
    """Peak bytes of work space on this rank."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Further metrics of the round, which observers add."""
    view: RelationView | None = None
    """The relation to be drawn, if the method sets it; None: the weights of its relation."""

    def __post_init__(self) -> None:
        self.memory = self.run.server.memory
        """Named tensors that survive the round, equal on every rank (on the CPU)."""
        self._statistics: dict[int, dict[str, Tensor]] = {}
        self.groups = []
        group_of = self.run.group_of
        for group in self.run.groups:
            members = [c for c in self.cohort if group_of(c) is group]
            self.groups.append(GroupServer(self, group, members))

    @property
    def clients(self) -> int:
        """N, the number of clients."""
        return self.run.clients

    @property
    def statistics(self) -> dict[int, dict[str, Tensor]]:
        """Uploaded tensors other than vectors, by client and name, on every rank (on the CPU).

        Raises:
            BadInput: the method does not declare `statistics`: they have not been gathered.
        """
        if not self.run.method.traits.statistics:
            raise undeclared(self.run.method, "statistics", "its hooks use server.statistics")
        return self._statistics

    @property
    def only(self) -> GroupServer:
        """The only group of clients, for methods that support one architecture.

        Raises:
            BadInput: there are several.
        """
        if len(self.groups) > 1:
            requirement = (
                f"{type(self.run.method).__name__} supports one architecture (it uses server.only "
                "or server[...]): set Traits(several=False)"
            )
            raise BadInput("model", [g.group.name for g in self.groups], requirement)
        return self.groups[0]

    def __getitem__(self, name: str) -> Tensor:
        return self.only[name]

    def __setitem__(self, name: str, vector: Tensor) -> None:
        self.only[name] = vector

    def samples(self, clients: Sequence[int]) -> Tensor:
        """Return the number of training samples of each client, float64 (n,)."""
        sizes = [self.run.data.train_sizes[c] for c in clients]
        return torch.tensor(sizes, dtype=torch.float64)

    def shares(self, clients: Sequence[int]) -> Tensor:
        """Return the clients' shares of their training samples, float64 (n,), summing to 1."""
        samples = self.samples(clients)
        return samples / samples.sum()

    def collect(
        self,
        answered: Sequence[int],
        statistics: Mapping[int, dict[str, Tensor]],
    ) -> None:
        """Register the clients that have uploaded and their statistics; the engine calls it."""
        self.answered = list(answered)
        self._statistics = dict(statistics)
        arrived = set(answered)
        for group in self.groups:
            group.answered = [c for c in group.cohort if c in arrived]

    def relation_view(self) -> RelationView:
        """Return the round's relation for drawing; if it is too large, an empty one, with a line in
        the log."""
        if self.view is not None:
            return self.view
        run = self.run
        parts = [g.weighed for g in self.groups if g.weighed is not None]
        several = len(self.groups) > 1
        receivers = sum(len(part.receivers) for part in parts)
        sources = sum(len(part.sources) for part in parts)
        layers = 1 if several else len(run.layer_names)
        size = receivers * sources * layers
        if not parts or size > MOST_KEPT:
            if size and "relation" not in run.warned and run.is_main:
                gib = 4 * size / 2**30
                log.say(
                    f"relation: {receivers:,} receivers by {sources:,} sources by layer is "
                    f"{gib:.1f} GiB a round: it is not kept, nor drawn; with a lower "
                    "federation.participation it is"
                )
                run.warned.add("relation")
            no_rows = np.zeros((0, 0, 0), np.float32)
            return RelationView(no_rows, [], [], [])
        if several:
            return joint_view(parts)
        return parts[0].view(run.layer_names)


MOST_KEPT = 10**8
"""Largest number of weights in a round's relation that is kept and drawn: 400 MB, or 2,000 clients
and 25 layers (ours)."""


@dataclass(eq=False, repr=False)
class GroupServer:
    """Handle on the clients of one architecture and the server's vectors for them, in one round."""

    server: Server
    group: ModelGroup
    cohort: list[int]
    answered: list[int] = field(default_factory=list)
    weighed: Weights | None = None
    """The relation's last weights in this round."""

    def __post_init__(self) -> None:
        self.layout = self.group.layout
        self.members = self.group.members
        self.initial = self.group.initial
        self.here = self.server.run.at_home(self.cohort)
        """The clients of the cohort whose home is this rank."""

    def __getitem__(self, name: str) -> Tensor:
        return self.group.vectors[name]

    def __setitem__(self, name: str, vector: Tensor) -> None:
        self.group.vectors[name] = vector

    def __contains__(self, name: str) -> bool:
        return name in self.group.vectors

    def send(self, vectors: Mapping[int, Tensor]) -> dict[int, Payload]:
        """Make the downloads that `broadcast` returns: for each client a payload with all shared
        blocks of its vector.

        Args:
            vectors: vector (D,) for each client of this rank.
        """
        payloads = {}
        for c, vector in vectors.items():
            sent = self.group.down_mask.copy()
            payloads[c] = Payload(self.layout, vector, sent)
        return payloads

    # ---------------------------------------------------------------- by a relation

    def mix_by(self, relation: Relation) -> dict[int, Payload]:
        """Mix the last uploads for each client of the cohort, with the weights of `relation`;
        returns the payloads of this rank's clients."""
        run = self.server.run
        receivers = self.cohort
        sources = self._candidates(relation.sources)
        inputs = self.inputs(relation, receivers, sources)
        if relation.sources == "uploaded":
            weights = weights_of_uploaded(relation, inputs, run.server.uploaded)
        else:
            weights = relation.weights(inputs)
            self._warn(relation, weights, receivers, sources)
        weights = relation.as_mixed(weights, receivers, sources, self.server.round)
        weighed = self._weighed(
            relation,
            weights,
            receivers,
            sources,
            len(receivers),
        )
        mixes = self.mix(weights, receivers, sources, by_layer=relation.per_layer)
        sent = self.send(mixes)
        for c, own_weights in zip(receivers, weighed.on_self(), strict=True):
            if c in sent:
                sent[c].own_weights = own_weights
        return sent

    def mean_by(
        self,
        relation: Relation,
        who: list[int] | None = None,
    ) -> Tensor:
        """Combine this round's uploads into one model (D,), with the single row of `relation` as
        weights, by the reducer.

        Args:
            who: clients whose uploads are combined; None: all that have uploaded.
        """
        who = self.answered if who is None else who
        inputs = self.inputs(relation, who, who)
        reducer = self.server.reducer
        weights = reducer.weights(relation.weights(inputs)[:, 0], inputs)
        self._weighed(
            relation,
            weights[:, None].expand(-1, len(who), -1),
            who,
            who,
            1,
        )
        self.server.reduced = True
        mean = self.mean(
            weights,
            who,
            by_layer=relation.per_layer,
            like=self[MODEL],
            combine=reducer.combine,
        )
        return reducer.finished(mean, self, who)

    def inputs(
        self,
        relation: Relation,
        receivers: Sequence[int],
        sources: Sequence[int],
    ) -> RelationInputs:
        """Return the inputs from which `relation` computes its weights."""
        server = self.server

        @cache
        def gram(of: Since | Literal["parameters"] = "zero") -> Gram:
            since: Since = "zero" if of == "parameters" else of
            blocks = self.layout.is_parameter
            if of == "zero":
                blocks = self.group.down_mask
            elif of == "parameters":
                blocks = blocks & self.group.down_mask
            return self.gram(sources, blocks, since, by_layer=relation.per_layer)

        return RelationInputs(
            list(receivers),
            list(sources),
            server.samples(sources),
            self._layers(relation.per_layer),
            server.clients,
            server.memory,
            gram,
        )

    def _layers(self, by_layer: bool) -> int:
        if by_layer:
            return len(self.layout.layers)
        return 1

    def _candidates(self, sources: str) -> list[int]:
        """Return the clients of this architecture that are sources by `Relation.sources`,
        ascending."""
        run = self.server.run
        if sources == "all":
            return list(self.members)
        clients = set(self.cohort)
        if sources != "cohort":
            clients |= run.server.uploaded
        return sorted(c for c in clients if run.group_of(c) is self.group)

    def _weighed(
        self,
        relation: Relation,
        weights: Tensor,
        receivers: list[int],
        sources: list[int],
        rows: int,
    ) -> Weights:
        """Store a relation's weights, and count the FLOPs of computing so many `rows`."""
        layers = self._layers(relation.per_layer)
        self.server.flops += relation.flops(layers, rows, len(sources))
        self.weighed = Weights(self.group, weights, receivers, sources)
        return self.weighed

    def _warn(
        self,
        relation: Relation,
        weights: Tensor,
        receivers: list[int],
        sources: list[int],
    ) -> None:
        """Log once the share of the initial model in the received mixes, which comes from clients
        that have not uploaded yet."""
        run = self.server.run
        uploaded = run.server.uploaded
        initial = torch.tensor([c not in uploaded for c in sources])
        if "initial" in run.warned or not uploaded or not initial.any():
            return
        of_others = torch.tensor(receivers)[:, None] != torch.tensor(sources)
        of_initial = weights * (initial & of_others)
        share = float(of_initial.sum(-1).mean())
        if share <= 0:
            return
        run.warned.add("initial")
        if not run.is_main:
            return
        kind: type = type(run.method)
        choices = str(bounded_fields(kind).get("sources", ""))
        cure = ""
        if "uploaded" in choices:
            cure = "; --method.sources uploaded leaves them out"
        log.say(
            f"round {self.server.round}: {int(initial.sum())} of the {len(sources)} models that "
            "are mixed belong to clients that have not uploaded yet: the initial model makes up "
            f"{share:.0%} of the received mixes{cure}"
        )

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
        """Return the weighted mean of the sources' last uploads, sum_j weights_j v_j, computed as
        v_0 + sum_j weights_j (v_j - v_0).

        Args:
            weights: (n,), or (L, n) with `by_layer`, float64; each row sums to 1.
            sources: clients, ascending.
            slot: name of the vector.
            since: `zero`: the vectors themselves; `sent`: their changes since the downloads of this
                round; `initial`: since the initial model.
            by_layer: whether layers have separate weights.
            like: vector (D,) with the values of blocks that are not sent; None: 0.
            combine: combines rows (n, columns) by weights (n,) to one row: this mean, or a robust
                aggregate.

        Returns:
            Shape (D,), equal on every rank.

        Raises:
            RunFailed: a row of weights does not sum to 1, for which the formula is wrong.
        """
        weights = weights.reshape(-1, len(sources))
        sums = weights.sum(1)
        if not torch.allclose(sums, torch.ones_like(sums), atol=1e-6, rtol=0):
            raise RunFailed(
                f"the weights of a mean sum to {sums.tolist()}, not to 1: divide them by their sum"
            )
        into = torch.zeros_like(self.initial) if like is None else like.clone()
        mixer = self._mixer(sources, slot, since)
        mixer.mean(self._segments(by_layer, slot), weights, into, combine)
        self.count(mixer)
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
        """Mix the sources' last uploads for the receivers of this rank; returns a vector (D,) by
        receiver.

        Args:
            weights: (1 or L, m, n), float64; a receiver's weights on the sources. They sum to 1,
                unless the relation has `sums_to_one=False`.
            receivers: m clients among the sources.
            sources: n clients, ascending.
            by_layer: whether layers have separate weights.
            fresh: whether to return new vectors on the device. If it is False, the mixes are
                written to vectors that are kept for downloads and overwritten in every round.
        """
        run = self.server.run
        here = run.at_home(receivers)
        segments = self._segments(by_layer, MODEL)
        mixer = self._mixer(sources, MODEL, "zero")
        if not segments:  # no block is sent, so none is read
            return dict.fromkeys(here, self.initial)
        into = {}
        for k, c in enumerate(here):
            into[c] = torch.zeros_like(self.initial) if fresh else self._buffer(k)
        by_layers = weights.expand(self._layers(by_layer), -1, -1)
        mixer.mix(
            segments,
            by_layers,
            list(receivers),
            into,
            run.relation.sums_to_one,
        )
        self.count(mixer)
        return into

    def gram(
        self,
        sources: Sequence[int],
        blocks: np.ndarray,
        since: Since = "zero",
        *,
        by_layer: bool = False,
    ) -> Gram:
        """Compute inner products of the sources' last uploads, or of their changes.

        Args:
            blocks: mask of the blocks, bool [B].
            since: `zero`: of the models themselves; `sent`: of their changes since the downloads of
                this round; `initial`: since the initial model.
            by_layer: whether to return them for each layer; else L = 1.
        """
        mixer = self._mixer(sources, MODEL, since)
        segments = self.layout.segments(blocks, by_layer=by_layer)
        products = mixer.gram(segments, self._layers(by_layer))
        self.count(mixer)
        return products

    def vector(self, client: int, since: Since = "zero") -> Tensor:
        """Return one client's last upload (D,), or with `since` its change as in `mean`, on every
        rank."""
        weight = torch.ones(1, dtype=torch.float64)
        return self.mean(weight, [client], since=since)

    def _segments(self, by_layer: bool, slot: str) -> list[Segment]:
        """Return the columns of a slot that are mixed: of the model the shared blocks, of any other
        slot all parameters."""
        mask = self.layout.is_parameter
        if slot == MODEL:
            mask = self.group.down_mask
        return self.layout.segments(mask, by_layer=by_layer)

    def _mixer(
        self,
        sources: Sequence[int],
        slot: str,
        since: Since,
    ) -> Mixer:
        """Make the mixer of the sources' last uploads. A source that never uploaded has the initial
        value of the slot."""
        run = self.server.run
        first = self.initial
        if slot != MODEL:
            first = run.method.slots()[slot].first(first)
        vectors = {}
        copied = 0
        for c in run.at_home(sources):
            vector = first
            if c in run.states:
                vector = run.states[c].received[slot]
            if since != "zero":  # the store may keep its vectors on another device
                base = self.initial if since == "initial" else self.server.sent[c].vector
                vector = vector.to(run.device) - base.to(run.device)
                copied += vector.nbytes
            vectors[c] = vector
        self.server.working_bytes = max(self.server.working_bytes, copied)
        return Mixer(
            run.processes,
            run.home,
            vectors,
            list(sources),
            run.dtype,
        )

    def count(self, mixer: Mixer) -> None:
        """Add a mixer's FLOPs and work space to the server's."""
        self.server.flops += mixer.flops
        self.server.working_bytes = max(self.server.working_bytes, mixer.working_bytes)

    def _buffer(self, k: int) -> Tensor:
        """Return the reused vector (D,) for the mix of the k-th receiver on this rank."""
        buffers = self.group.buffers
        if k not in buffers:
            buffers[k] = self.server.run.store.allocate(self.initial)
        return buffers[k]


def weights_of_uploaded(
    relation: Relation,
    inputs: RelationInputs,
    uploaded: set[int],
) -> Tensor:
    """Return the weights of `relation`, (layers or 1, m, n), with 0 for sources that have not
    uploaded yet.

    There is one exception: a receiver that has not uploaded may have a weight on itself. Its last
    upload is then the initial model. `relation.weights` is called once for all receivers that have
    uploaded, and once for each of the others, with the uploaded sources and that receiver.

    Args:
        uploaded: clients that have uploaded at least once.
    """
    arrived = [c for c in inputs.sources if c in uploaded]
    together = [c for c in inputs.receivers if c in uploaded]
    separate = [c for c in inputs.receivers if c not in uploaded]
    blocks = [(together, arrived)]
    blocks += [([c], sorted([*arrived, c])) for c in separate]
    parts = []
    for receivers, sources in blocks:
        if not receivers:
            continue
        columns = places(sources, inputs.sources)
        rows = places(receivers, inputs.receivers)

        def gram(*since: str, columns: Tensor = columns) -> Gram:
            return inputs.gram(*since).select(columns)

        inputs_of_block = replace(
            inputs,
            receivers=receivers,
            sources=sources,
            samples=inputs.samples[columns],
            gram=gram,
        )
        parts.append((rows, columns, relation.weights(inputs_of_block)))
    first = parts[0][2]
    table = first.new_zeros(len(first), len(inputs.receivers), len(inputs.sources))
    for rows, columns, weights in parts:
        table[:, rows[:, None], columns] = weights
    return table
