"""A trusted server's noise on the mean: bounds, variance, the adaptive clip, epsilon, and what is
refused by name."""

import json
import math
import re
from types import SimpleNamespace

import dp_accounting as dp
import pytest
import torch
from dp_accounting.rdp import RdpAccountant
from every import NAMES, method_of
from lines import run_line
from refusals import refuses
from watching import global_model

from fl_lightning.callbacks.central import CentralPrivacy, clients_keep_state, why_uncovered
from fl_lightning.callbacks.compression import Quantize
from fl_lightning.callbacks.privacy import INPUTS, LocalPrivacy
from fl_lightning.methods import Method
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.privacy.accounting import Mechanism, epsilon
from fl_lightning.results.folder import RunFolder

STILL = {"lr": 0.0}


def changes(fed, old):
    """What the server received of each client, less the old global model, on what travels."""
    group = fed.run.groups[0]
    segments = group.layout.segments(group.down_mask)
    states = fed.run.states.values()
    return [
        torch.cat([(s.received["model"] - old)[p.start : p.stop] for p in segments]) for s in states
    ]


def moved(fed, old):
    group = fed.run.groups[0]
    segments = group.layout.segments(group.down_mask)
    return torch.cat([(group.vectors["model"] - old)[p.start : p.stop] for p in segments])


def one_round(fed, t=1):
    """The global model before round `t`, which is then run."""
    if t == 1:
        fed.prepare()
    old = global_model(fed).clone()
    fed.round(t)
    return old


# ---------------------------------------------------------------- bounds and noise


def test_no_change_is_longer_than_the_clip_and_the_mean_is_plain(federation):
    """Of clients of unlike sizes, at a huge learning rate, with next to no noise."""
    private = CentralPrivacy(clip=0.01, noise=1e-7)
    fed = federation(FedAvg(), "norm", [private], {"partition": "dirichlet"}, optimizer={"lr": 0.5})
    old = one_round(fed)
    parts = changes(fed, old)
    assert len(set(fed.run.data.train_sizes)) > 1
    assert all(0.0099 < float(x.double().norm()) < 0.01 * 1.001 for x in parts)
    torch.testing.assert_close(moved(fed, old), torch.stack(parts).mean(0), rtol=0, atol=1e-6)


def test_the_noise_is_that_of_the_mean_and_another_in_each_round(federation):
    """Nothing trains: what the global model moves by is noise alone, clip * noise / n on each
    number."""
    fed = federation(
        FedAvg(), callbacks=[CentralPrivacy(clip=3.0, noise=2.0)], optimizer=STILL, rounds=3
    )
    first, second, third = (moved(fed, one_round(fed, t)) for t in (1, 2, 3))
    for x, y in ((first, second), (second, third), (first, third)):
        assert float(x.std()) == pytest.approx(3.0 * 2.0 / 4, rel=6 / math.sqrt(2 * len(x)))
        assert abs(float(x @ y / (x.norm() * y.norm()))) < 6 / math.sqrt(len(x))
    again = federation(FedAvg(), callbacks=[CentralPrivacy(clip=3.0, noise=2.0)], optimizer=STILL)
    assert torch.equal(moved(again, one_round(again)), first)
    other = federation(
        FedAvg(),
        callbacks=[CentralPrivacy(clip=3.0, noise=2.0, reproducible=False)],
        optimizer=STILL,
    )
    assert not torch.equal(moved(other, one_round(other)), first)


def test_variances_stay_what_they_can_be(federation):
    fed = federation(FedAvg(), "norm", [CentralPrivacy(clip=100.0, noise=1.0)])
    one_round(fed)
    model, layout = global_model(fed), fed.run.groups[0].layout
    [block] = [b for b in layout.blocks if b.name.endswith("running_var")]
    variance = model[block.start : block.stop]
    assert float(variance.min()) >= 0 and variance.abs().max() > 1


COVERED = [name for name in NAMES if why_uncovered(method_of(name)) is None]


def test_as_many_are_covered_as_readme_says():
    assert len(COVERED) == 26


@pytest.mark.sampled("fedper")
@pytest.mark.parametrize("name", COVERED)
def test_covered_methods_run(federation, name):
    net = "residual" if name == "fedalign" else "plain"
    private = CentralPrivacy(clip=0.1, noise=0.1)
    fed = federation(method_of(name), net, [private], {"validation": 0.1})
    summary = fed.fit()
    assert summary["privacy_uploads"] == 2
    assert summary["privacy_epsilon"] == pytest.approx(epsilon([Mechanism(0.1, 2)], 1e-5))


# ---------------------------------------------------------------- adaptive clipping


