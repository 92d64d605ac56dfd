"""A regression from a table: what is written is in the target's unit, and lower is better."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
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
def fields(workplace: Path) -> None:
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
def test_every_method_without_classes_learns(
    method: str, fit: Callable[..., Path], table: Callable[..., list[dict[str, str]]]
) -> None:
    run = fit(
        method, f"--method {method} {FLAGS} --federation.rounds 6 --federation.local_epochs 5"
    )
    rows, summary = table(run), json.loads((run / "summary.json").read_text())
    errors = [float(row["mean_mae"]) for row in rows]
    assert errors[-1] < 0.5 * errors[0] or errors[-1] < 0.8
    assert not any(
        "accuracy" in name for name in [*rows[0], *summary, *table(run, "clients.csv")[0]]
    )
    assert summary["best_mean_mae"] == min(errors)
    assert summary["best_round"] == 1 + errors.index(min(errors))
    assert summary["last_mean_mae"] == errors[-1]
    on_validation = [float(row["validation_mae"]) for row in rows]
    assert summary["validation_round"] == 1 + on_validation.index(min(on_validation))
    final = [float(row["mae"]) for row in table(run, "final.csv")]
    assert summary["final_mean_mae"] == pytest.approx(np.mean(final))
    assert summary["final_worst_mae"] == max(final)  # a tenth of three clients is one
    manifests = [
        json.loads(p.read_text())["manifest"] for p in (run / "checkpoints").glob("manifest*")
    ]
    assert summary["validation_round"] in {m["round"] for m in manifests}  # the best is kept
    assert max(m["score"] for m in manifests) == -min(on_validation)


def test_the_numbers_are_those_of_the_exported_model(
    fit: Callable[..., Path], table: Callable[..., list[dict[str, str]]], workplace: Path
) -> None:
    run = fit("a", f"--method local {FLAGS} --model.hidden []")
    config = config_of(run)
    data = prepare(config.data, 3, config.seed)
    assert data.input_shape == (2,) and data.num_classes == 1 and data.class_counts.shape == (3, 1)
    for client, row in enumerate(table(run, "final.csv")):
        out = workplace / f"{client}.safetensors"
        assert main(["export", "--run", str(run), "--client", str(client), "--out", str(out)]) == 0
        weights = load_file(out)
        ((x, y),) = data.client(client).test.batches(99)
        assert len(y) == 24 and y.dtype == torch.float32
        predicted = x @ weights["classifier.weight"].T + weights["classifier.bias"]
        assert float(row["mae"]) == pytest.approx(
            float((predicted[:, 0] - y).abs().mean()), rel=1e-5
        )
        assert float(y.mean()) == pytest.approx(5 + client, abs=2)  # in the target's own unit


def test_status_test_and_resume(
    fit: Callable[..., Path],
    table: Callable[..., list[dict[str, str]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = fit("whole", f"--method fedavg {FLAGS}")
    fit("local", f"--method local {FLAGS}")
    fit("cut", f"--method fedavg {FLAGS} --federation.rounds 2")
    cut = fit("cut", f"--method fedavg {FLAGS} --federation.rounds 3 --resume")
    assert table(cut, "final.csv") == table(whole, "final.csv")
    capsys.readouterr()
    assert main(["status", "runs"]) == 0
    best = json.loads((whole / "summary.json").read_text())["best_mean_mae"]
    assert f"{best:.4g}" in capsys.readouterr().out
    assert main(["test", "--run", "runs/whole"]) == 0
    assert "final_mean_mae" in capsys.readouterr().out
    assert main(["report", "runs/whole", "runs/local"]) == 0
    page = Path("report.html").read_text()
    assert "Time to mean absolute error" in page
    ours = json.loads((whole / "summary.json").read_text())
    assert f"<td>{ours['final_mean_mae']:.4g}</td>" in page  # in the target's unit, no percent
    assert f"<td>{ours['final_worst_mae']:.4g}</td>" in page
    words = re.sub(r'(id|href)="#?accuracy[^"]*"', "", page.partition("<script>")[0])
    assert "accuracy" not in words
    assert main(["compare", "runs/whole", "runs/local"]) == 2
    assert "it is a regression, and a comparison speaks of accuracies" in capsys.readouterr().err


def test_a_study_names_the_page_on_its_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """There is no table of it: methods are compared by accuracies."""
    data = {"source": "table", "root": "fields.csv", "task": "regression", "label_column": "yield"}
    base = {
        "data": data | {"group_column": "farm", "partition": "natural"},
        "model": "mlp",
        "optimizer.lr": 0.001,
    }
    base |= {"federation.clients": 3, "federation.rounds": 1, "loggers": None}
    study = {"base": base, "methods": ["fedper"], "seeds": [0], "forced": False}
    Path("study.yaml").write_text(json.dumps(study))
    assert main(["study", "study.yaml", "--out", "s", "--workers", "1"]) == 0
    assert "; the page: fl-train report s\n" in capsys.readouterr().out
    assert main(["report", "s"]) == 0
    assert "Time to mean absolute error" in Path("s/report.html").read_text()


def test_processes_give_the_same_bits(
    on_ranks: Callable[..., None],
    small: Callable[..., list[str]],
    fit: Callable[..., Path],
    table: Callable[..., list[dict[str, str]]],
    workplace: Path,
) -> None:
    one = fit("one", f"--method fedora {FLAGS}")
    on_ranks(2, small("two", f"--method fedora {FLAGS}"))
    assert table(one, "final.csv") == table(workplace / "runs" / "two", "final.csv")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--method fedproto", "data.task: 'regression' .*fedproto exchanges .* classes"),
        ("--method fedhkd", "data.task: 'regression' .*fedhkd"),
        (
            "--method fedavg --callbacks attack --callbacks.attack.kind label_flip "
            "--callbacks.attack.share 0.4",
            "label_flip",
        ),
        (
            "--data.source digits --data.root null --data.partition iid",
            "data.task: .*table, arrays, hf, not digits",
        ),
        (
            "--data.label_column farm --data.group_column null --data.partition pathological",
            "classes_per_client",
        ),
    ],
)
def test_what_cannot_work_is_refused(
    flags: str, message: str, small: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(small("a", FLAGS, flags)) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1


def test_arrays_with_targets(
    fit: Callable[..., Path], table: Callable[..., list[dict[str, str]]], workplace: Path
) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(0, 1, (200, 4)).astype(np.float32)
    y = x.sum(1)
    np.savez(workplace / "a.npz", x_train=x[:150], y_train=y[:150], x_test=x[150:], y_test=y[150:])
    run = fit(
        "a",
        "--data.root a.npz --data.task regression --data.partition iid --data.fraction 1 --method "
        "fedavg",
    )
    assert float(table(run)[-1]["mean_mae"]) < float(np.abs(y).mean())
    np.savez(
        workplace / "new.npz", x_train=x[:20], y_train=y[:20], x_test=x[20:40], y_test=y[20:40]
    )
    assert main(["join", "--run", "runs/a", "--data", "new.npz", "--out", "new.safetensors"]) == 0
    y[0] = np.inf
    np.savez(workplace / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    assert main(["fit", "--data.root", "a.npz", "--data.task", "regression", "--name", "b"]) == 2


def test_smoke_makes_targets_up(
    fit: Callable[..., Path], table: Callable[..., list[dict[str, str]]]
) -> None:
    run = fit("a", FLAGS, "--data.root none.csv --smoke")
    assert np.isfinite(float(table(run)[-1]["mean_mae"]))
