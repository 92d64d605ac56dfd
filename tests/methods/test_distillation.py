"""FedMD, Sim-pFD, TopK-pFD and KT-pFL: invariants of the cards 1.12 and 1.17 to 1.20, and what may
go wrong."""

import numpy as np
import pytest
import torch
from classes import KTPFL, FedMD, KTPFLModels, SimPFD, TopKPFD
from reckoning import seeded
from refusals import refuses
from torch.testing import assert_close
from watching import client_of, models, payload_of, run_all, same, server_of, train

from fl_lightning.callbacks.base import Transform
from fl_lightning.callbacks.simplex import to_simplex
from fl_lightning.engine import scoring
from fl_lightning.engine.phases import job_of
from fl_lightning.foundation.errors import RunFailed
from fl_lightning.methods import ktpfl, simpfd, topkpfd
from fl_lightning.methods.common import predictions as d

SMALL = {"samples": 40, "batch_size": 16}
PUBLIC = {"data": {"public": "held_back"}}
METHODS = [
    FedMD(**SMALL),
    SimPFD(**SMALL),
    TopKPFD(k=2, **SMALL),
    KTPFL(**SMALL),
    KTPFL(update="code", **SMALL),
]


def predictions(m=4, samples=6, classes=3, seed=0):
    draws = seeded(seed)
    return torch.randn(m, samples, classes, generator=draws, dtype=torch.float64).softmax(2)


def weigh(fed, P, told):
    """What the method of `fed` makes of the predictions `P` of `told`."""
    rows = fed.run.method.weigh(server_of(fed), P, told)
    return rows


def aggregate(fed, told):
    """A round has ended in which clients told this."""
    server = server_of(fed)
    server.collect(list(told), told)
    fed.run.method.aggregate(server)


# ---------------------------------------------------------------- formulas


def test_similarity_is_the_cosine_of_flat_predictions_and_the_least_alike_gets_nothing():
    P = predictions()
    S, flat = d.cosines(P), P.flatten(1)
    assert_close(S, torch.cosine_similarity(flat[:, None], flat, dim=2))
    R = simpfd.shifted_shares(S)
    assert_close(R.sum(1), torch.ones(4, dtype=torch.float64))
    assert (R >= 0).all() and ((R == 0).sum(1) >= 1).all()
    assert (R.argmin(1) == S.argmin(1)).all()
    order = torch.tensor([2, 0, 3, 1])
    assert_close(simpfd.shifted_shares(d.cosines(P[order])), R[order][:, order])


@pytest.mark.parametrize("k", [1, 2, 3, 9])
def test_the_nearest_are_k_with_oneself_among_them(k):
    S = d.cosines(predictions(5))
    R = topkpfd.nearest(S, k)
    k = min(k, 5)
    chosen = S.clone().fill_diagonal_(2).topk(k).indices
    assert torch.equal(R, torch.zeros_like(S).scatter(1, chosen, 1 / k))


def test_who_is_equally_near_goes_by_number():
    R = topkpfd.nearest(d.cosines(predictions(1).expand(4, -1, -1)), 2)
    assert [row.nonzero()[:, 0].tolist() for row in R] == [[0, 1], [0, 1], [0, 2], [0, 3]]


def test_the_gradient_of_the_coefficients_is_autograds():
    P = predictions()
    c = torch.rand(4, 4, dtype=torch.float64).requires_grad_()
    teachers = torch.einsum("nj,jdk->ndk", c, P)
    value = (teachers * (teachers / P).log()).sum(2).mean(1).sum()
    (gradient,) = torch.autograd.grad(value, c)
    assert_close(ktpfl.kl_gradient(c.detach(), P), gradient)


def test_the_codes_step_is_at_least_as_long_as_asked_for_and_less_than_five_times():
    """As the authors' loop leaves it: five passes, each divides a mean above 0.01 by 5 and
    multiplies one below it."""
    P, start = predictions(3), torch.full((3, 3), 1 / 3, dtype=torch.float64)
    flat = P.flatten(1)
    gradient = 2 * (start @ flat @ flat.T - flat @ flat.T) / flat.shape[1]
    unit = float(gradient.abs().mean(1)[0])
    # of the mean gradient
    for factor in (1e-5, 0.003, 0.3, 0.45, 0.9, 1.01, 2.3, 4.9, 5.1, 40.0, 1e5):
        mean, scale, size = unit, 1.0, factor * unit
        for _ in range(5):
            if mean > size:
                mean, scale = mean / 5, scale / 5
            if mean < size:
                mean, scale = mean * 5, scale * 5
        stepped = ktpfl.code_step(start, P, rho=0.0, size=size)[0]
        assert_close(stepped, torch.softmax(5 * (start[0] - scale * gradient[0]), 0))
    # no step at all
    assert torch.equal(ktpfl.code_step(start, P, rho=0.0, size=0.0), torch.softmax(5 * start, 1))


