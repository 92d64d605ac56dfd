"""FPL: prototypes by clusters of clients' class means."""

import torch
from torch.nn.functional import cosine_similarity
from torch.testing import assert_close

from fl_lightning.methods.fpl import (
    cluster_losses,
    cluster_prototypes,
    finch,
    first_neighbour_clusters,
)


def around(angles):
    """Points on the circle."""
    radians = torch.tensor(angles, dtype=torch.float64).deg2rad()
    return torch.stack([radians.cos(), radians.sin()], 1)


def test_points_are_linked_to_their_first_neighbour():
    """0-3, 7-3 | 90-94 | 180-181; then the two nearer pairs' means link, and the third to one of
    them."""
    points = around([0, 3, 7, 90, 94, 180, 181])
    assert first_neighbour_clusters(points).tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert finch(points).tolist() == [0, 0, 0, 1, 1, 2, 2]  # the next partition has one cluster
    far = around([0, 2, 20, 23, 180, 183, 200, 204])
    assert first_neighbour_clusters(far).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert finch(far).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]  # the coarsest with more than one
    assert finch(around([5])).tolist() == [0] and finch(around([5, 50])).tolist() == [0, 0]


def test_points_are_linked_by_their_directions_alone():
    """By inner products both short ones would be linked to the long ones, 40 degrees off."""
    points = around([0, 2, 40, 42]) * torch.tensor([1, 1, 100, 100])[:, None]
    assert first_neighbour_clusters(points).tolist() == finch(points).tolist() == [0, 0, 1, 1]


def test_prototypes_are_the_clusters_means():
    a, b, c = around([0, 2]), around([20, 23]), around([180, 183, 200, 204])
    uploads = [{"classes": torch.tensor([7]), "features": p[None]} for p in torch.cat([a, b, c])]
    uploads[0] = {
        "classes": torch.tensor([3, 7]),
        "features": torch.stack([torch.tensor([1.0, 2.0]), a[0]]),
    }
    known, classes = cluster_prototypes(uploads, torch.zeros(10, 2, dtype=torch.float64)).values()
    assert classes.tolist() == [3, 7, 7]
    assert_close(known[1:], torch.stack([torch.cat([a, b]).mean(0), c.mean(0)]))
    assert known[0].tolist() == [1, 2]
    assert [len(part) for part in cluster_prototypes([], known).values()] == [0, 0]


def test_the_losses_by_hand():
    torch.manual_seed(0)
    z, y = torch.randn(5, 3), torch.tensor([0, 4, 2, 0, 9])
    known, classes, tau = torch.randn(6, 3), torch.tensor([0, 0, 2, 2, 2, 4]), 0.3
    want = 0.0
    for one, label in zip(z[:4], y[:4], strict=True):  # of class 9 nothing is known
        e = (cosine_similarity(one[None], known) / tau).exp()
        want += -torch.log(e[classes == label].sum() / e.sum())
        want += (one - known[classes == label].mean(0)).square().mean()
    assert_close(cluster_losses(z, y, known, classes, tau), want / 5)
    leaf = z.clone().requires_grad_()
    [slope] = torch.autograd.grad(
        cluster_losses(leaf, torch.full((5,), 9), known, classes, tau), leaf
    )
    assert not slope.any()
