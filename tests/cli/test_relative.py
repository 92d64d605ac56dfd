"""`fl-train relative`: figures by hand, one reference for all runs of a setting, and clear refusals."""

from __future__ import annotations

import csv
import json
import threading
from pathlib import Path

import numpy as np
import pytest
import yaml

from fl_lightning.cli import main
from fl_lightning.files import take

QUICK = "--config kapc_exact_digits --loggers null --callbacks.heatmaps null --federation.clients 4"
QUICK += " --fabric.accelerator cpu"


def final(folder: Path) -> np.ndarray:
    with (folder / "final.csv").open() as file:
        return np.array([float(row["accuracy"]) for row in csv.DictReader(file)])


@pytest.mark.slow
def test_figures_are_those_of_a_local_run(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    for name in ("kapc", "fedavg", "local"):
        assert main(f"fit {QUICK} --federation.rounds 2 --method {name} --name {name}".split()) == 0
    capsys.readouterr()
    for name in ("kapc", "fedavg"):
        assert main(f"relative --run runs/{name}".split()) == 0
        ours, alone = final(runs / name), final(runs / "local")
        found = json.loads((runs / name / "relative.json").read_text())
        assert found["relative_accuracy"] == pytest.approx(np.mean((ours - alone) / alone))
        assert found["positive_transfer_ratio"] == np.mean(ours >= alone)
        assert found["local_mean_accuracy"] == pytest.approx(alone.mean())
        assert found["judge"] == {"kapc": "after local training", "fedavg": "global model"}[name]
        assert found["local_judge"] == "after local training"
        assert f"{found['relative_accuracy']}" in capsys.readouterr().out
    references = list((runs / "references").iterdir())
    assert len(references) == 1  # the second run found it
    assert np.array_equal(final(references[0]), final(runs / "local"))


def test_a_run_beside_itself_is_no_gain(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(f"fit {QUICK} --federation.rounds 1 --method local --name a".split()) == 0
    assert main(["relative", "--run", "runs/a"]) == 0
    found = json.loads((tmp_path / "runs" / "a" / "relative.json").read_text())
    assert found["relative_accuracy"] == 0
    assert found["positive_transfer_ratio"] == 1  # ties count


def test_an_unfinished_run_is_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(f"fit {QUICK} --federation.rounds 1 --name a".split()) == 0
    (tmp_path / "runs" / "a" / "summary.json").unlink()
    capsys.readouterr()
    for run in ("runs/a", "runs/none"):
        assert main(f"relative --run {run}".split()) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.slow
def test_a_reference_that_another_process_trains_is_waited_for(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(f"fit {QUICK} --federation.rounds 1 --method local --name a".split()) == 0
    assert main(["relative", "--run", "runs/a"]) == 0
    (reference,) = (tmp_path / "runs" / "references").iterdir()
    told = capsys.readouterr().out
    summary, ended = reference / "summary.json", reference / "ended.json"
    summary.rename(ended)
    held = take(reference / "lock")

    def end() -> None:
        ended.rename(summary)
        held.close()

    ending = threading.Timer(1.0, end)
    ending.start()
    monkeypatch.setattr("fl_lightning.run.fit", lambda *_, **__: pytest.fail("it was trained beside the other"))
    assert main(["relative", "--run", "runs/a"]) == 0
    ending.join()
    out, err = capsys.readouterr()
    assert told.endswith(out) and err.count("\n") == 1 and "waiting for its end" in err


def test_clients_without_a_score_are_left_out_and_counted(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(f"fit {QUICK} --federation.rounds 1 --method local --name a".split()) == 0
    table = tmp_path / "runs" / "a" / "final.csv"
    lines = table.read_text().splitlines(keepends=True)
    scored = final(table.parent)[[0, 2, 3]]
    table.write_text("".join([*lines[:2], "1,nan,after\n", *lines[3:]]))
    assert main(["relative", "--run", "runs/a"]) == 0
    text = (tmp_path / "runs" / "a" / "relative.json").read_text()
    assert "NaN" not in text
    found = json.loads(text)
    assert (found["relative_accuracy"], found["positive_transfer_ratio"]) == (0, 1)
    assert found["mean_accuracy"] == found["local_mean_accuracy"] == pytest.approx(scored.mean())
    assert (found["clients"], found["without_score"], found["without_reference"]) == (3, 1, 0)

    table.write_text("".join([lines[0], *(f"{c},nan,after\n" for c in range(4))]))
    assert main(["relative", "--run", "runs/a"]) == 0
    found = json.loads((tmp_path / "runs" / "a" / "relative.json").read_text())
    assert (found["relative_accuracy"], found["positive_transfer_ratio"], found["without_score"]) == (None, None, 4)

    capsys.readouterr()
    for name, text in (("final.csv", lines[0] + "0,x,after\n"), ("final.csv", lines[0]), ("summary.json", '{"rou')):
        (tmp_path / "runs" / "a" / name).write_text(text)
        assert main(["relative", "--run", "runs/a"]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and f"its {name} is damaged" in err


def test_a_reference_on_other_samples_is_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    x, y = np.random.default_rng(0).random((300, 5), np.float32), np.arange(300) % 3

    def keep(shift: float) -> None:
        np.savez("own.npz", x_train=x[:200] + shift, y_train=y[:200], x_test=x[200:], y_test=y[200:])

    own = (
        "--data.source arrays --data.root own.npz --federation.clients 4 --federation.rounds 1 --fabric.accelerator cpu"
    )
    keep(0.0)
    assert main(["fit", *own.split(), "--name", "a"]) == 0
    keep(1.0)
    assert main(["relative", "--run", "runs/a"]) == 2
    assert "its clients had other samples than those of its reference" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "a" / "relative.json").exists()
    assert main(["test", "--run", "runs/a"]) == 0
    assert "data: the data have changed since the run trained on them" in capsys.readouterr().err
    assert main(["audit", "runs/a", "--out", "audit"]) == 0
    assert "data: the data have changed since the run trained on them" in capsys.readouterr().err
    keep(0.0)
    assert main(["test", "--run", "runs/a"]) == 0
    assert "data: the data have changed" not in capsys.readouterr().err


def test_a_folder_that_takes_no_reference_is_one_line(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(f"fit {QUICK} --print_config".split()) == 0
    config = capsys.readouterr().out
    (tmp_path / "runs/a").mkdir(parents=True)
    (tmp_path / "runs/a/config.yaml").write_text(config)
    rounds = yaml.safe_load(config)["federation"]["rounds"]
    (tmp_path / "runs/a/summary.json").write_text(json.dumps({"rounds": rounds}))
    (tmp_path / "runs/references").touch()
    assert main(["relative", "--run", "runs/a"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"fl-train: error: cannot write {tmp_path}/runs/references/")
