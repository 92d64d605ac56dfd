"""SCAFFOLD (card 6.1): control variates on both sides."""

import pytest
import torch
from reckoning import ROUNDING, WHOLE, batch_of, seeded, slope, uploads
from torch.testing import assert_close
from watching import client_of, global_model, module_of, run_all

from fl_lightning.callbacks.base import Transform
from fl_lightning.methods.scaffold import SCAFFOLD


def control(fed):
    """The server's c."""
    return fed.run.groups[0].vectors["control"]


def mean_of_all(fed):
    """The mean of all c_i; of a client that has not taken part it is 0."""
    return torch.stack(uploads(fed, "control")).sum(0) / fed.run.clients


class Fails(Transform):
    """A client that fails in round 2, after it has trained."""

    def on_upload(self, client, payload):
        """Once it has changed its control variate."""
        if (client.id, client.round) == (1, 2):
            raise OSError("the line is dead")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"participation": 0.5, "rounds": 5},
        {"optimizer": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}},
        {"net": "norm"},
        {"on_bad_client": "skip", "callbacks": [Fails()]},
    ],
    ids=["all", "part", "momentum", "norm", "skip"],
)
def test_c_is_the_mean_of_all_c_i(federation, changes):
    """INV1, after every round, of all N clients whoever takes part and whoever fails."""
    fed = federation(SCAFFOLD(), precision="64-true", **({"rounds": 3} | changes))
    for t in range(1, fed.run.rounds + 1):
        failures = fed.round(t).failures
        assert len(failures) == (t == 2 and "on_bad_client" in changes)
        assert control(fed).abs().max() > 1e-3
        assert_close(control(fed), mean_of_all(fed), **ROUNDING)


def test_a_round_of_one_step_by_hand(federation):
    """w_i = w - lr (g - c_i + c), and c_i becomes g, the gradient at w; in the second round with
    controls at work."""
    fed = federation(SCAFFOLD(server_lr=0.5), **WHOLE)
    for t in (1, 2, 3):
        w, c = (
            global_model(fed).clone(),
            torch.zeros_like(global_model(fed)) if t == 1 else control(fed).clone(),
        )
        known = [torch.zeros_like(w)] * 4 if t == 1 else uploads(fed, "control")
        fed.round(t)
        moved = []
        for k, before in enumerate(known):
            client = client_of(fed, k)
            g = slope(client, w, batch_of(client))
            assert_close(client["control"], g, **ROUNDING)
            assert_close(client["model"], w - 0.05 * (g - before + c), **ROUNDING)
            moved.append(client["model"])
        mean = torch.stack(moved).mean(0)
        assert_close(global_model(fed), w + 0.5 * (mean - w), **ROUNDING)


@pytest.mark.parametrize(
    "optimizer",
    [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}],
    ids=["plain", "momentum", "nesterov"],
)
def test_a_constant_gradient_is_found_whatever_the_momentum(federation, optimizer):
    """Down <a, w> all gradients are a, so c_i must be a; divided by K lr it would be several times
    that."""
    fed = federation(SCAFFOLD(), precision="64-true", local_epochs=3, optimizer=optimizer)
    module = module_of(fed)
    draws = seeded(0)
    pieces = [
        torch.randn(p.shape, generator=draws, dtype=p.dtype) for p in module.binding.parameters
    ]

    def loss(batch, k=0):
        pairs = zip(pieces, module.binding.parameters, strict=True)
        return torch.stack([(a * p).sum() for a, p in pairs]).sum()

    module.task_loss = loss
    run_all(fed)
    for c in uploads(fed, "control"):
        for a, b in zip(pieces, fed.run.groups[0].layout.blocks, strict=False):
            assert_close(c[b.start : b.stop].view(b.shape), a, rtol=0, atol=1e-9)
