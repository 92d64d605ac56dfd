"""Further computations of the server on clients' vectors: copies, distances, inner products. All
ranks call these functions."""

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
    """Return the last upload (D,) of each of `clients` whose home is this rank, without copying. A
    client that has not uploaded has the initial model."""
    run = group.server.run
    models = {}
    for c in run.at_home(clients):
        state = run.states.get(c)
        models[c] = group.initial if state is None else state.received[MODEL]
    return models


def copy_models(
    group: GroupServer, sources: Mapping[int, Sequence[int]]
) -> dict[int, dict[int, Tensor]]:
    """Return for each receiver on this rank copies (D,) of its sources' last uploads, by source.

    Args:
        sources: the sources of each receiver, the same on every rank.
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
    """Return the squared distances of the clients' last uploads from `points` (D,), over `blocks`
    (bool [B]): (clients, points), float64, on the CPU."""
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
    numbers = int(group.layout.sizes[blocks].sum())
    server.flops += 3 * len(clients) * len(points) * numbers
    return torch.tensor([rows[c] for c in clients], dtype=torch.float64)


def products(
    group: GroupServer,
    clients: Sequence[int],
    sources: Sequence[int],
    before: Mapping[int, Tensor],
) -> Tensor:
    """Return the inner products of clients' updates with sources' models by layer, (L, m, n),
    float64.

    Args:
        clients: m clients that have uploaded; an update is the change since the download.
        sources: n clients whose last uploads are used.
        before: models (D,) that replace the last uploads of some of this rank's sources.
    """
    server = group.server
    run = server.run
    vectors = {}
    device = run.device
    for c, vector in last_received(group, clients).items():
        sent = server.sent[c].vector
        vectors[c] = vector.to(device) - sent.to(device)
    # number c is a client's update, number N + c its model
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
