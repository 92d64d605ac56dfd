"""What must hold of every method, bit for bit where the cards say so (cards 1.1 to 1.6 and
1.35)."""

import numpy as np
import pytest
import torch
from classes import KAPC, FedAMP, FedAvg, FedProx, Local
from every import NAMES, method_of
from refusals import refuses
from torch.testing import assert_close
from watching import (
    Watch,
    client_of,
    global_model,
    models,
    module_of,
    run_all,
    same,
    server_of,
)

IMAGES = [name for name in NAMES if name != "partialpooling"]
"""Methods that take images."""


def models_by_client(fed):
    """Copies of the models of all clients that have taken part."""
    return {c: s.vectors["model"].clone() for c, s in fed.run.states.items()}


# ---------------------------------------------------------------- local (1.1)


def test_local_knows_nothing_of_the_others(federation):
    """INV1, INV2: other clients' data do not matter, and nothing travels."""
    one = models(run_all(federation(Local())))
    other = federation(Local())
    for client in (1, 2, 3):
        other.run.data.client(client).train.x.neg_()
    changed = models(run_all(other))
    assert torch.equal(one[0], changed[0])
    assert not torch.equal(one[1], changed[1])
    record = federation(Local()).round(1)
    assert record.metrics["upload_bytes"] == record.metrics["download_bytes"] == 0


def test_local_rounds_of_epochs_are_one_round_of_all_of_them(federation):
    """INV4: randomness belongs to the absolute epoch."""
    one = run_all(federation(Local(), rounds=3, local_epochs=2))
    other = run_all(federation(Local(), rounds=1, local_epochs=6))
    assert same(models(one), models(other))


def test_local_stops_when_its_epochs_are_spent(federation):
    """The papers' local row: so many epochs in all, counted by each client's own turns."""
    one = run_all(federation(Local(epochs=3), rounds=3, local_epochs=2))
    other = run_all(federation(Local(), rounds=1, local_epochs=3))
    assert same(models(one), models(other))
    assert {s.rounds for s in one.run.states.values()} == {3}
    watch = Watch()
    fed = run_all(federation(Local(epochs=1), callbacks=[watch], participation=0.5, rounds=4))
    for client in fed.run.states:
        first, *later = [model for c, model in watch.models if c == client]
        assert not torch.equal(first, fed.run.groups[0].initial)
        assert same(later, [first] * len(later))
    assert len(watch.models) > len(fed.run.states)


def test_a_client_that_is_not_drawn_does_not_change(federation):
    """INV3, for personal and for coached clients."""
    for method in (Local(), KAPC(), FedAMP()):
        fed = federation(method, participation=0.5, rounds=4)
        for t in range(1, 5):
            before = models_by_client(fed)
            cohort = fed.round(t).cohort
            assert len(cohort) == 2
            after = models_by_client(fed)
            assert all(
                torch.equal(after[c], model) for c, model in before.items() if c not in cohort
            )


# ---------------------------------------------------------------- FedAvg (1.2, 1.3)