@pytest.mark.parametrize("projection", ["simplex", "none"])
@pytest.mark.parametrize("divergence, times", [("mean", 1), ("sum", 40)])
def test_steps_are_those_of_eq_7(federation, divergence, times, projection):
    """Of 40 public samples the sum of Eq. 2 is 40 times as steep as their mean; the pull to 1/N is
    the same. Without a projection, whatever the rows sum to."""
    step = 0.1 / times
    settings = {"divergence": divergence, "projection": projection, "step": step}
    fed = federation(KTPFL(rho=0.3, lam=2.0, **settings, **SMALL), **PUBLIC)
    P, c = predictions(4, 40, 10), torch.full((4, 4), 0.25, dtype=torch.float64)
    sizes = torch.tensor(fed.run.data.train_sizes, dtype=torch.float64)

    def stepped(c, shares, P):
        slope = 2 * times * shares[:, None] * ktpfl.kl_gradient(c, P) + 2 * 0.3 * (c - 0.25)
        return c - step * slope

    for _ in range(3):
        c = stepped(c, sizes / sizes.sum(), P)
        c = to_simplex(c) if projection == "simplex" else c
        assert_close(weigh(fed, P, [0, 1, 2, 3]), c)
    if projection == "none":
        assert not torch.allclose(c.sum(1), torch.ones(4, dtype=torch.float64), atol=1e-3)
        part = stepped(c[:2, :2], sizes[:2] / sizes[:2].sum(), P[:2])
        assert_close(weigh(fed, P[:2], [0, 1])[:2], part)


def test_the_authors_step_has_no_sum():
    with refuses(r"method\.divergence='sum'.*update paper"):
        KTPFL(divergence="sum", update="code")


def test_weights_that_make_no_distribution_are_named(federation):
    fed = federation(KTPFL(projection="none", step=50.0, **SMALL), **PUBLIC)
    told = {c: {"predictions": p.float()} for c, p in enumerate(predictions(4, 40, 10))}
    with pytest.raises(RunFailed, match=r"method\.projection simplex"):
        for _ in range(9):
            aggregate(fed, told)


def test_a_row_whose_weight_has_all_gone_can_come_back(federation):
    fed = federation(KTPFL(**SMALL), **PUBLIC)
    c = torch.zeros(4, 4, dtype=torch.float64)
    c[:, 3] = 1.0
    fed.run.server.memory["coefficients"] = c
    weigh(fed, predictions(2, 40, 10), [0, 1])
    after = fed.run.server.memory["coefficients"]
    assert_close(after.sum(1), torch.ones(4, dtype=torch.float64))
    assert (
        float(after[0, :2].sum()) == pytest.approx(0.5)
        and after[0, 3] == 0.5
        and torch.equal(after[2:], c[2:])
    )


def test_a_row_teaches_its_own_client(federation):
    """INV5: with an asymmetric matrix client 0's teacher is made by row 0."""
    fed = federation(KTPFL(**SMALL), clients=2, **PUBLIC)
    P = predictions(2, 40, 10).float()
    rows = torch.tensor([[0.9, 0.1], [0.4, 0.6]], dtype=torch.float64)
    fed.run.server.memory |= {
        "public.predictions": P,
        "public.told": torch.tensor([0, 1]),
        "public.rows": rows,
    }
    sent = fed.run.method.broadcast(server_of(fed))
    assert_close(sent[0].extra["teacher"], 0.9 * P[0] + 0.1 * P[1])
    assert_close(sent[1].extra["teacher"], 0.4 * P[0] + 0.6 * P[1])


# ---------------------------------------------------------------- the distil phase


def distilled(fed, teacher):
    """A client's model before and after it has met `teacher` in round 2."""
    client = client_of(fed, 0, 2)
    payload = payload_of(client)
    payload.extra["teacher"] = teacher
    phases = iter(fed.run.method.phases(client, payload))
    before = client["model"].clone()
    train(fed, client, next(phases))
    return before, client["model"]


