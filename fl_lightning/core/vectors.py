"""Questions of the server about clients' vectors, beside means, mixes and one Gram matrix. All run
on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.mixing import Mixer
from fl_lightning.core.server import GroupServer
from fl_lightning.foundation.device import wide
from fl_lightning.storage.state import MODEL


def last_received(group: GroupServer, clients: Sequence[int]) -> dict[int, Tensor]:
    """Models last received of those `clients` whose home is this rank: no copies."""
    run = group.server.run
    models = {}
    for c in run.at_home(clients):
        state = run.states.get(c)
        models[c] = group.initial if state is None else state.received[MODEL]
    return models


def fetched(
    group: GroupServer, sources: Mapping[int, Sequence[int]]
) -> dict[int, dict[int, Tensor]]:
    """Models for single clients: for each receiver of this rank, copies (D,) of its `sources`'
    models, by source.

    Args:
        group: the clients.
        sources: by receiver, the same on every rank. A rank holds the models for its receivers.
    """
    receivers = group.server.run.at_home(sources)
    every_source: set[int] = set().union(*sources.values())
    copies: dict[int, dict[int, Tensor]] = {}
    for c in receivers:
        copies[c] = dict.fromkeys(sources[c], group.initial)  # in their order
    for source in sorted(every_source):
        vector = group.vector(source)
        for models in copies.values():
            if source in models:
                models[source] = vector
    return copies


def distances(
    group: GroupServer,
    clients: Sequence[int],
    points: Sequence[Tensor],
    blocks: np.ndarray,
) -> Tensor:
    """Squared distances of the models last received of `clients` from `points` (D,), over `blocks`
    (bool [B]).

    Returns:
        Shape (clients, points), float64, on the CPU.
    """
    server = group.server
    segments = group.layout.segments(blocks)
    dtype = wide(server.run.device)
    rows_here = {}
    for c, vector in last_received(group, clients).items():
        rows_here[c] = [0.0] * len(points)
        for k, point in enumerate(points):
            for segment in segments:
                columns = segment.columns
                difference = vector[columns].to(point.device) - point[columns]
                rows_here[c][k] += float(difference.to(dtype).square().sum())
    rows = server.run.processes.gather_by_client(rows_here)
    numbers = int(group.layout.numbers[blocks].sum())
    server.flops += 3 * len(clients) * len(points) * numbers
    return torch.tensor([rows[c] for c in clients], dtype=torch.float64)


def products(
    group: GroupServer,
    clients: Sequence[int],
    sources: Sequence[int],
    before: Mapping[int, Tensor],
) -> Tensor:
    """Inner products of the changes of `clients` since their downloads with the models of
    `sources`.

    Args:
        group: the clients.
        clients: who have answered (m).
        sources: whose models (n).
        before: for some of this rank's sources, a model (D,) in place of the one last received.

    Returns:
        By layer, (L, m, n), float64.
    """
    server = group.server
    run = server.run
    vectors = {}
    device = run.device
    for c, vector in last_received(group, clients).items():
        sent = server.sent[c].vector
        vectors[c] = vector.to(device) - sent.to(device)
    # a client's model goes by the number N + c beside its change, c
    for c, vector in last_received(group, sources).items():
        vectors[run.clients + c] = before.get(c, vector)
    names = [*clients, *(run.clients + c for c in sources)]
    mixer = Mixer(
        run.processes,
        run.home * 2,
        vectors,
        names,
        run.dtype,
    )
    segments = group.layout.segments(group.group.down_mask, by_layer=True)
    gram = mixer.gram(segments, len(group.layout.layers))
    group.count(mixer)
    return gram.full[:, : len(clients), len(clients) :]
