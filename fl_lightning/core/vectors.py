"""What the server can ask of clients' vectors beside means, mixes and one Gram matrix. All run on
every rank."""

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
    """What the server last received of those `clients` whose home is this rank: no copies."""
    run = group.server.run
    states = {c: run.states.get(c) for c in run.at_home(clients)}
    return {
        c: group.initial if state is None else state.received[MODEL] for c, state in states.items()
    }


def fetched(
    group: GroupServer, sources: Mapping[int, Sequence[int]]
) -> dict[int, dict[int, Tensor]]:
    """Models for single clients: of each receiver of this rank, copies (D,) of its `sources`'
    models, by source.

    Args:
        group: the clients.
        sources: by receiver, the same on every rank. A rank holds what its own receivers want.
    """
    here = group.server.run.at_home(sources)
    models_of: dict[int, dict[int, Tensor]] = {c: {} for c in here}
    for source in sorted({j for row in sources.values() for j in row}):
        vector = group.vector(source)
        for c in here:
            if source in sources[c]:
                models_of[c][source] = vector
    return {c: {j: models[j] for j in sources[c]} for c, models in models_of.items()}


def distances(
    group: GroupServer, clients: Sequence[int], points: Sequence[Tensor], blocks: np.ndarray
) -> Tensor:
    """Squared distances of what the server last received of `clients` from `points` (D,), over
    `blocks` (bool [B]).

    Returns:
        Shape (clients, points), float64, on the CPU.
    """
    run = group.server.run
    segments = group.layout.segments(blocks)

    def between(vector: Tensor, point: Tensor) -> float:
        parts = [
            (vector[s.start : s.stop].to(point.device) - point[s.start : s.stop]) for s in segments
        ]
        return sum(float(part.to(wide(part.device)).square().sum()) for part in parts)

    mine = {
        c: [between(v, point) for point in points] for c, v in last_received(group, clients).items()
    }
    rows = run.processes.gather_by_client(mine)
    group.server.flops += 3 * len(clients) * len(points) * int(group.layout.numbers[blocks].sum())
    return torch.tensor([rows[c] for c in clients], dtype=torch.float64)


def products(
    group: GroupServer, clients: Sequence[int], sources: Sequence[int], before: Mapping[int, Tensor]
) -> Tensor:
    """Inner products of what has changed at `clients` since they were sent their models with the
    models of `sources`.

    Args:
        group: the clients.
        clients: who have answered (m).
        sources: whose models (n).
        before: for some of this rank's sources, a model (D,) in place of the one last received.

    Returns:
        By layer, (L, m, n), float64.
    """
    server = group.server
    run = group.server.run
    here = last_received(group, clients)
    device = run.device
    changes = {
        c: vector.to(device) - server.sent[c].vector.to(device) for c, vector in here.items()
    }
    models = {run.clients + c: before.get(c, v) for c, v in last_received(group, sources).items()}
    names = [*clients, *(run.clients + c for c in sources)]
    mixer = Mixer(run.processes, [*run.home, *run.home], changes | models, names, run.dtype)
    layers = len(group.layout.layers)
    inner = mixer.gram(group.layout.segments(group.group.down_mask, by_layer=True), layers).full
    server.flops += mixer.flops
    server.working_bytes = max(server.working_bytes, mixer.working_bytes)
    return inner[:, : len(clients), len(clients) :]
