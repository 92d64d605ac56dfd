"""Outcomes that few samples have: what a run is judged by, and classes that count alike."""

import numpy as np
import pytest
import torch
from refusals import refuses
from torch.nn.functional import cross_entropy

import fl_lightning
from fl_lightning.configuration.resolve import resolve
from fl_lightning.data import given, imbalance, prepare
from fl_lightning.data.part import ResidentPart
from fl_lightning.lab.given import layers_of
from fl_lightning.lab.study.grid import ListedMethod
from fl_lightning.lab.study.tuning import Search
from fl_lightning.lab.worth.runs import facts_of

CLIENTS, EACH = 3, 60
SMALL = {
    "method": "fedavg",
    "model": {"name": "mlp", "hidden": [4]},
    "federation.clients": CLIENTS,
    "federation.local_epochs": 1,
    "federation.rounds": 4,
    "data.partition": "natural",
    "data.validation": 0.3,
    "callbacks": {"heatmaps": None, "progress": None, "checkpoint": {"seconds": 0.0}},
    "fabric.accelerator": "cpu",
    "optimizer.lr": 0.1,
}


def samples(share=0.15):
    """Of each client as many of class 1, which its first feature tells by and large."""
    rng = np.random.default_rng(0)
    y = (np.arange(CLIENTS * EACH) % EACH < share * EACH).astype(int)
    x = rng.normal(size=(len(y), 3)).astype(np.float32)
    x[:, 0] += y
    return x, y, np.arange(len(y)) // EACH


def fitted(tmp_path, name, share=0.15, **keys):
    config = {**SMALL, "out": str(tmp_path), "name": name, **keys}
    return fl_lightning.fit(config, data=samples(share))


def config(tmp_path, share=0.15, **keys):
    _, settings = given.keep(samples(share), tmp_path / "data")
    return resolve(layers_of({**SMALL, **keys}, settings)[0])


@pytest.fixture(scope="module")
def rare(tmp_path_factory):
    """A run on a rare outcome."""
    return fitted(tmp_path_factory.mktemp("rare"), "rare")


# ---------------------------------------------------------------- the metric that chooses


@pytest.mark.slow
def test_a_rare_outcome_is_judged_by_auroc_everywhere(rare, tmp_path):
    run = rare
    line = "metric: auroc, since 13.7% of the training samples are '1'; evaluation.metric names"
    assert line in (run.folder / "log.txt").read_text()
    assert run.metric.name == "auroc" and "mean AUROC" in repr(run)
    rows = run.rows("metrics")
    means, chosen = ([row[f"{name}_auroc"] for row in rows] for name in ("mean", "validation"))
    summary = run.summary
    assert (summary["best_round"], summary["best_mean_auroc"]) == (
        1 + int(np.argmax(means)),
        max(means),
    )
    assert summary["validation_round"] == summary["best_checkpoint_round"]
    assert summary["validation_round"] == 1 + int(np.argmax(chosen))
    assert summary["final_mean_auroc"] == pytest.approx(np.mean(run.final_accuracies))
    other = fitted(run.folder.parent, "other", method="fedprox")
    comparison = fl_lightning.compare([run, other])
    assert "scores are AUROC, one against the rest, not accuracies" in comparison.notes
    assert "accuracies" not in fl_lightning.compare([run, other], metric="accuracy").notes
    page = tmp_path / "page.html"
    fl_lightning.report([run, other], out=page)
    assert "AUROC, one against the rest" in page.read_text()


@pytest.mark.sampled("0.15")
@pytest.mark.parametrize(
    "share, keys, name",
    [
        (0.3, {}, "accuracy"),
        (0.15, {"evaluation.metric": "accuracy"}, "accuracy"),
        (0.3, {"evaluation.metric": "balanced_accuracy"}, "balanced_accuracy"),
    ],
)
def test_another_metric(share, keys, name, tmp_path):
    run = fitted(tmp_path, "one", share, **keys)
    assert run.metric.name == name
    assert any("auroc" in column for column in run.rounds) is False
    assert run.summary["best_round"] == run.best(f"mean_{name}")[1]


