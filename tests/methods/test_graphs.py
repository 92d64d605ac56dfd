"""Methods whose clients mix by a graph: HeurFedAMP (card 1.6), FedU (1.31), pFedGraph (6.7) and
pFedLA (1.11)."""

import numpy as np
import torch
from classes import FedU, PFedLA
from reckoning import batch_of, seeded, uploads
from torch.testing import assert_close
from watching import Watch, client_of, module_of, server_of

from fl_lightning.callbacks.graphs import CollaborationGraph, CosineAttention
from fl_lightning.callbacks.simplex import to_simplex
from fl_lightning.core import Gram, RelationInputs
from fl_lightning.methods.pfedgraph import PFedGraph, alignment


def inputs_of(W, samples=None, **memory):
    """What a relation sees of the models `W` (n, D), all of which receive."""
    everyone, mean = list(range(len(W))), W.mean(0)
    D = W - mean
    gram = Gram((D @ D.T)[None], (D @ mean)[None], (mean @ mean)[None])
    shares = torch.tensor(samples or [1.0] * len(W), dtype=torch.float64)
    return RelationInputs(everyone, everyone, shares, 1, len(W), memory, lambda since="zero": gram)


def random_models(n=5):
    return torch.randn(n, 7, dtype=torch.float64, generator=seeded(3))


# ---------------------------------------------------------------- HeurFedAMP


def test_heurfedamps_rows(federation):
    """INV1: one's own weight is given, the rest is a softmax of cosines over the others; rows sum
    to 1."""
    W = random_models()
    rows = CosineAttention(0.3, 2.0).weights(inputs_of(W))[0]
    others = torch.exp(2 * torch.cosine_similarity(W[:, None], W[None], dim=2)).fill_diagonal_(0)
    expected = 0.7 * others / others.sum(1, keepdim=True) + 0.3 * torch.eye(5, dtype=torch.float64)
    assert_close(rows, expected)
    assert CosineAttention(0.3, 2.0).weights(inputs_of(W[:1])).tolist() == [[[1.0]]]


# ---------------------------------------------------------------- FedU


def test_fedus_step_is_the_papers(federation):
    """INV2: the sum of models is kept; every model is the formula's, from models that nobody has
    moved (INV4)."""
    watch = Watch()
    fed = federation(FedU(gamma=0.1), callbacks=[watch], precision="64-true")
    fed.round(1)
    w, a = torch.stack(uploads(fed)), fed.run.server.memory["graph"]
    fed.round(2)
    moved = torch.stack([v for _, v, _ in watch.downloads[4:]])
    for k in range(4):
        expected = w[k] - 0.1 * sum(a[k, j] * (w[k] - w[j]) for j in range(4))
        assert_close(moved[k], expected)
    assert_close(moved.sum(0), w.sum(0))
    assert not torch.allclose(moved, w)


# ---------------------------------------------------------------- pFedGraph


def test_pfedgraphs_rows_solve_their_problem():
    """alpha ||r - p||^2 - cos r over the simplex; INV4: no order."""
    W, n = random_models(), [1.0, 2.0, 3.0, 4.0, 5.0]
    relation, x = CollaborationGraph(0.8, 1.0), inputs_of(W, n)
    rows, p = relation.weights(x)[0], x.samples / 15
    cos = torch.cosine_similarity(W[:, None], W[None], dim=2)
    assert_close(rows, to_simplex(p + cos / 1.6))
    order = torch.tensor([3, 1, 4, 0, 2])
    again = relation.weights(inputs_of(W[order], [n[k] for k in order]))[0]
    assert_close(again, rows[order][:, order])


def test_who_has_not_uploaded_is_like_nobody(federation):
    """Its change is 0, whatever its inner products round to: it weighs by samples, with the initial
    model."""
    fed = federation(PFedGraph(lam=0.0), clients=5)
    fed.round(1, [0, 1, 2])
    rows = fed.round(2, [2, 3]).relation.rows[:, 0]
    n = np.array([size if c < 4 else 0 for c, size in enumerate(fed.run.data.train_sizes)])
    np.testing.assert_allclose(rows[1], n[:4] / n.sum(), atol=1e-6)
    assert rows[0, 3] == 0 and np.abs(rows[0] - n[:4] / n[:3].sum()).max() > 0.01


def test_pfedgraphs_term_raises_the_cosine(federation):
    """INV3: the sign. Its gradient is that of -lam <w, u> / ||w||."""
    fed = federation(PFedGraph(lam=0.5), precision="64-true")
    fed.round(1)
    client, module = client_of(fed, 0, 2), module_of(fed)
    payload = fed.run.method.broadcast(server_of(fed))[0]
    u, w = payload.further[0].vector, client["model"].clone()
    [phase] = list(_first(fed.run.method.phases(client, payload)))
    client.bind(w)
    batch = batch_of(client)
    loss = phase.objective.loss
    with_term = torch.autograd.grad(loss(module, batch), module.binding.parameters)
    plain = torch.autograd.grad(module.task_loss(batch), module.binding.parameters)
    leaf = w.clone().requires_grad_()
    [expected] = torch.autograd.grad(-0.5 * (leaf @ u) / leaf.norm(), leaf)
    blocks = fed.run.groups[0].layout.blocks
    for b, a, p in zip(blocks, with_term, plain, strict=True):
        assert_close((a - p).flatten(), expected[b.start : b.stop], rtol=1e-6, atol=1e-12)
    with torch.no_grad():
        before = float(alignment(module, u))
        client.bind(w - 0.1 * expected)
        assert float(alignment(module, u)) > before


def _first(phases):
    """The first phase of a generator: the client has trained nothing yet."""
    yield next(iter(phases))


# ---------------------------------------------------------------- pFedLA


def test_pfedlas_step_is_down_the_jacobian(federation):
    """psi, v <- psi, v - lr J^T (mix - trained), against autograd through the mix itself; others'
    networks stay."""
    fed = federation(PFedLA(hyper_lr=0.1, hidden=5, embedding=3), precision="64-true", rounds=2)
    fed.round(1)
    w, relation, memory = torch.stack(uploads(fed)), fed.run.relation, fed.run.server.memory
    network = relation.network({k: v.clone() for k, v in memory.items()}, 1)
    kept = {k: v.clone() for k, v in memory.items()}
    rows = relation.rows(network, 4, 1, range(4)).double()
    fed.round(2, [1])
    trained, loss = fed.run.states[1].vectors["model"], torch.zeros((), dtype=torch.float64)
    for b in fed.run.groups[0].layout.blocks:
        mix = rows[b.layer] @ w[:, b.start : b.stop]
        loss = loss + ((mix - trained[b.start : b.stop]).detach() * mix).sum()
    found = torch.autograd.grad(loss, list(network.parameters()))
    for (name, p), gradient in zip(network.named_parameters(), found, strict=True):
        assert_close(memory[f"rows.1.{name}"], p - 0.1 * gradient, rtol=1e-3, atol=1e-5)
    assert all(torch.equal(v, kept[k]) for k, v in memory.items() if not k.startswith("rows.1."))


def test_a_row_of_zeros_is_ones_own(federation):
    fed = federation(PFedLA(), rounds=1)
    relation, memory = fed.run.relation, fed.run.server.memory
    last = max((k for k in memory if k.startswith("rows.2.")), key=lambda k: int(k.split(".")[2]))
    for name in (last.replace("bias", "weight"), last.replace("weight", "bias")):
        memory[name].fill_(-1.0)
    rows = relation.rows(relation.network(memory, 2), 4, 2, range(4))
    assert torch.equal(rows.detach(), torch.eye(4)[[2, 2]])
