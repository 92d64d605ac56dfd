"""FedAPA: rows of weights that step down by how training moved the mix."""

import pytest
import torch
from reckoning import uploads
from torch.testing import assert_close

from fl_lightning.methods.fedapa import FedAPA

EXACT = {"precision": "64-true", "rounds": 3}


def others(fed):
    """Give all clients a weight on each other: else the first step may be clamped to 0."""
    torch.manual_seed(0)
    fed.run.server.memory["weights"].copy_(0.2 + 0.6 * torch.rand(4, 4, dtype=torch.float64))


def rows_of(memory):
    """What the next mixes go by."""
    a = memory["weights"].clone().fill_diagonal_(1)
    return a / a.sum(1, keepdim=True)


@pytest.mark.parametrize("momentum, classifier", [(0.0, "mixed"), (0.9, "own")])
def test_rows_step_as_autograd_says(federation, momentum, classifier):
    """In two rounds, on the half of the squared distance of the mix from what it was trained to."""
    fed = federation(
        FedAPA(eta=0.03, momentum=momentum, classifier=classifier), net="norm", **EXACT
    )
    fed.round(1)
    others(fed)
    blocks = fed.run.groups[0].layout.blocks
    sent = torch.zeros(fed.run.groups[0].layout.size, dtype=torch.bool)
    for b in blocks:
        sent[b.start : b.stop] = b.kind == "parameter" and (classifier == "mixed" or not b.head)
    moment = fed.run.server.memory["weights.moment"].clone()
    for t in (2, 3):
        w, rows = (
            torch.stack(uploads(fed))[:, sent],
            rows_of(fed.run.server.memory).requires_grad_(),
        )
        fed.round(t)
        mine = torch.stack(uploads(fed))[:, sent]
        [slope] = torch.autograd.grad((rows @ w - mine).square().sum() / 2, rows)
        moment = momentum * moment + slope
        want = (rows.detach() - 0.03 * moment).clamp(0, 1)
        assert_close(fed.run.server.memory["weights"], want, rtol=0, atol=1e-9)
        assert (want - rows.detach()).abs().max() > 1e-5
