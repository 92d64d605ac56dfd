"""Methods whose clients are in clusters: IFCA (card 1.29) and FeSEM (1.30)."""

import pytest
import torch
from classes import IFCA, FeSEM
from reckoning import scores_at
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from watching import Watch, client_of


def cluster(fed):
    """Of every client."""
    found = fed.run.server.memory["cluster"].tolist()
    return found


def centre(fed, k):
    """The model of a cluster."""
    return fed.run.groups[0].vectors["model" if k == 0 else f"model.{k}"]


def loss_at(fed, client, vector):
    """Mean cross entropy on the client's training data, by hand."""
    c = client_of(fed, client)
    [(x, y)] = c.data.train.batches(10_000)
    return float(cross_entropy(scores_at(c, vector, x), y))


# ---------------------------------------------------------------- IFCA


def test_ifca_takes_the_model_of_the_least_loss(federation):
    """INV4, by losses worked out by hand; all models travel down, one of them up, with its
    number."""
    watch = Watch()
    fed = federation(IFCA(3), callbacks=[watch], rounds=1)
    numbers = 4 * (64 * 16 + 16 + 160 + 10)
    record = fed.round(1)
    assert record.metrics["download_bytes"] == 3 * 4 * numbers
    assert record.metrics["upload_parameter_bytes"] == 4 * numbers
    sent = [vector for _, vector, _ in watch.downloads]  # three for each client
    for c in range(4):
        losses = [loss_at(fed, c, v) for v in sent[3 * c : 3 * c + 3]]
        assert cluster(fed)[c] == losses.index(min(losses))
    assert len({loss_at(fed, 0, v) for v in sent[:3]}) == 3  # drawn anew, each


# ---------------------------------------------------------------- FeSEM


@pytest.mark.parametrize("distance", ["model", "head"])
def test_fesem_assigns_to_the_nearest_centre_and_both_steps_descend(federation, distance):
    """INV2, INV3: sum of ||w_i - W_r||^2 never rises by E, nor by M; over the head alone with
    `head`."""
    watch = Watch()
    fed = federation(FeSEM(2, distance=distance), clients=6, rounds=3, callbacks=[watch])
    fed.round(1)
    head = slice(64 * 16 + 16, None) if distance == "head" else slice(None)
    for t in (2, 3):
        old, centres = (
            torch.tensor(cluster(fed)),
            torch.stack([centre(fed, k) for k in range(2)]).double(),
        )
        fed.round(t)
        w, new = torch.stack([v for _, v in watch.models[-6:]]).double(), torch.tensor(cluster(fed))
        squares = (w[:, None, head] - centres[:, head]).square().sum(2)
        assert new.tolist() == squares.argmin(1).tolist()
        after = torch.stack([centre(fed, k) for k in range(2)]).double()
        moved = (w[:, None, head] - after[:, head]).square().sum(2)
        sums = [
            float(s[range(6), of].sum()) for s, of in ((squares, old), (squares, new), (moved, new))
        ]
        assert sums[0] >= sums[1] > sums[2]


def test_fesem_counts_the_last_upload_of_who_is_away(federation):
    """A cluster's centre is the mean of all its clients that have uploaded; who has not keeps the
    initial model."""
    watch = Watch()
    fed = federation(FeSEM(2), clients=6, callbacks=[watch], rounds=2)
    fed.round(1, [0, 1, 2])
    record = fed.round(2, [2, 3])
    assert (record.relation.receivers, record.relation.sources) == ([2, 3], [0, 1, 2, 3])
    last = dict(watch.models)  # the last one of each
    of = cluster(fed)
    for k in range(2):
        who = [last[c] for c in range(4) if of[c] == k]
        if who:
            assert_close(centre(fed, k), torch.stack(who).mean(0))
    assert fed.run.server.uploaded == {0, 1, 2, 3}