@pytest.mark.parametrize("clip, within", [(1e3, 40), (1e-6, 0)])
def test_the_clip_follows_the_quantile(federation, clip, within):
    """Andrew et al., Algorithm 1: C <- C exp(-0.2 (b - quantile)), b the noisy share of changes
    within the clip."""
    private = CentralPrivacy(clip=clip, noise=0.5, quantile=0.3)
    fed = federation(
        FedAvg(),
        callbacks=[private],
        clients=40,
        data={"fraction": 0.5, "partition": "iid"},
        rounds=1,
    )
    one_round(fed)
    share = 0.3 - math.log(float(fed.run.server.memory["privacy.clip"]) / clip) / 0.2
    assert share == pytest.approx(within / 40, abs=6 * (40 / 20) / 40)
    assert share != pytest.approx(within / 40, abs=1e-6)  # the count is noisy


def test_the_count_has_its_share_of_the_noise(federation):
    """The mean's noise grows by as much as the count's message takes; dp-accounting sees no
    difference."""
    settings = {"clients": 40, "data": {"fraction": 0.5, "partition": "iid"}, "optimizer": STILL}
    fed = federation(
        FedAvg(), callbacks=[CentralPrivacy(clip=1.0, noise=3.5, quantile=0.5)], **settings
    )
    x = moved(fed, one_round(fed))
    mean = (3.5**-2 - (2 * 40 / 20) ** -2) ** -0.5
    assert mean > 1.3 * 3.5
    assert float(x.std()) == pytest.approx(mean / 40, rel=6 / math.sqrt(2 * len(x)))
    both = [Mechanism(mean, 2), Mechanism(2 * 40 / 20, 2)]
    assert epsilon(both, 1e-5) == pytest.approx(epsilon([Mechanism(3.5, 2)], 1e-5), rel=1e-3)


# ---------------------------------------------------------------- epsilon


def by_hand(noise, rounds, size, clients):
    accountant = RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    event = dp.SampledWithoutReplacementDpEvent(clients, size, dp.GaussianDpEvent(noise / 2))
    accountant.compose(event, rounds)
    return float(accountant.get_epsilon(1e-5))


@pytest.mark.sampled("1.0-50")
@pytest.mark.parametrize("noise, rounds, size, clients", [(1.0, 50, 50, 1000), (4.0, 20, 10, 100)])
def test_cohorts_are_accounted_as_drawn_without_replacement(noise, rounds, size, clients):
    mine = epsilon([Mechanism(noise, rounds, cohort=(size, clients))], 1e-5)
    assert mine == pytest.approx(by_hand(noise, rounds, size, clients), rel=2e-2)
    assert mine >= by_hand(noise, rounds, size, clients) * (1 - 1e-9)  # fewer orders: never below
    assert mine < epsilon([Mechanism(noise, rounds)], 1e-5, replace_one=True)


@pytest.mark.slow
def test_epsilon_is_the_smaller_of_known_and_secret_cohorts(federation):
    private = CentralPrivacy(clip=1.0, noise=4.0)
    fed = federation(FedAvg(), callbacks=[private], clients=20, participation=0.1, rounds=4)
    summary = fed.fit()
    taken = fed.run.server.memory["privacy.taken"]
    assert int(taken.sum()) == 4 * 2 and summary["privacy_uploads"] == int(taken.max())
    assert summary["privacy_epsilon_known_cohorts"] == epsilon(
        [Mechanism(4.0, int(taken.max()))], 1e-5
    )
    assert summary["privacy_covers"].endswith(f"tables and personal model, nor {INPUTS}")
    secret = epsilon([Mechanism(4.0, 4, cohort=(2, 20))], 1e-5)
    assert summary["privacy_epsilon"] == min(summary["privacy_epsilon_known_cohorts"], secret)
    assert ("do not know the cohorts" in summary["privacy_covers"]) == (
        secret < summary["privacy_epsilon_known_cohorts"]
    )


@pytest.mark.sampled("ditto")
@pytest.mark.parametrize("name", ["fedper", "ditto", "fedbabu"])
def test_secret_cohorts_lower_no_epsilon_where_clients_keep_state(federation, name):
    """A personal part, a second model and a gradient are state; an untrained classifier is none."""
    private = CentralPrivacy(clip=1.0, noise=4.0)
    summary = federation(
        method_of(name), callbacks=[private], clients=20, participation=0.05, rounds=4
    ).fit()
    known = epsilon([Mechanism(4.0, summary["privacy_uploads"])], 1e-5)
    secret = epsilon([Mechanism(4.0, 4, cohort=(1, 20))], 1e-5)
    assert secret < known == summary["privacy_epsilon_known_cohorts"]
    stateful = name not in ("fedbabu", "fedprox")
    assert summary["privacy_epsilon"] == (known if stateful else secret)
    assert ("clients keep state" in summary["privacy_covers"]) == stateful


