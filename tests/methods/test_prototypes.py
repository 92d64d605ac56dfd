"""FedTGP: prototypes that the server learns."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from fl_lightning.methods.fedtgp import LEARNED, FedTGP, adaptive_margin

EXACT = {"precision": "64-true"}


def test_the_margin_is_that_of_the_most_isolated_class():
    """Mean uploads at 0, 3 and 10 on a line: nearest others are 3, 3 and 7 away."""
    uploaded, classes = torch.tensor([[-1.0], [1.0], [3.0], [10.0]]), torch.tensor([4, 4, 0, 2])
    assert adaptive_margin(uploaded, classes, 100.0) == 7.0
    assert adaptive_margin(uploaded, classes, 5.0) == 5.0
    # of one class there is no distance
    assert adaptive_margin(uploaded[:2], classes[:2], 5.0) == 5.0


def modules(memory):
    """The server's prototypes as torch's modules."""
    embedding, inner, inner_bias, outer, outer_bias = (
        memory[f"prototypes.{name}"].clone() for name in LEARNED
    )
    C, d = embedding.shape
    table, layers = nn.Embedding(C, d), nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, d))
    values = (inner, inner_bias, outer, outer_bias)
    for parameter, value in zip(
        (table.weight, *layers.parameters()), (embedding, *values), strict=True
    ):
        parameter.data = value
    return table, layers


def test_a_servers_steps_are_torchs(federation):
    """Two steps, each on all uploads, from modules of torch's own."""
    fed = federation(FedTGP(server_epochs=2, server_lr=0.3), rounds=1, batch_size=1000, **EXACT)
    table, layers = modules(fed.run.server.memory)
    uploads = {}
    kept = type(fed.run.method).aggregate

    class Kept(FedTGP):
        def aggregate(self, server):
            uploads.update(server.statistics)
            kept(self, server)

    fed.run.method = Kept(server_epochs=2, server_lr=0.3)
    fed.round(1)
    means = torch.cat([u["features"] for u in uploads.values()])
    y = torch.cat([u["classes"].long() for u in uploads.values()])
    margin = adaptive_margin(means, y, 100.0)
    steps = torch.optim.SGD([*table.parameters(), *layers.parameters()], 0.3)
    for _ in range(2):
        steps.zero_grad()
        distance = (means[:, None] - layers(table.weight)).norm(dim=2)
        cross_entropy(-(distance + margin * torch.eye(10)[y]), y).backward()
        steps.step()
    assert_close(
        fed.run.server.memory["means.features"], layers(table.weight).detach(), rtol=0, atol=1e-10
    )