def test_tune_goes_by_the_metric_of_its_trials(tmp_path):
    fitted(tmp_path, "trial", **{"federation.rounds": 1})
    given = config(tmp_path)
    search = Search(ListedMethod("fedavg", "fedavg", {}, "methods[0]"), tmp_path, 1, 0, given, [{}])
    assert search.metric().name == "auroc"


def test_worth_goes_by_it(tmp_path):
    facts = facts_of(config(tmp_path, **{"data.folds": 5, "data.validation": 0.0}))
    assert facts.rare.startswith("metric: auroc")
    assert not facts_of(config(tmp_path, 0.3, **{"data.folds": 5, "data.validation": 0.0})).rare


# ---------------------------------------------------------------- classes that count alike


def test_a_sampler_draws_classes_alike():
    labels = torch.tensor([0] * 90 + [1] * 10)
    part = ResidentPart(torch.arange(100.0)[:, None], labels, None)
    part.set_balance("sampler", labels, 2)
    draws = torch.Generator().manual_seed(0)
    drawn = torch.cat([y for _ in range(20) for _, y in part.batches(16, draws)])
    assert len(drawn) == 2000 and 0.45 < drawn.float().mean() < 0.55
    half = part.subset(torch.arange(50, 100))
    drawn = torch.cat([y for _ in range(20) for _, y in half.batches(16, draws)])
    assert 0.65 < drawn.float().mean() < 0.75  # 40 of 90 to 10 of 10
    assert torch.equal(torch.cat([y for _, y in part.batches(16)]), labels)  # when it is scored


@pytest.mark.sampled("weights")
@pytest.mark.parametrize("how", ["sampler", "weights"])
def test_executors_train_alike(how, rare, tmp_path, capsys):
    keys = {"data.balance": how}
    loop = fitted(tmp_path, "loop", **keys)
    vmap = fitted(tmp_path, "vmap", **keys, **{"fabric.executor": "vmap"})
    losses = [run.column("train_loss") for run in (loop, vmap, rare)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0] != pytest.approx(losses[2], rel=1e-2)
    says = "data.balance weights gives each client another loss"
    assert (says in capsys.readouterr().err) == (how == "weights")


def test_weights_are_those_of_the_clients_own_classes(tmp_path):
    keys = {"federation.rounds": 1, "federation.batch_size": 1000, "optimizer.lr": 1e-12}
    run = fitted(tmp_path, "one", **{"data.balance": "weights"}, **keys)
    data, losses = prepare(config(tmp_path).data, CLIENTS, 0), []
    for client in range(CLIENTS):
        y = data.client(client).train.tensors[1]  # type: ignore[index]
        with torch.no_grad():
            scores = run.model(client)(data.raw_samples(client)[0])
        losses.append(float(cross_entropy(scores, y, 1 / y.bincount())))
    assert run.column("train_loss")[0] == pytest.approx(np.mean(losses), rel=1e-4)


@pytest.mark.parametrize(
    "keys, says",
    [
        (
            {"data.balance": "weights", "method": "fedrod"},
            "a loss of FedRoD does not support class weights",
        ),
        ({"data.balance": "sampler", "data.task": "regression"}, "has no classes"),
        ({"evaluation.metric": "auroc", "data.task": "regression"}, "is judged by mae"),
        ({"evaluation.metric": "mae"}, "evaluation.metric"),
        ({"data.balance": "both"}, "data.balance"),
        (
            {
                "data.balance": "sampler",
                "optimizer.privacy": {"noise": 1.0, "clip": 1.0, "delta": 1e-3},
            },
            "data.balance",
        ),
    ],
)
def test_what_cannot_be_is_one_line(keys, says, tmp_path):
    with refuses(says):
        fitted(tmp_path, "bad", **keys)


@pytest.mark.slow
def test_next_tokens_are_not_balanced(tmp_path):
    keys = {"data.source": "text", "data.balance": "sampler", "smoke": True, "model": "lstm"}
    with refuses("each sample has several targets"):
        fl_lightning.fit({"out": str(tmp_path), "federation.clients": 2, **keys})


def test_shares_are_of_two_known_classes(tmp_path):
    data = prepare(config(tmp_path).data, CLIENTS, 0)
    assert imbalance.default_metric(data) == "auroc"
    data.holds_all = False  # type: ignore[misc]
    assert imbalance.default_metric(data) is None
