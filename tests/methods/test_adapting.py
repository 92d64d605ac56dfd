"""Methods whose clients make a model of their own of the global one when it is scored: Per-FedAvg
(card 1.21), kNN-Per (6.11), FedEM (6.15) and pFedFDA (6.14).
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from classes import FedAvg, FedEM, PerFedAvg
from numpy.testing import assert_allclose
from reckoning import ROUNDING, WHOLE, batch_of, scores_at, seeded, slope, tensors_of
from refusals import refuses
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from watching import Nets, client_of, global_model, payload_of, run_all, train

from fl_lightning.core import Client, Phase
from fl_lightning.engine.joining import join
from fl_lightning.methods import pfedfda
from fl_lightning.methods.knnper import KNNPer, vote
from fl_lightning.methods.pfedfda import Gaussians, PFedFDA


def first(part):
    """All samples of a part."""
    batch = next(iter(part.batches(10_000)))
    return batch


# ---------------------------------------------------------------- Per-FedAvg


@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_perfedavgs_step_by_hand(federation, variant):
    """On three batches, of which the second is the phase's; the loss that is recorded is that at
    w~."""
    method = PerFedAvg(alpha=0.3, variant=variant, delta=1e-4)
    client = client_of(federation(method, precision="64-true", batch_size=16), 1)
    [phase] = method.phases(client, payload_of(client))
    draws = client.generator("further batches")
    D, apart, w = client.batch(draws), client.batch(draws), client["model"].clone()
    assert len(D[1]) == 16 and not torch.equal(D[0], apart[0])
    batch = batch_of(client, 16)
    inner = w - 0.3 * slope(client, w, D)
    g = slope(client, inner, batch)
    if variant == "hf":
        g = (
            g
            - 0.3 * (slope(client, w + 1e-4 * g, apart) - slope(client, w - 1e-4 * g, apart)) / 2e-4
        )
    loss = phase.step(client, batch)
    assert_close(client["model"], w - 0.05 * g, rtol=0, atol=1e-10)
    assert_close(loss, cross_entropy(scores_at(client, inner, batch[0]), batch[1]))


@Nets
def test_perfedavg_scores_a_copy_that_has_taken_a_step(federation, net):
    """INV3: w stays what it is, bit for bit; the step is down the mean over all training data, in
    parts too."""
    method = PerFedAvg(alpha=0.4)
    for size in (500, 11):
        client = client_of(
            federation(method, net=net, precision="64-true", evaluation={"batch_size": size}), 2
        )
        w, module = client["model"].clone(), client.bind()
        personal = method.personal(client)
        assert torch.equal(client["model"], w)
        module.model.eval()
        client.bind(w.clone())
        expected = w - 0.4 * client.gradient(w, first(client.data.train), training=False)[1]
        assert_close(personal, expected, **ROUNDING)
        assert not torch.equal(personal, w)
    assert torch.equal(PerFedAvg(adapt_steps=0).personal(client), w)


# ---------------------------------------------------------------- kNN-Per


def test_the_vote_by_hand():
    """Three of four known samples vote, the two nearest alike: by a gaussian, and by an exponential
    of distances."""
    known = torch.tensor([[0.0, 1.0], [0.0, -1.0], [3.0, 0.0], [50.0, 0.0]])
    labels, z = torch.tensor([2, 0, 2, 1]), torch.zeros(1, 2)
    for kernel, energy in (
        ("gaussian", lambda r: np.exp(-(r**2) / (2 * 4.0))),
        ("exponential", lambda r: np.exp(-r / 4.0)),
    ):
        weights = np.array([energy(1.0), energy(1.0), energy(3.0)])
        weights /= weights.sum()
        votes = vote(z, known, labels, 3, k=3, scale=4.0, kernel=kernel)
        assert_allclose(votes[0], [weights[1], 0, weights[0] + weights[2]], rtol=1e-6)
    # every weight would be 0
    far = vote(z + 1e6, known, labels, 3, k=2, scale=1e-3, kernel="gaussian")
    assert_close(far.sum(1), torch.ones(1))


def test_knnper_without_the_vote_is_fedavg(federation):
    """INV1: bit for bit, whatever is scored; with it only what is scored differs, and the global
    model's score not."""
    records = {}
    for name, method in {"avg": FedAvg(), "zero": KNNPer(lam=0.0), "half": KNNPer(lam=0.5)}.items():
        fed = federation(method, evaluation={"judge": "before"})
        records[name] = (
            [fed.round(t).metrics for t in (1, 2)][-1],
            global_model(fed),
            fed.evaluator.everyone(),
        )
    scores = [name for name in records["avg"][0] if "accuracy" in name]
    assert "accuracy_before" in scores and "accuracy_global" in scores
    assert {k: records["zero"][0][k] for k in scores} == {k: records["avg"][0][k] for k in scores}
    assert all(torch.equal(model, records["avg"][1]) for _, model, _ in records.values())
    assert records["half"][0]["accuracy_global"] == records["avg"][0]["accuracy_global"]
    assert records["half"][0]["accuracy_before"] > records["avg"][0]["accuracy_before"] + 0.1
    assert (
        records["half"][2]["final_mean_accuracy"] > records["zero"][2]["final_mean_accuracy"] + 0.1
    )
    assert records["half"][2]["final_model"] == "personal"


