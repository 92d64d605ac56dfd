"""Methods whose server has more than one model: CFL (card 6.2) and pFedHN (1.24)."""

import pytest
import torch
from classes import SCAFFOLD, FedAvg, PFedHN
from refusals import refuses
from torch import nn
from torch.testing import assert_close
from watching import Watch, global_model, models, run_all

from fl_lightning.callbacks.robust import Median
from fl_lightning.engine.joining import join
from fl_lightning.methods.cfl import CFL, halves
from fl_lightning.methods.common.hypernetwork import Hypernetwork

EAGER = {"eps1": 1e9, "eps2": 0.0, "first_round": 1}
"""A cluster of more than two is split in every round."""
PLANTED = {"partition": "iid", "planted": "labels", "groups": 3}
"""Six clients in three groups that disagree about labels: 0 and 3, 1 and 4, 2 and 5."""


# ---------------------------------------------------------------- CFL


def cluster(fed):
    """Of every client."""
    found = fed.run.server.memory["cluster"].tolist()
    return found


def test_halves_of_opposed_updates():
    """INV3: cosine 1 within and -1 across, of any lengths and in any order; where all are alike
    there are two, too."""
    direction, signs = (
        torch.randn(5, dtype=torch.float64),
        torch.tensor([1.0, -2.0, 3.0, 0.5, -0.1, -7.0]),
    )
    updates = signs[:, None] * direction
    found = halves(updates @ updates.T)
    assert [h == found[0] for h in found] == [True, False, True, True, False, False]
    alike = torch.ones(4, 3, dtype=torch.float64)
    assert set(halves(alike @ alike.T)) == {0, 1}
    assert set(halves(torch.zeros(3, 3, dtype=torch.float64))) == {0, 1}


def test_halves_by_complete_linkage():
    """By its farthest members: a chain at 0, 30, 61 and 93 degrees is cut in the middle, not at its
    widest gap."""
    angles = torch.deg2rad(torch.tensor([0.0, 30.0, 61.0, 93.0], dtype=torch.float64))
    updates = torch.stack([angles.cos(), angles.sin()], 1)
    a, b, c, d = halves(updates @ updates.T)
    assert a == b != c == d


def test_two_splits_find_the_planted_groups(federation):
    """INV1: after the second split too, clusters are of clients, not of places within the cluster
    that was split."""
    fed = federation(CFL(**EAGER), clients=6, rounds=3, local_epochs=3, data=PLANTED)
    fed.round(1)
    first = cluster(fed)
    assert len(set(first)) == 2 and all(first[c] == first[c + 3] for c in range(3))
    fed.round(2)
    found = cluster(fed)
    assert len(set(found)) == 3 and all(found[c] == found[c + 3] for c in range(3))
    fed.round(3)
    assert cluster(fed) == found  # clusters of two stay


def test_a_new_client_gets_the_only_model_or_the_one_that_suits_its_samples(federation):
    fed = federation(CFL(**EAGER | {"first_round": 2}), clients=6, data=PLANTED)
    fed.round(1)
    new = fed.run.data.client(0)
    model, *_ = join(fed.worker, new, False, 0)
    assert torch.equal(model, global_model(fed))
    fed.round(2)
    client = fed.evaluator.at_rest(0)
    suits = min(
        (fed.evaluator.global_model(c) for c in range(6)), key=lambda v: client.loss(new.train, v)
    )
    assert torch.equal(join(fed.worker, new, True, 0).vector, suits)
    of = torch.tensor(cluster(fed)).bincount(
        weights=torch.tensor(fed.run.data.train_sizes).double()
    )
    largest = fed.evaluator.global_model(cluster(fed).index(int(of.argmax())))
    assert torch.equal(join(fed.worker, new, False, 0).vector, largest)


