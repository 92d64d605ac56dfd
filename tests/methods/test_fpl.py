"""FPL: prototypes by clusters of clients' class means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from watching import Make, client_of, global_model, payload_of, run_all, server_of

from fl_lightning.methods.fpl import FPL, cluster_losses, cluster_prototypes, finch, linked


def around(angles: list[float]) -> Tensor:
    """Points on the circle."""
    radians = torch.tensor(angles, dtype=torch.float64).deg2rad()
    return torch.stack([radians.cos(), radians.sin()], 1)


def test_points_are_linked_to_their_first_neighbour() -> None:
    """0-3, 7-3 | 90-94 | 180-181; then the two nearer pairs' means link, and the third to one of
    them."""
    points = around([0, 3, 7, 90, 94, 180, 181])
    assert linked(points).tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert finch(points).tolist() == [0, 0, 0, 1, 1, 2, 2]  # the next partition has one cluster
    far = around([0, 2, 20, 23, 180, 183, 200, 204])
    assert linked(far).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert finch(far).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]  # the coarsest with more than one
    assert finch(around([5])).tolist() == [0] and finch(around([5, 50])).tolist() == [0, 0]


def test_no_order_of_clients_matters() -> None:
    points = around([0, 2, 20, 23, 180, 183, 200, 204])
    order = torch.tensor([5, 2, 7, 0, 1, 6, 3, 4])
    alike = finch(points)[:, None] == finch(points)
    again = finch(points[order])
    assert torch.equal(alike[order][:, order], again[:, None] == again)


def test_points_are_linked_by_their_directions_alone() -> None:
    """By inner products both short ones would be linked to the long ones, 40 degrees off."""
    points = around([0, 2, 40, 42]) * torch.tensor([1, 1, 100, 100])[:, None]
    assert linked(points).tolist() == finch(points).tolist() == [0, 0, 1, 1]


def test_prototypes_are_the_clusters_means() -> None:
    a, b, c = around([0, 2]), around([20, 23]), around([180, 183, 200, 204])
    uploads = [{"classes": torch.tensor([7]), "features": p[None]} for p in torch.cat([a, b, c])]
    uploads[0] = {
        "classes": torch.tensor([3, 7]),
        "features": torch.stack([torch.tensor([1.0, 2.0]), a[0]]),
    }
    known, classes = cluster_prototypes(uploads, torch.zeros(10, 2, dtype=torch.float64)).values()
    assert classes.tolist() == [3, 7, 7]
    torch.testing.assert_close(known[1:], torch.stack([torch.cat([a, b]).mean(0), c.mean(0)]))
    assert known[0].tolist() == [1, 2]
    assert [len(part) for part in cluster_prototypes([], known).values()] == [0, 0]


def test_the_losses_by_hand() -> None:
    torch.manual_seed(0)
    z, y = torch.randn(5, 3), torch.tensor([0, 4, 2, 0, 9])
    known, classes, tau = torch.randn(6, 3), torch.tensor([0, 0, 2, 2, 2, 4]), 0.3
    want = 0.0
    for one, label in zip(z[:4], y[:4], strict=True):  # of class 9 nothing is known
        e = (cosine_similarity(one[None], known) / tau).exp()
        want += -torch.log(e[classes == label].sum() / e.sum())
        want += (one - known[classes == label].mean(0)).square().mean()
    torch.testing.assert_close(cluster_losses(z, y, known, classes, tau), want / 5)
    leaf = z.clone().requires_grad_()
    [slope] = torch.autograd.grad(
        cluster_losses(leaf, torch.full((5,), 9), known, classes, tau), leaf
    )
    assert not slope.any()


def test_what_is_sent_is_what_the_loss_sees(federation: Make) -> None:
    fed = run_all(federation(FPL(), rounds=1))
    memory, method = fed.run.server.memory, fed.run.method
    payload = method.broadcast(server_of(fed))[1]
    assert len(memory["clusters.classes"]) >= 10 and torch.equal(payload.vector, global_model(fed))
    assert torch.equal(payload.extra["prototypes"], memory["clusters.prototypes"])
    client = client_of(fed, 1, 2)
    [phase] = method.phases(client, payload)
    module, batch = client.bind(), next(iter(client.data.train.batches(8)))
    module.model.eval()
    loss = phase.objective.loss(module, batch)
    more = cluster_losses(
        module.features, batch[1], memory["clusters.prototypes"], memory["clusters.classes"], 0.02
    )
    torch.testing.assert_close(loss, module.task_loss(batch) + more)
    assert [p.objective.loss for p in method.phases(client, payload_of(client))] == [None]


def test_a_class_that_nobody_uploads_is_forgotten(federation: Make) -> None:
    fed = federation(FPL(), rounds=1)
    for known in ([2], [5, 6], []):
        server = server_of(fed, [])
        rows: dict[str, Any] = {
            "classes": torch.tensor(known, dtype=torch.int64),
            "features": torch.ones(len(known), 16),
        }
        server.collect([], {0: rows})
        fed.run.method.aggregate(server)
        assert server.memory["clusters.classes"].tolist() == known


@pytest.mark.parametrize("net", ["plain", "norm"])
def test_bytes(federation: Make, net: str) -> None:
    """With the model d numbers and a class for each prototype; up a count, too."""
    fed = run_all(federation(FPL(), net=net, rounds=1))
    K = len(fed.run.server.memory["clusters.classes"])
    record = fed.round(2)
    for k in range(4):
        classes_here = int((fed.run.data.class_counts[k] > 0).sum())
        assert record.traffic[k, 0, -1].tolist() == [0, 0, 4 * K, 4 * 16 * K]
        assert record.traffic[k, 1, -1].tolist() == [
            0,
            0,
            2 * 4 * classes_here,
            4 * 16 * classes_here,
        ]
