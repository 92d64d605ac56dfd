"""A lower bound on epsilon: its formula, runs whose epsilon is known, a noise that is smaller than
claimed."""

import json
import math

import pytest
import torch
from lines import run_line
from scipy.stats import beta, binom

from fl_lightning.callbacks.canaries import Canaries, coin, direction
from fl_lightning.callbacks.central import CentralPrivacy
from fl_lightning.callbacks.privacy import LocalPrivacy
from fl_lightning.lab.audit.claims import pooled_claim
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.privacy.bound import lower_bound, share_right


@pytest.mark.parametrize("guesses, right", [(100, 80), (40, 40), (200, 130)])
def test_without_delta_the_bound_is_clopper_pearsons(guesses, right):
    """Randomised response is right with e^eps / (1 + e^eps): the bound is the logit of the
    one-sided interval."""
    least = float(beta.ppf(0.05, right, guesses - right + 1))
    assert lower_bound(10 * guesses, guesses, right, 0.0) == pytest.approx(
        math.log(least / (1 - least)), abs=1e-3
    )
    low, high = share_right(guesses, right)
    assert low == pytest.approx(float(beta.ppf(0.025, right, guesses - right + 1)), abs=1e-9)
    assert high == pytest.approx(
        1.0 if right == guesses else float(beta.ppf(0.975, right + 1, guesses - right))
    )


@pytest.mark.slow
def test_randomised_response_is_below_its_epsilon():
    """Exactly: over all numbers of right guesses, the bound is above epsilon with 5 % at most."""
    for epsilon in (0.5, 2.0):
        share = 1 / (1 + math.exp(-epsilon))
        above = [v for v in range(61) if lower_bound(60, 60, v, 0.0) > epsilon]
        assert sum(binom.pmf(v, 60, share) for v in above) <= 0.05 + 1e-9
        assert above


def of(fed):
    return {k: v for k, v in fed.fit().items() if k.startswith("privacy_")}


MANY = {
    "clients": 100,
    "data": {"partition": "iid"},
    "local_epochs": None,
    "local_steps": 1,
    "rounds": 2,
}


@pytest.mark.sampled("30.0-central")
@pytest.mark.parametrize("kind", ["local", "central"])
@pytest.mark.parametrize("noise", [0.01, 30.0])
def test_all_coins_are_known_without_noise_and_none_with_much(federation, kind, noise):
    private = (LocalPrivacy if kind == "local" else CentralPrivacy)(clip=0.5, noise=noise)
    summary = of(federation(FedAvg(), callbacks=[Canaries(guesses=0.5), private], **MANY))
    assert summary["privacy_canaries"] == 100 and summary["privacy_canary_guesses"] == 50
    claim = pooled_claim([summary])
    assert not claim.broken and claim.bound == summary["privacy_epsilon_bound"]
    if noise < 1:
        assert (
            summary["privacy_canary_right"] == 50 and 2.5 < claim.bound < summary["privacy_epsilon"]
        )
    else:
        assert summary["privacy_canary_right"] < 40 and claim.bound < 0.5


@pytest.mark.slow
def test_noise_that_is_smaller_than_claimed_is_found(federation, monkeypatch):
    """A mechanism with a fault: it counts noise 5, and adds a hundredth of it."""
    private = CentralPrivacy(clip=0.5, noise=5.0)
    whole = CentralPrivacy.finished

    def weak(self, *args):
        self._noise, kept = self._noise / 100, self._noise
        try:
            return whole(self, *args)
        finally:
            self._noise = kept

    monkeypatch.setattr(CentralPrivacy, "finished", weak)
    summary = of(federation(FedAvg(), callbacks=[Canaries(guesses=0.5), private], **MANY))
    claim = pooled_claim([summary])
    assert claim.broken and claim.epsilon < 1.5 < float(claim.bound or 0)
    assert claim.sentence("fedavg").endswith("THE CLAIM IS FALSE")


def test_a_canary_sends_its_direction_or_nothing(federation):
    seen = {}

    class Spy(CentralPrivacy):
        def on_upload(self, client, payload):
            super().on_upload(client, payload)
            seen[client.id] = payload.vector - client.group.vectors["model"]

    fed = federation(
        FedAvg(), callbacks=[Canaries(share=0.5), Spy(clip=0.5, noise=1.0)], clients=8, rounds=1
    )
    fed.fit()
    canaries = fed.run.callbacks[0]._canaries
    assert len(canaries) == 4 and {coin(fed.run, c) for c in range(20)} == {True, False}
    for client in canaries:
        wanted = 0.5 * coin(fed.run, client) * direction(fed.run, fed.run.groups[0], client)
        torch.testing.assert_close(seen[client], wanted, rtol=1e-3, atol=1e-5)
    assert all(0 < seen[c].norm() < 0.51 for c in set(range(8)) - canaries)


PRIVATE = (
    "--callbacks.canaries.guesses 0.5 --callbacks.centralprivacy.clip 1 "
    "--callbacks.centralprivacy.noise 5"
)


@pytest.mark.slow
def test_an_audit_says_what_canaries_refute(fit, capsys, tmp_path):
    folder = fit("x", f"--method fedavg --callbacks.checkpoint.seconds 0 {PRIVATE}")
    summary = json.loads((folder / "summary.json").read_text())
    assert run_line("audit runs/x --out a") == 0
    assert "x claims epsilon" in capsys.readouterr().out
    claim = json.loads((tmp_path / "a" / "audit.json").read_text())["claims"]["x"]
    assert (
        claim["canaries"] == 4
        and not claim["broken"]
        and claim["bound"] == summary["privacy_epsilon_bound"]
    )
    (folder / "summary.json").write_text(
        json.dumps(
            summary
            | {
                "privacy_epsilon_known_cohorts": 0.5,
                "privacy_canaries": 100,
                "privacy_canary_guesses": 50,
                "privacy_canary_right": 50,
            }
        )
    )
    assert run_line("audit runs/x --out a") == 1
    assert "claims a smaller epsilon than its canaries allow" in capsys.readouterr().err
    assert 'class="false"' in (tmp_path / "a" / "audit.html").read_text()


def test_delta_takes_some_of_the_bound():
    bounds = [lower_bound(1000, 100, 95, delta) for delta in (0.0, 1e-6, 1e-5, 1e-4, 1e-3)]
    assert bounds == sorted(bounds, reverse=True) and bounds[0] > bounds[-1]
    assert lower_bound(1000, 100, 50, 1e-5) == lower_bound(10, 0, 0, 1e-5) == 0
    with pytest.raises(ValueError, match="7 right of 6 guesses"):
        lower_bound(10, 6, 7, 1e-5)
