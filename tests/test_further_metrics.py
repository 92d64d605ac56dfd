"""What models are scored by beside accuracy (`evaluation.metrics`): torchmetrics against
scikit-learn; the tables."""

import math

import numpy as np
import pytest
import torch
from lines import run_line
from refusals import refuses
from sklearn.calibration import calibration_curve
from sklearn.metrics import balanced_accuracy_score, f1_score, roc_auc_score

from fl_lightning import Run
from fl_lightning.configuration.config import (
    Component,
    Config,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
)
from fl_lightning.foundation.metric import FURTHER, recalls, reweighted_accuracy
from fl_lightning.methods.fedper import FedPer

OWN = ["balanced_accuracy", "f1", "auroc", "calibration"]


def made_up(seed, labels, samples=60, classes=4):
    """Scores that lean towards the right class, and labels of `labels` alone."""
    draws = np.random.default_rng(seed)
    y = draws.choice(labels, samples)
    scores = draws.normal(0, 2, (samples, classes))
    scores[np.arange(samples), y] += 1.5
    return torch.from_numpy(scores), torch.from_numpy(y)


def by_sklearn(scores, y):
    """The same numbers, one against the rest by hand where a class is missing."""
    chances, truth = scores.softmax(1).numpy(), y.numpy()
    predicted, best = chances.argmax(1), chances.max(1)
    held = [k for k in range(scores.shape[1]) if 0 < (truth == k).sum() < len(truth)]
    areas = [roc_auc_score(truth == k, chances[:, k]) for k in held]
    right, said = calibration_curve(predicted == truth, best, n_bins=15)
    counts = np.histogram(best, np.linspace(0, 1, 16))[0]
    return {
        "balanced_accuracy": balanced_accuracy_score(truth, predicted) if held else math.nan,
        "f1": f1_score(truth, predicted, average="macro") if held else math.nan,
        "auroc": float(np.mean(areas)) if held else math.nan,
        "calibration": float(np.abs(right - said) @ counts[counts > 0] / len(truth)),
    }


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
@pytest.mark.parametrize("labels", [[0, 1, 2, 3], [1, 3], [2]], ids=str)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_they_are_scikit_learns(labels, seed):
    scores, y = made_up(seed, labels)
    want = by_sklearn(scores, y)
    found = {name: float(FURTHER[name].value(scores, y)) for name in OWN}
    assert found == pytest.approx(want, abs=1e-6, nan_ok=True)
    assert [name for name in OWN if math.isnan(found[name])] == (
        OWN[:3] if len(labels) == 1 else []
    )
    if len(labels) == 4:
        chances = scores.softmax(1).numpy()
        assert found["auroc"] == pytest.approx(
            roc_auc_score(y.numpy(), chances, multi_class="ovr"), abs=1e-6
        )


def test_accuracy_by_class_shares():
    """The recalls of the test set of all, weighed by the client's classes; unknown where a class
    has no test sample."""
    scores = torch.tensor([[1.0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 0, 0]])
    recall = recalls(scores, torch.tensor([0, 1, 1, 0]))
    assert recall.tolist()[:2] == [1.0, 0.5] and recall[2].isnan()
    assert float(reweighted_accuracy(recall, torch.tensor([3, 1, 0]))) == pytest.approx(
        (3 * 1 + 1 * 0.5) / 4
    )
    assert reweighted_accuracy(recall, torch.tensor([3, 0, 1])).isnan()


@pytest.mark.parametrize(
    "settings", [{"evaluation": {"metrics": OWN}}, {"data": {"global_test": True}}]
)
def test_nothing_else_changes(federation, settings):
    """Neither numbers nor columns, and without being asked nothing is measured."""
    plain, asked = (federation(FedPer(), rounds=1, **s).round(1) for s in ({}, settings))
    for ours, theirs in (
        (plain.metrics, asked.metrics),
        *zip(plain.clients, asked.clients, strict=True),
    ):
        assert ours.keys() < theirs.keys()
        same = {k: v for k, v in ours.items() if not k.startswith(("seconds", "memory"))}
        assert same == {k: theirs[k] for k in same}


@pytest.mark.parametrize(
    "names, data, said",
    [
        (["f1"], {"task": "regression", "source": "table"}, "a regression"),
        (["class_share_accuracy"], {}, "data.global_test"),
    ],
)
def test_what_cannot_be_measured_is_refused(names, data, said):
    config = Config(Component("x"), [ModelConfig(Component("x"))], data=DataConfig(**data))
    config.validate()
    config.evaluation = EvaluationConfig(metrics=names)
    with refuses(rf"evaluation\.metrics=\['{names[0]}'\].*{said}") as caught:
        config.validate()
    assert "\n" not in str(caught.value)


def test_from_the_command_line_to_the_tables(fit, capsys):
    """Empty cells in the files, the report's rows, and `test` finds the same."""
    flags = "--method fedavg --federation.rounds 1 --evaluation.metrics [f1,auroc]"
    run = Run(fit("a", f"{flags} --callbacks checkpoint"))
    assert set(run.final) == {"client", "accuracy", "model", "f1", "auroc"}
    areas = run.final["auroc"].dropna()
    assert run.summary["final_clients_auroc"] == len(areas)
    assert run.summary["final_mean_auroc"] == pytest.approx(areas.mean())
    capsys.readouterr()
    assert run_line(f"test --run {run.folder}") == 0
    assert f"{run.summary['final_mean_f1']}" in capsys.readouterr().out
    assert run_line("fit --evaluation.metrics '[recall]' --name b") == 2
    assert "evaluation.metrics" in capsys.readouterr().err


def test_rare_classes_are_named_once_with_the_metric_to_take(fit, tmp_path, capsys):
    """And a client whose few test samples hold no positive is in no mean of a metric that needs
    one."""
    # all sick ones on one farm
    rows = [f"{k % 7},{'sick' if k % 40 == 0 else 'well'},{k % 4}" for k in range(400)]
    (tmp_path / "farms.csv").write_text("\n".join(["x,label,farm", *rows]))
    words = (
        f"--method fedavg --federation.rounds 2 --data.root {tmp_path / 'farms.csv'} "
        f"--data.fraction 1.0 --evaluation.metric accuracy"
    )
    words += " --data.group_column farm --data.partition natural --data.client_test 0.25"
    run = Run(fit("b", f"{words} --evaluation.metrics [balanced_accuracy]"))
    lines = capsys.readouterr().err.splitlines()
    (rare,) = [line for line in lines if line.startswith("data: rare")]
    assert rare.startswith("data: rare classes, share of the training samples: 'sick' 2.")
    over = "mean over 1 of 4 clients; the test samples of 3 have a single class"
    assert any(line.startswith(f"balanced_accuracy: {over}") for line in lines)
    first, *others = run.final["balanced_accuracy"]
    assert run.summary["final_clients_balanced_accuracy"] == 1 and np.isnan(others).all()
    assert run.summary["final_mean_balanced_accuracy"] == first
    assert run.summary["least_test_class"] > 0
