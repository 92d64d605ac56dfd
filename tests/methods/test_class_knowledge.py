"""FedProto and FedHKD: what class means promise (cards 1.8, 1.32 and 1.33)."""

import math

import numpy as np
import pytest
import torch
from classes import FedAvg, FedProto
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from refusals import refuses
from scipy.optimize import brentq
from scipy.stats import norm
from torch import nn
from torch.testing import assert_close
from watching import client_of, run_all, same, server_of, trained

from fl_lightning.core import Layout
from fl_lightning.foundation.rng import generator
from fl_lightning.methods.classmeans import distance_to_means
from fl_lightning.methods.fedhkd import FedHKD, gaussian_epsilon, noise_multiplier, noisy
from fl_lightning.training.module import ClientModule

THREE = {"rounds": 3}


def pooled(fed):
    """Mean feature of each class over all clients' samples, each client's by its own model; and
    which classes exist."""
    features, labels = [], []
    for c in range(fed.run.clients):
        module = client_of(fed, c).bind()
        module.model.eval()
        for x, y in fed.run.data.client(c).train.batches(1000):
            with torch.no_grad():
                module.model(x)
            features.append(module.features)
            labels.append(y)
    x, y = torch.cat(features), torch.cat(labels)
    return torch.stack(
        [x[y == j].mean(0) if (y == j).any() else torch.zeros(x.shape[1]) for j in range(10)]
    ), y


def test_who_is_not_in_the_cohort_counts_with_what_it_told_last(federation):
    """A round without training: each client's means are those of its model, whenever it told
    them."""
    fed = federation(FedProto(lam=0.0), participation=0.5, rounds=3, optimizer={"lr": 1e-12})
    counts = np.asarray(fed.run.data.class_counts)
    for t, cohort in ((1, [0, 1]), (2, [2, 3]), (3, [1, 2])):
        fed.round(t, cohort)
        known = fed.run.server.memory["means.known"].numpy()
        assert known.tolist() == (counts[: 2 if t == 1 else 4].sum(0) > 0).tolist()
    want, _ = pooled(fed)
    assert_close(fed.run.server.memory["means.features"], want, rtol=1e-4, atol=1e-5)
    # all take part: there is nothing to keep
    assert "last.counts" not in federation(FedProto()).run.server.memory