def test_fedavg_with_full_batches_is_gradient_descent(federation):
    """INV2: w' = w - lr sum p_i grad f_i(w), in float64."""
    fed = federation(FedAvg(), batch_size=10_000, precision="64-true", rounds=1)
    before = global_model(fed).clone()
    gradients, total, module = (
        torch.zeros_like(before),
        sum(fed.run.data.train_sizes),
        module_of(fed),
    )
    for c in range(fed.run.clients):
        part = fed.run.data.client(c, "cpu", torch.float64).train
        module.binding.bind(before.clone(), [])
        (batch,) = part.batches(10_000)
        found = torch.autograd.grad(module.task_loss(batch), module.binding.parameters)
        for g, b in zip(found, module.layout.blocks, strict=False):
            gradients[b.start : b.stop] += len(part) / total * g.flatten()
    fed.round(1)
    assert_close(global_model(fed), before - 0.05 * gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", [FedAvg(), FedProx(mu=0.1)], ids=["fedavg", "fedprox"])
def test_fine_tuning_scores_a_copy(federation, method):
    """1.3, 1.5: the server's state and the bytes are those without fine-tuning."""
    plain = run_all(federation(method))
    tuned = federation(method, evaluation={"models": ["finetuned", "global"]})
    record = None
    for t in (1, 2):
        record = tuned.round(t)
    assert torch.equal(global_model(plain), global_model(tuned))
    assert record.metrics["accuracy_finetuned"] > record.metrics["accuracy_global"]


# ---------------------------------------------------------------- FedProx (1.4)


@pytest.mark.parametrize(
    "method",
    [FedProx(mu=0.6), FedAMP(lam=0.3, alpha=0.25), KAPC(lam=0.3)],
    ids=repr,
)
def test_the_pull_has_the_slope_it_says(federation, method):
    """The coaching term's gradient is 2 c (w - s), and its value c ||w - s||^2: mu (w - w_t),
    (lam/alpha)(w - u)."""
    coefficient = {"FedProx": 0.3, "FedAMP": 0.6, "KAPC": 0.3}[type(method).__name__]
    fed = federation(method, precision="64-true")
    client, module = client_of(fed, 0), module_of(fed)
    received = method.broadcast(server_of(fed, [0]))[0]
    vector = client["model"].copy_(torch.randn(client.layout.size, dtype=torch.float64))
    [phase] = method.phases(client, received)
    client.bind()
    module.set_objective(phase.objective)
    terms = module.objective_terms()
    pieces = [slice(b.start, b.stop) for b in client.layout.blocks]
    expected = coefficient * sum(
        float((vector[s] - received.vector[s]).square().sum()) for s in pieces
    )
    assert abs(terms[0].item() - expected) < 1e-9 * expected
    for s, gradient in zip(pieces, terms[1], strict=True):
        away = vector[s] - received.vector[s]
        assert_close(gradient.flatten(), 2 * coefficient * away, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- FedAMP (1.6)


def test_a_pull_that_no_32_bits_hold_is_refused():
    with refuses(r"method\.lam=1e\+38.*lam / \(2 alpha\)"):
        FedAMP(lam=1e38, alpha=0.01)


# ---------------------------------------------------------------- KAPC (1.35)


# ---------------------------------------------------------------- scopes and buffers


@pytest.mark.sampled
@pytest.mark.parametrize("method", [*map(method_of, IMAGES), KAPC(classifier="own")], ids=repr)
def test_traffic_adds_up_to_a_hand_count(federation, method):
    """By layer and kind, for every method: 4 bytes for each number of the tensors whose scope says
    that they travel."""
    public = {"public": "held_back"}  # for those that distil
    fed = federation(method, net="norm", participation=0.5, rounds=1, data=public)
    record = fed.round(1)
    layers, blocks = len(fed.run.layer_names), fed.run.groups[0].layout.blocks
    # then the first round tells the server of clients, and of no model
    drawn = 4 if method.traits.everyone_first else 2
    assert record.traffic.shape == (drawn, 2, layers + 1, 4)
    # vectors beside the model, both ways
    further = sum(slot.exchanged for slot in method.slots().values())
    # down: of all clusters; nobody's yet
    models = {"ifca": 4, "fedfomo": 0}.get(fed.run.method_name, 1)
    for direction, scopes in (
        (0, ("shared",)),
        (1, () if method.traits.everyone_first else ("shared", "uploaded")),
    ):
        by_hand = np.zeros((layers + 1, 4), dtype=np.int64)
        for b in blocks:
            times = (method.scope(b) in scopes) * (1 if direction else models) + further * (
                b.kind == "parameter"
            )
            by_hand[b.layer, int(b.kind == "buffer")] += times * 4 * int(np.prod(b.shape))
        assert all(
            np.array_equal(table[:-1], by_hand[:-1]) for table in record.traffic[:, direction]
        )
        beside = record.traffic[:, direction, -1].sum()
        # class means; a basis of the data
        tells = method.traits.statistics or fed.run.relation.sources == "all"
        assert (beside > 0) == (tells and direction == 1)  # in round 1 the server knows nothing yet
        name = ("download", "upload")[direction]
        assert record.metrics[f"{name}_bytes"] == drawn * by_hand.sum() + beside
        assert record.metrics[f"{name}_parameter_bytes"] == drawn * by_hand[:, 0].sum()
        travel = [
            any(method.scope(b) in scopes for b in blocks if b.layer == k and not b.normalisation)
            and (models > 0 or direction == 1)
            for k in range(layers)
        ]
        assert record.sent[:, direction].tolist() == [travel] * drawn