def test_its_nearest_sample_tells_a_training_samples_label(federation):
    """INV2: lam 1, k 1: no error on training data. What is scored is the mixture at the model's own
    features."""
    method = KNNPer(lam=1.0, k=1)
    client = client_of(federation(method), 1)
    client.ready("before", client["model"])
    x, y = first(client.data.train)
    assert (method.outputs(client, x, "before").argmax(1) == y).all()
    half = KNNPer(lam=0.25, k=3)
    client.prepared = half.prepare(client, client["model"], "before")
    client.bind()
    client.module.model.eval()
    scores = client.module.model(x)
    near = vote(
        client.module.features, client.module.features, y, 10, k=3, scale=1.0, kernel="gaussian"
    )
    expected = 0.25 * near + 0.75 * scores.softmax(1)
    assert_close(half.outputs(client, x, "before").exp(), expected)


def test_knnper_picks_the_weight_that_validates_best(federation):
    fed = federation(KNNPer(lam=None), data={"validation": 0.3})
    client = client_of(fed, 1)
    chosen_lam = float(KNNPer(lam=None).prepare(client, client["model"], "before")["lam"])
    right = []
    for lam in np.linspace(0, 1, 11):
        method = KNNPer(lam=float(lam))
        client.ready("before", client["model"])
        client.prepared = method.prepare(client, client["model"], "before")
        x, y = first(client.data.validation)
        client.bind().model.eval()
        right.append(int((method.outputs(client, x, "before").argmax(1) == y).sum()))
    assert max(right) > right[0] and chosen_lam == pytest.approx(0.1 * right.index(max(right)))
    with refuses(r"^data\.validation="):
        federation(KNNPer(lam=None)).prepare()


# ---------------------------------------------------------------- FedEM


def test_what_a_method_adds_to_a_network_is_drawn_from_the_seed(federation):
    """FedEM's second component: the same for equal seeds, another for others."""
    initial, again, other = (
        federation(FedEM(components=2), seed=seed).run.groups[0].initial for seed in (1, 1, 2)
    )
    assert torch.equal(initial, again) and not torch.equal(initial, other)


def test_fedems_steps_by_hand(federation):
    """q ~ pi_k p_k(y|x), pi = mean q (INV3: it sums to 1), theta_k <- theta_k - lr grad sum q_k CE
    / B."""
    fed = federation(FedEM(components=2), rounds=1, **WHOLE)
    client = client_of(fed, 1)
    client.memory["pi"] = torch.tensor([0.8, 0.2], dtype=torch.float64)
    x, y = first(client.data.train)
    leaf = client["model"].clone().requires_grad_()
    net = client.module.model
    tensors = [tensors_of(client.layout, leaf, f"components.{k}.") for k in (0, 1)]
    scores = [functional_call(net.components[k], tensors[k], x) for k in (0, 1)]
    losses = torch.stack([cross_entropy(z, y, reduction="none") for z in scores], 1)
    q = torch.tensor([0.8, 0.2], dtype=torch.float64) * torch.exp(-losses.detach())
    q = q / q.sum(1, keepdim=True)
    assert q.std(0).min() > 0.01  # samples differ
    [gradient] = torch.autograd.grad((q * losses).sum() / len(y), leaf)
    expected = client["model"] - 0.05 * gradient
    [phase] = FedEM().phases(client, payload_of(client))
    assert_close(client.memory["pi"], q.mean(0), **ROUNDING)
    assert float(client.memory["pi"].sum()) == pytest.approx(1)
    train(fed, client, phase)  # in an order of its own: each sample must meet its own q
    assert_close(client["model"], expected, **ROUNDING)