def resident():
    """A client of one linear classifier on four features."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    layout = Layout(model, "1")
    module = ClientModule(model, layout, 3, features=True)
    module.binding.bind(*layout.read(model))
    return module


def tables(known):
    torch.manual_seed(1)
    return {
        "features": torch.randn(3, 4),
        "predictions": torch.rand(3, 3).softmax(1),
        "known": torch.tensor(known),
    }


@pytest.mark.parametrize("distance", ["means", "squared", "norm"])
def test_the_distance_to_prototypes_is_what_it_says(distance):
    module, means = resident(), tables([True, False, True])
    x, y = torch.randn(5, 6), torch.tensor([0, 1, 2, 1, 0])
    module.model(x)
    f = module.features
    each = [(f[k] - means["features"][y[k]]).pow(2) for k in range(5) if means["known"][y[k]]]
    want = sum((e.mean() if distance == "squared" else e.sum().sqrt()) for e in each) / 5
    if distance == "means":  # of class 1 nothing is known
        want = sum((f[y == j].mean(0) - means["features"][j]).norm() for j in (0, 2))
    assert_close(distance_to_means(f, y, means, distance), want)
    loss = FedProto(lam=0.3, distance=distance).loss(means, module, (x, y))
    assert_close(loss - module.task_loss((x, y)), 0.3 * want)
    # A class that nobody holds adds nothing, not even a gradient.
    nothing = distance_to_means(f, torch.ones(5, dtype=torch.int64), means, distance)
    assert nothing == 0
    assert all((g == 0).all() for g in torch.autograd.grad(nothing, module.model[0].parameters()))


def test_at_the_prototype_itself_the_gradient_is_finite():
    module, x = resident(), torch.randn(2, 6)
    module.model(x)
    z = module.features.detach().clone()
    means = {"features": torch.cat([z, z[:1]]), "known": torch.ones(3, dtype=torch.bool)}
    for distance in ("means", "norm"):
        term = distance_to_means(module.features, torch.tensor([0, 1]), means, distance)
        (gradient,) = torch.autograd.grad(term, module.model[0].weight, retain_graph=True)
        assert gradient.isfinite().all()


def test_scores_by_prototypes_are_distances_to_those_that_are_known(federation):
    method = FedProto(predict="prototype")
    fed = run_all(federation(method, rounds=1))
    client, memory = client_of(fed, 0), fed.run.server.memory
    x, _ = next(client.data.test.batches(20))
    module = client.bind()
    module.model.eval()
    with torch.no_grad():
        memory["means.known"][[2, 7]] = False
        scores = method.outputs(client, x, "after")
        want = [-(module.features - memory["means.features"][j]).norm(dim=1) for j in range(10)]
        assert (scores[:, [2, 7]] == -math.inf).all()
        for j in (0, 1, 3, 4, 5, 6, 8, 9):
            assert_close(scores[:, j], want[j], rtol=1e-3, atol=1e-3)
        memory["means.known"][:] = False
        assert torch.equal(method.outputs(client, x, "after"), module.model(x))


# ---------------------------------------------------------------- FedHKD


def test_a_threshold_that_shuts_everyone_out_is_fedavg_and_says_so(federation, capsys):
    counts = federation(FedAvg()).run.data.class_counts
    # so that nobody's data is all one class
    assert all((np.asarray(c) > 0).sum() > 1 for c in counts)
    assert same(
        trained(federation, FedHKD(nu=1.0), **THREE), trained(federation, FedAvg(), **THREE)
    )
    assert "round 1: no client uploaded the mean of any class" in capsys.readouterr().err


def test_the_noise_has_the_variance_of_the_mechanism(federation):
    nothing, counts = torch.zeros(10, 5000), torch.full((10,), 256)
    noise = noisy(nothing, counts, 7.0, 3.0, generator(0, "noise"))
    assert float(noise.var()) == pytest.approx((2 * 3 * 7 / 256) ** 2, rel=0.03)  # 0.0269
    # What a client tells: other noise in every round, and other than anybody else's; the same once
    # more.
    # features of hardly any size: the noise is what is left
    fed = federation(FedHKD(zeta=1e-9), rounds=1)
    told = [
        FedHKD(zeta=1e-9).means(client_of(fed, c, t))["features"]
        for c, t in ((0, 1), (0, 1), (0, 2), (1, 1))
    ]
    counts = torch.from_numpy(fed.run.data.class_counts[0]).clamp_min(1)
    assert float((told[0] * counts[:, None]).var()) == pytest.approx((2e-9 * 7) ** 2, rel=0.3)
    assert (
        torch.equal(told[0], told[1])
        and not torch.equal(told[0], told[2])
        and not torch.equal(told[0], told[3])
    )


def added(method, means, module, batch):
    """What `means` add to the task loss."""
    return method.loss(means, module, batch) - module.task_loss(batch)


def test_the_terms_are_worth_their_formulas_and_the_classifiers_spares_the_features():
    module, means = resident(), tables([True, False, True])
    x, y = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    plain = module.task_loss((x, y))
    loss = FedHKD(temperature=0.5, lam=0.3, gamma=0.0).loss(means, module, (x, y))
    G = module.head
    want = sum(
        ((G(means["features"][j]) / 0.5).softmax(0) - means["predictions"][j]).norm()
        for j in (0, 2)
    )
    assert_close(loss - plain, 0.3 * want / 3)
    body = module.model[0].weight
    assert torch.equal(*(torch.autograd.grad(f, body, retain_graph=True)[0] for f in (plain, loss)))
    head = G.weight
    assert not torch.equal(
        *(torch.autograd.grad(f, head, retain_graph=True)[0] for f in (plain, loss))
    )
    both = added(FedHKD(temperature=0.5, lam=0.3, gamma=0.7), means, module, (x, y))
    f = module.features
    pull = sum((f[k] - means["features"][y[k]]).norm() for k in (0, 2, 3)) / 4
    assert_close(both, 0.3 * want / 3 + 0.7 * pull)


@pytest.mark.parametrize("method, known", [(FedProto(), [2, 5]), (FedHKD(lam=0.0, gamma=0.0), [2])])
def test_a_class_that_nobody_told_is_forgotten_or_kept(federation, method, known):
    fed = federation(method, rounds=1)
    fed.run.server.memory["means.known"][5] = True
    rows = {name: torch.ones(1, {"features": 16, "predictions": 10}[name]) for name in method.names}
    server = server_of(fed, [])
    server.collect([], {0: {"classes": torch.tensor([2]), "counts": torch.tensor([4]), **rows}})
    method.aggregate(server)
    assert server.memory["means.known"].nonzero()[:, 0].tolist() == known
    assert (server.memory["means.features"][2] == 1).all()


def test_the_privacy_report_is_the_gaussian_mechanisms(federation):
    """Against the exact condition of Balle and Wang (ICML 2018), Theorem 8, for the composed noise
    sigma / sqrt(T)."""

    def delta(epsilon, sigma):
        a, b = 1 / (2 * sigma), epsilon * sigma
        return norm.cdf(a - b) - math.exp(epsilon) * norm.cdf(-a - b)

    for rounds in (1, 50):
        exact = brentq(lambda e, s: delta(e, s) - 1e-5, 0, 50, args=(7 / math.sqrt(rounds),))
        assert gaussian_epsilon(7.0, rounds, 1e-5) == pytest.approx(exact, rel=2e-3)
    summary = federation(FedHKD(), rounds=3).fit()
    assert summary["privacy_epsilon"] > summary["privacy_epsilon_round"] > 0
    method = FedHKD(clip=False)
    summary = method.summary(federation(method, rounds=3).run)
    assert summary["privacy_epsilon"] == math.inf  # features without a bound: no guarantee


def test_bounds_on_coordinates_and_on_norms_promise_different_things(federation):
    """A vector of d bounded coordinates is d mechanisms at once: an accountant composes coordinates
    and rounds."""

    def report(**changes):
        method = FedHKD(**changes)
        return method.summary(federation(method, rounds=3).run)  # PlainNet: 16 features

    def composed(times):
        accountant = PLDAccountant()
        accountant.compose(SelfComposedDpEvent(GaussianDpEvent(7.0), times))
        return float(accountant.get_epsilon(1e-5))

    whole, each = report(), report(bound="coordinate")
    for name, rounds in (("privacy_epsilon_round", 1), ("privacy_epsilon", 3)):
        one = name.replace("epsilon", "epsilon_coordinate")
        assert whole[name] == each[one] == pytest.approx(composed(rounds), rel=1e-4)
        # sigma / sqrt(16), not sigma
        assert each[name] == pytest.approx(composed(16 * rounds), rel=1e-4)
        assert one not in whole
    none = report(bound="coordinate", sigma=0.0)
    assert none["privacy_epsilon"] == none["privacy_epsilon_coordinate"] == math.inf


@pytest.mark.parametrize("bound", ["norm", "coordinate"])
def test_no_sample_moves_a_class_mean_further_than_its_bound(bound):
    """The sensitivity behind the report, met by the worst pair of samples: 2 zeta / N, sqrt(d)
    times it for corners."""
    method, n, width = FedHKD(bound=bound, zeta=3.0), 8, 16
    rest, corner = torch.randn(n - 1, width), torch.full((1, width), 100.0)
    means = [method.within_zeta(torch.cat([rest, end])).mean(0) for end in (corner, -corner)]
    moved = float((means[0] - means[1]).norm())
    assert moved * n / (2 * 3.0) == pytest.approx(1.0 / (noise_multiplier(1.0, width, bound)))


def test_a_classifier_of_two_layers_is_refused(federation):
    run = federation(FedAvg()).run
    run.groups[0].head = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    with refuses("a single nn.Linear"):
        FedProto().init_server(run)


def test_a_client_may_predict_among_its_own_classes_alone(federation):
    """With `among own`: of all known prototypes the nearest of those classes of which it has
    training samples."""
    fed = run_all(
        federation(
            FedProto(), data={"partition": "pathological", "classes_per_client": 2}, rounds=1
        )
    )
    assert fed.run.server.memory["means.known"].sum() > 2
    for c in range(4):
        client = client_of(fed, c)
        client.bind()
        x, _ = next(client.data.test.batches(1000))
        own = client.class_counts > 0
        every, few = (FedProto(among=among).outputs(client, x, "after") for among in ("all", "own"))
        assert torch.equal(few.isfinite().any(0), own & fed.run.server.memory["means.known"])
        assert torch.equal(few[:, own], every[:, own])
        fed.run.server.memory["means.known"] = fed.run.server.memory["means.known"].clone()
    elsewhere = torch.zeros(10, dtype=torch.bool)
    elsewhere[(client.class_counts == 0).nonzero()[0]] = True
    assert torch.equal(FedProto(among="own").candidates(client, elsewhere), elsewhere)


def test_features_are_brought_within_zeta_before_the_mean():
    x = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    bounded = FedHKD(zeta=1.0).within_zeta(x)
    assert_close(bounded, torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))
    # the paper's: coordinate by coordinate
    each = FedHKD(zeta=0.35, bound="coordinate").within_zeta(-x)
    assert_close(each, -torch.tensor([[0.35, 0.35], [0.3, 0.35], [0.0, 0.0]]))
    assert torch.equal(FedHKD(zeta=1.0, clip=False).within_zeta(x), x)
    assert torch.equal(FedHKD(zeta=1.0, sigma=0.0).within_zeta(x), x)
