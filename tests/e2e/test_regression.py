"""A regression from a table: what is written is in the target's unit, and lower is better."""

import json
import re

import numpy as np
import pytest
import torch
from lines import run_line
from safetensors.torch import load_file

from fl_lightning.cli import main
from fl_lightning.data import prepare
from fl_lightning.results.opening import config_of

FLAGS = (
    "--data.source table --data.root fields.csv --data.task regression --data.label_column yield "
    "--data.group_column farm --data.partition natural --federation.clients 3 --data.client_test "
    "0.4 "
    "--data.validation 0.3333333333333333 --data.fraction 1 --optimizer.lr 0.02 "
    "--callbacks.checkpoint.seconds 0"
)


@pytest.fixture(autouse=True)
def fields(workplace):
    """Three farms: yield is 3 red - infrared + 5 + farm, and a little noise."""
    rng = np.random.default_rng(0)
    lines = ["farm,red,infrared,yield"]
    for farm in range(3):
        for red, infrared, noise in rng.normal(0, 1, (60, 3)):
            lines.append(f"{farm},{red},{infrared},{3 * red - infrared + 5 + farm + 0.1 * noise}")
    (workplace / "fields.csv").write_text("\n".join(lines))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "method", ["local", "fedavg", "fedora", "kapc", "fedamp", "fedprox", "fedper", "fedbn"]
)
def test_every_method_without_classes_learns(method, fit, table):
    run = fit(
        method, f"--method {method} {FLAGS} --federation.rounds 6 --federation.local_epochs 5"
    )
    rows, summary = table(run), json.loads((run / "summary.json").read_text())
    names = [*rows[0], *summary, *table(run, "clients.csv")[0]]
    assert not any("accuracy" in name for name in names)
    errors = [float(row["mean_mae"]) for row in rows]
    assert errors[-1] < 0.5 * errors[0] or errors[-1] < 0.8
    assert summary["best_mean_mae"] == min(errors)
    assert summary["best_round"] == 1 + errors.index(min(errors))
    on_validation = [float(row["validation_mae"]) for row in rows]
    assert summary["validation_round"] == 1 + on_validation.index(min(on_validation))
    final = [float(row["mae"]) for row in table(run, "final.csv")]
    assert summary["final_worst_mae"] == pytest.approx(max(final))
    files = (run / "checkpoints").glob("manifest*")
    kept = [json.loads(file.read_text())["manifest"]["score"] for file in files]
    assert max(kept) == -min(on_validation)  # the best is kept


def test_the_numbers_are_those_of_the_exported_model(fit, table, workplace):
    run = fit("a", f"--method local {FLAGS} --model.hidden []")
    config = config_of(run)
    data = prepare(config.data, 3, config.seed)
    assert data.input_shape == (2,) and data.num_classes == 1 and data.class_counts.shape == (3, 1)
    for client, row in enumerate(table(run, "final.csv")):
        out = workplace / f"{client}.safetensors"
        assert run_line(f"export --run {run} --client {client} --out {out}") == 0
        weights = load_file(out)
        ((x, y),) = data.client(client).test.batches(99)
        assert len(y) == 24 and y.dtype == torch.float32
        predicted = x @ weights["classifier.weight"].T + weights["classifier.bias"]
        assert float(row["mae"]) == pytest.approx(
            float((predicted[:, 0] - y).abs().mean()), rel=1e-5
        )
        assert float(y.mean()) == pytest.approx(5 + client, abs=2)  # in the target's own unit


@pytest.mark.slow
def test_status_test_and_resume(fit, table, capsys):
    flags = f"--method fedavg {FLAGS}"
    whole = fit("whole", flags)
    fit("cut", flags, "--federation.rounds 2")
    cut = fit("cut", flags, "--federation.rounds 3 --resume")
    assert table(cut, "final.csv") == table(whole, "final.csv")
    capsys.readouterr()
    summary = json.loads((whole / "summary.json").read_text())
    assert run_line("status runs") == 0
    assert f"{summary['best_mean_mae']:.4g}" in capsys.readouterr().out
    assert run_line("test --run runs/whole") == 0
    assert "final_mean_mae" in capsys.readouterr().out
    assert run_line("report runs/whole") == 0
    page = (whole / "report.html").read_text()
    assert f"<td>{summary['final_mean_mae']:.4g}</td>" in page  # in the target's unit, no percent
    assert run_line("compare runs/whole runs/cut") == 2
    assert "it is a regression, and only accuracies are compared" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, message",
    {
        "--method fedproto": "data.task='regression'.*fedproto needs classes",
        "--method fedhkd": "data.task='regression'.*fedhkd",
        "--method fedavg --callbacks attack --callbacks.attack.kind label_flip "
        "--callbacks.attack.share 0.4": "label_flip",
        "--data.source digits --data.root null --data.partition iid": "data.task=.*table, arrays, hf, not digits",
        "--data.label_column farm --data.group_column null --data.partition pathological": "classes_per_client",
    }.items(),
)
def test_what_cannot_work_is_refused(flags, message, small, capsys):
    assert main(small("a", FLAGS, flags)) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1


def test_arrays_with_targets(fit, table):
    x = np.random.default_rng(0).normal(0, 1, (200, 4)).astype(np.float32)
    y = x.sum(1)

    def write(name, train, test):
        parts = {"x_train": x[train], "y_train": y[train], "x_test": x[test], "y_test": y[test]}
        np.savez(name, **parts)

    write("a.npz", slice(150), slice(150, 200))
    words = "--data.root a.npz --data.task regression"
    run = fit("a", f"{words} --data.partition iid --data.fraction 1 --method fedavg")
    assert float(table(run)[-1]["mean_mae"]) < float(np.abs(y).mean())
    write("new.npz", slice(20), slice(20, 40))
    assert run_line("join --run runs/a --data new.npz --out new.safetensors") == 0
    y[0] = np.inf
    write("a.npz", slice(200), slice(200))
    assert run_line(f"fit {words} --name b") == 2