def test_state_that_is_kept_beside_the_method_counts():
    """The optimiser's, and what a transform keeps with every client."""

    def config(*, keep):
        return SimpleNamespace(optimizer=SimpleNamespace(keep_state=keep))

    remembering = SimpleNamespace(client_memory=True)
    assert not clients_keep_state(config(keep=False), FedAvg(), [])
    assert clients_keep_state(config(keep=True), FedAvg(), [])
    assert clients_keep_state(config(keep=False), FedAvg(), [remembering])


CLIP, NOISE = "--callbacks.centralprivacy.clip 1", "--callbacks.centralprivacy.noise 1"


@pytest.mark.slow
@pytest.mark.parametrize("participation", [1.0, 0.25])
def test_a_plan_says_the_epsilon_that_the_run_has(fit, capsys, participation):
    part = f"--federation.participation {participation}"
    private = f"--callbacks.centralprivacy.epsilon_target 8 {CLIP} --federation.clients 8 {part}"
    folder = fit("x", "--method fedavg", private)
    summary = json.loads((folder / "summary.json").read_text())
    assert 7.9 < summary["privacy_epsilon"] <= 8.001
    rows = RunFolder(folder).read("metrics")
    assert rows[-1]["privacy_epsilon"] == pytest.approx(summary["privacy_epsilon"])
    assert RunFolder(folder).read("clients")[-1]["privacy_epsilon"] <= summary["privacy_epsilon"]
    words = "--config kapc_exact_digits --loggers null --callbacks null --data.fraction 0.4"
    plan = f"plan {words} --federation.rounds 3 --method fedavg {private} --json"
    capsys.readouterr()
    assert run_line(plan) == 0
    planned = json.loads(capsys.readouterr().out)["privacy"]
    assert planned["privacy_epsilon"] == summary["privacy_epsilon"]
    assert planned["privacy_noise_model"] == summary["privacy_noise_model"]


# ---------------------------------------------------------------- ranks and resume


@pytest.mark.slow
def test_a_resumed_run_has_the_noise_that_it_began_with(fit, refused):
    target = f"{CLIP} --callbacks.centralprivacy.epsilon_target 8"
    flags = "--method fedavg --callbacks.checkpoint.seconds 0 --federation.rounds 1"
    folder = fit("x", flags, target)
    before = {file: file.read_bytes() for file in folder.glob("*.csv")}
    line = refused("fit --name x --resume --federation.rounds 2")
    assert "the run began with noise" in line
    assert {file: file.read_bytes() for file in folder.glob("*.csv")} == before


# ---------------------------------------------------------------- what is refused


def test_a_method_of_ones_own_that_looks_at_uploads_is_refused(federation):
    class Looks(Method):
        def aggregate(self, server):
            super().aggregate(server)

    class Plain(FedAvg):
        pass

    with refuses(r"callbacks\.centralprivacy='looks'.*aggregate of Looks"):
        federation(Looks(), callbacks=[CentralPrivacy(clip=1.0, noise=1.0)]).prepare()
    federation(Plain(), callbacks=[CentralPrivacy(clip=1.0, noise=1.0)]).prepare()


@pytest.mark.parametrize(
    "settings, other, says",
    [
        ({"noise": 1.0}, [Quantize()], "callbacks.quantize.*before centralprivacy"),
        ({"noise": 1.0}, [LocalPrivacy(clip=1.0, noise=1.0)], "also accounts for the whole run"),
        ({"noise": 1.0, "quantile": 0.5}, [], "quantile=0.5.*noise below 0.4"),
        ({"noise": 1.0, "delta": 0.3}, [], "delta=0.3.*one over the number of clients"),
        ({"epsilon_target": 1e-9}, [], "epsilon_target=1e-09.*no noise up to"),
    ],
)
def test_parts_that_do_not_fit_are_refused(federation, settings, other, says):
    fed = federation(FedAvg(), callbacks=[CentralPrivacy(clip=1.0, **settings), *other])
    with refuses(says):
        for callback in fed.run.callbacks:
            callback.on_fit_start(fed.run)


WRONG = {
    NOISE: "clip: it must be given: noise without a bound",
    CLIP: "noise=None.*exactly one of noise and epsilon_target",
    f"{CLIP} --callbacks.centralprivacy.noise 0": "noise=0.0.*above 0: without noise there is no epsilon",
    f"{CLIP} {NOISE} --callbacks.centralprivacy.quantile 1": r"quantile=1.* \(0, 1\)",
    f"{CLIP} {NOISE} --method kapc": "='kapc'.*receives its own mix",
}


@pytest.mark.parametrize("flags, says", WRONG.items())
def test_wrong_uses_are_one_line(flags, says, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = "--config kapc_exact_digits --loggers null --callbacks null --federation.clients 4"
    line = refused(f"fit {base} --name x --method fedavg {flags}")
    assert re.match(rf"callbacks\.centralprivacy\.?{says}", line), line