@pytest.mark.parametrize(
    "eps1, eps2, splits", [(1.01, 0.99, True), (0.99, 0.99, False), (1.01, 1.01, False)]
)
def test_what_a_split_waits_for(federation, eps1, eps2, splits):
    """||sum p_i D_i|| < eps1 and max ||D_i|| > eps2, of the parameters' changes in this round."""
    watch = Watch()
    fed = run_all(federation(FedAvg(), net="norm", callbacks=[watch]))
    group, n = fed.run.groups[0], torch.tensor(fed.run.data.train_sizes, dtype=torch.float64)
    parameters = [slice(b.start, b.stop) for b in group.layout.blocks if b.kind == "parameter"]
    second = zip(watch.models[4:], watch.downloads[4:], strict=True)
    changes = torch.stack(
        [torch.cat([(w - sent)[s] for s in parameters]) for (_, w), (_, sent, _) in second]
    ).double()
    mean, largest = float((n / n.sum() @ changes).norm()), float(changes.norm(dim=1).max())
    method = CFL(eps1=eps1 * mean, eps2=eps2 * largest, first_round=2)
    assert (len(set(cluster(run_all(federation(method, net="norm"))))) == 2) == splits


# ---------------------------------------------------------------- pFedHN

PLAIN = {"hyper_momentum": 0.0, "hyper_decay": 0.0, "hyper_lr": 0.01}


def hyper(run):
    """A copy of the hypernetwork as it stands."""
    return Hypernetwork.of({k: v.clone() for k, v in run.server.memory.items()})


def test_a_step_is_down_the_jacobian(federation):
    """phi, v <- phi, v - lr J^T (h(v_i) - trained), with J worked out entry by entry."""
    fed = federation(PFedHN(hidden=3, hidden_layers=1, **PLAIN))
    network = hyper(fed.run)
    weights = {name: p.detach() for name, p in network.named_parameters()}
    jacobian = torch.func.jacrev(lambda w: torch.func.functional_call(network, w, torch.tensor(1)))(
        weights
    )
    fed.round(1, [1])
    used = fed.run.groups[0].layout.parameters
    with torch.no_grad():
        gap = network(torch.tensor(1)) - models(fed)[0][used]
    for b, after in zip(
        fed.run.groups[0].layout.blocks, fed.run.groups[0].layout.blocks[1:], strict=False
    ):
        gap[b.stop : after.start] = 0
    for name, w in weights.items():
        step = torch.tensordot(gap, jacobian[name], 1)
        assert_close(
            fed.run.server.memory[f"hypernetwork.{name}"], w - 0.01 * step, rtol=1e-4, atol=1e-6
        )


def test_the_optimizer_goes_on_from_round_to_round(federation):
    """Momenta, weight decay and clipping are those of one SGD over all steps, one client after the
    other."""
    fed = federation(PFedHN(clip=0.5), rounds=3)
    network = hyper(fed.run)
    # a cohort of four
    optimizer = torch.optim.SGD(network.parameters(), 0.01 / 4, 0.9, weight_decay=0.001)
    used = fed.run.groups[0].layout.parameters
    for t in (1, 2, 3):
        sent = [fed.evaluator.global_model(c) for c in range(4)]
        fed.round(t)
        for c, w in enumerate(models(fed)):
            made, first = network(torch.tensor(c)), sent[c]
            assert first is not None
            optimizer.zero_grad()
            made.backward((first - w)[used])
            assert nn.utils.clip_grad_norm_(network.parameters(), 0.5) > 0.5
            optimizer.step()
    for name, p in network.named_parameters():
        assert_close(p.detach(), fed.run.server.memory[f"hypernetwork.{name}"])


@pytest.mark.parametrize("last_relu", [True, False])
def test_a_hypernetwork_is_found_again_by_its_tensors(last_relu):
    """In whatever order they come back from a file, and with more than ten layers."""
    torch.manual_seed(0)
    network = Hypernetwork(
        clients=3, numbers=7, embedding=2, hidden=4, layers=5, last_relu=last_relu
    )
    assert sum(isinstance(layer, nn.ReLU) for layer in network) == 5 + last_relu
    memory = dict(sorted(network.tensors().items()))
    again = Hypernetwork.of(memory)
    with torch.no_grad():
        assert torch.equal(again(torch.tensor(1)), network(torch.tensor(1)))
        again[0].weight.zero_()
    assert not memory["hypernetwork.0.weight"].any()
    assert again.multiply_adds == 2 * 4 + 5 * 4 * 4 + 4 * 7


@pytest.mark.parametrize("method", [PFedHN(), SCAFFOLD()])
def test_an_aggregator_has_nothing_to_aggregate(federation, method):
    with refuses(r"^callbacks"):
        federation(method, callbacks=[Median()]).prepare()