# ---------------------------------------------------------------- pFedFDA


def some(C=3, d=4, seed=0):
    draws = seeded(seed)
    A = torch.randn(d, d, generator=draws, dtype=torch.float64)
    return Gaussians(
        torch.randn(C, d, generator=draws, dtype=torch.float64),
        A @ A.T + torch.eye(d, dtype=torch.float64),
    )


def test_the_discriminant_is_bayes_rule_for_gaussians():
    """Its scores differ from log densities plus log prior by what is the same for all classes."""
    from scipy.stats import multivariate_normal

    estimate, z, prior = (
        some(),
        torch.randn(6, 4, dtype=torch.float64),
        torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64),
    )
    weight, bias = estimate.classifier(prior)
    S = (
        1 - pfedfda.SHRINK
    ) * estimate.covariance + pfedfda.SHRINK * estimate.covariance.trace() / 4 * torch.eye(4)
    density = (
        np.stack([multivariate_normal(m, S).logpdf(z) for m in estimate.means.numpy()], 1)
        + prior.log().numpy()
    )
    scores = (z @ weight.T + bias).numpy()
    assert_allclose(scores - scores[:, :1], density - density[:, :1], atol=1e-9)


def test_estimates_by_hand():
    """A class of two samples scatters about its own mean; only one without any has the mean that is
    known."""
    known, z = some(3, 3), torch.randn(7, 3, dtype=torch.float64)
    y = torch.tensor([0, 0, 0, 0, 0, 1, 1])
    estimate = pfedfda.estimate_gaussians(z, y, known, ridge=0.5)
    for k, rows in enumerate((z[:5], z[5:])):
        assert_close(estimate.means[k], rows.mean(0))
    assert torch.equal(estimate.means[2], known.means[2])
    away = torch.cat([z[:5] - z[:5].mean(0), z[5:] - z[5:].mean(0)])
    assert_close(estimate.covariance, away.T @ away / 6 + 0.5 * torch.eye(3, dtype=torch.float64))


def test_a_small_class_is_scored_by_the_servers_mean_and_told_by_its_own(federation):
    """Of a class with one or two samples; the covariance is the same both times."""
    fed = federation(PFedFDA(beta=1.0), precision="64-true")
    client = client_of(fed, 0)
    known, (x, y) = Gaussians.of(fed.run.server.memory), first(client.data.train)
    small = int(y.bincount().argmax())
    few = torch.cat([(y == small).nonzero()[:2, 0], (y != small).nonzero()[:, 0]])

    class Few:
        def batches(self, size):
            return [(x[few], y[few])]

    def passes(part, vector=None):
        return Client.passes(client, Few(), vector)

    client.passes = passes
    told, scored = (
        PFedFDA(ridge=0.1, beta=1.0).adapted(client, client["model"], n) for n in (1, pfedfda.LEAST)
    )
    assert torch.equal(told.covariance, scored.covariance)
    assert torch.equal(scored.means[small], known.means[small])
    assert not torch.equal(told.means[small], known.means[small])
    others = [k for k in range(10) if k != small and (y == k).sum() >= 3]
    assert others and torch.equal(told.means[others], scored.means[others])


def test_pfedfda_wants_a_classifier_with_a_bias(federation):
    fed = federation(PFedFDA())
    fed.run.groups[0].head = nn.Linear(16, 10, bias=False)
    with refuses(r"^model=.*bias"):
        fed.prepare()


# ---------------------------------------------------------------- all of them


@pytest.mark.parametrize(
    "method", [PerFedAvg(alpha=0.5), KNNPer(), FedEM(), PFedFDA()], ids=lambda m: type(m).__name__
)
def test_who_joins_without_labels_is_not_adapted_to_made_up_ones(federation, method):
    """It is scored by what the server has; with labels it is not."""
    fed = run_all(federation(method, rounds=1))
    new = fed.run.data.client(1, fed.run.device, fed.run.dtype)
    _, _, without = join(fed.worker, new, False, 0)
    _, _, other = join(fed.worker, replace(new, train=fed.run.data.client(2).train), False, 0)
    assert without == other
    if not isinstance(method, FedEM):  # who has not trained has no weights
        assert join(fed.worker, new, True, 0)[2] != without
    assert len(fed.run.data.client(1).train) > 0


def test_targets_are_those_of_the_clients_own_data():
    with refuses(r"^Phase\.targets="):
        Phase(targets=torch.zeros(1), part=object())