def gap(fed, teacher, t=1):
    """The method's loss of client 0 on the public subset of round `t`, in training mode."""
    module, method = client_of(fed, 0).bind(), fed.run.method
    module.model.train()
    with torch.no_grad():
        loss = method.distillation_loss(
            {}, module, (d.public_subset(fed.run, t, method.samples), teacher)
        )
    return loss


def test_the_loss_is_kl_of_teacher_and_student_at_the_temperature(federation):
    fed = federation(KTPFL(temperature=3.0, lam=0.5, samples=32), precision="64-true", **PUBLIC)
    x, teacher = d.public_subset(fed.run, 1, 32), predictions(1, 32, 10)[0]
    with torch.no_grad():
        s = (client_of(fed, 0).bind().model(x) / 3.0).softmax(1)
    wanted = 0.5 * float((teacher * (teacher / s).log()).sum(1).mean())
    assert float(gap(fed, teacher)) == pytest.approx(wanted)


def test_the_optimiser_keeps_nothing_of_the_distil_phase(federation):
    """With `keep_state` momentum goes from local training to local training."""
    optimizer = {"keep_state": True, "momentum": 0.9}
    fed = federation(FedMD(**SMALL), optimizer=optimizer, **PUBLIC)
    fed.round(1)
    client = client_of(fed, 0, 2)
    sent = fed.run.method.broadcast(server_of(fed))[0]
    distil, local = (job_of(client, phase, 1) for phase in fed.run.method.phases(client, sent))
    assert (distil.keep, len(distil.kept)) == (False, 0)
    assert local.keep and local.kept and all(k.startswith("optimizer.") for k in client.memory)


@pytest.mark.sampled("method1")
@pytest.mark.parametrize("method", METHODS)
def test_the_distilled_model_is_judged_before_it_trains_on(federation, method, monkeypatch):
    """Round t scores what the predictions of round t - 1 made of the models: the end of the paper's
    round t - 1."""
    seen_models = {}
    phases = FedMD.phases

    def watched(self, client, payload):
        for phase in phases(self, client, payload):
            seen_models.setdefault((client.round, client.id), []).append(client["model"].clone())
            yield phase

    monkeypatch.setattr(FedMD, "phases", watched)
    fed = federation(method, **PUBLIC)
    first, second = fed.round(1), fed.round(2)
    assert "accuracy_distilled" not in first.metrics  # nobody has taught anybody
    for row in second.clients:
        client = client_of(fed, int(row["client"]))
        assert len(seen_models[1, client.id]) == 1
        before, distilled = seen_models[2, client.id]
        assert not torch.equal(before, distilled)
        assert not torch.equal(distilled, client["model"])  # it has trained since
        client.bind(distilled)
        assert (
            float(scoring.score("distilled", client, client.data.test)) == row["accuracy_distilled"]
        )
    mean = np.mean([row["accuracy_distilled"] for row in second.clients])
    assert second.metrics["accuracy_distilled"] == pytest.approx(mean)
    unasked = federation(method, evaluation={"models": ["after"]}, **PUBLIC)
    unasked.round(1)
    assert "accuracy_distilled" not in unasked.round(2).metrics
    assert same(models(fed), models(unasked))


# ---------------------------------------------------------------- in a federation


def test_no_public_data_or_too_few(federation):
    with refuses(r"data\.public.*held_back"):
        federation(FedMD(**SMALL)).fit()
    with refuses(r"method\.samples.*30 public samples"):
        federation(FedMD(**SMALL), data={"public": "held_back", "public_samples": 30}).fit()


def test_a_second_attempt_receives_the_same_teacher(federation):
    """A transform that puts another tensor beside the model has not changed what the next attempt
    receives."""
    seen = []

    class Doubles(Transform):
        def on_download(self, client, payload):
            if "teacher" in payload.extra:
                payload.extra["teacher"] = 2 * payload.extra["teacher"]
                seen.extend([payload.extra["teacher"]] if client.id == 1 else [])

        def on_upload(self, client, payload):
            if len(seen) == 1 and client.id == 1:
                raise ValueError("once")

    fed = federation(FedMD(**SMALL), callbacks=[Doubles()], on_bad_client="retry", **PUBLIC)
    assert len(run_all(fed).run.states) == 4
    assert len(seen) == 2 and torch.equal(seen[0], seen[1])


# ---------------------------------------------------------------- of models (1.20)


def test_rho_is_in_units_of_the_spread_where_it_is_solved_exactly():
    assert KTPFLModels().relation().settings.rho_units == "spread"
    assert KTPFLModels(solver="step").relation().settings.rho_units == "absolute"
