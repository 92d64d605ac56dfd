"""`fl-train test`, `export` and `list` on real runs; every method; the run folder; judged
rounds."""

import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from lines import run_line
from safetensors.torch import load_file

from fl_lightning import __version__
from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import prepare


def told(capsys):
    """What `fl-train test` has printed, by name."""
    return dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())


# ---------------------------------------------------------------- test


@pytest.mark.sampled("fedamp")
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--federation.participation 0.5",
        "--method fedavg --federation.participation 0.5",
        "--method fedavg --federation.participation 0.4 --federation.rounds 3 --evaluation.judge "
        "after",
        "--method fedprox --model fl_own_models.Normed",
        "--method fedamp --evaluation.judge finetuned",
        "--method local --fabric.precision 64-true",
    ],
)
def test_test_gives_the_final_accuracies_again(fit, capsys, record, flags):
    folder = fit("a", flags)
    before = record(folder)
    summary = json.loads((folder / "summary.json").read_text())
    capsys.readouterr()
    assert run_line("test --run runs/a") == 0
    again = told(capsys)
    for name in (
        "final_mean_accuracy",
        "final_worst_accuracy",
        "final_std_accuracy",
        "judge",
        "final_model",
        "final_kinds",
    ):
        assert again[name] == str(summary[name])
    assert again["round"] == "3"
    assert record(folder) == before


def test_test_shows_scores_on_the_test_set_of_all(fit, capsys):
    folder = fit("a", "--method fedavg --data.global_test true --evaluation.judge after")
    capsys.readouterr()
    assert run_line("test --run runs/a") == 0
    again, summary = told(capsys), json.loads((folder / "summary.json").read_text())
    name = "final_global_test_accuracy_global"
    assert again[name] == str(summary[name]) == str(summary["last_global_test_accuracy_global"])


@pytest.mark.slow
def test_test_on_two_processes(fit, on_ranks, table):
    flags = "--federation.participation 0.5"
    folder = fit("a", flags)
    finals = [float(row["accuracy"]) for row in table(folder, "final.csv")]
    on_ranks(2, ["test", "--run", "runs/a"])
    again = (folder.parents[1] / "rank-0").read_text()
    assert f"final_mean_accuracy          {np.mean(finals)}" in again
    assert (folder.parents[1] / "rank-1").read_text() == ""


# ---------------------------------------------------------------- export


WRAPPING = {
    **dict.fromkeys(("fedcp", "dbe", "pfedfda", "partialpooling", "moon"), True),
    **dict.fromkeys(("fedrod", "gpfl", "fedem", "knnper", "fedproto", "fedtgp"), False),
}
"""Methods that train another network than the user's, or score more than it; whether model(x) is
what they score."""
NEEDED = {"knnper": "--method.lam 0.5", "moon": "--method.projection 8"}


@pytest.mark.sampled("finetuned")
@pytest.mark.parametrize(
    "flags, plain",
    [
        ("", True),
        ("--method fedavg", True),
        ("--method fedavg --evaluation.judge after", True),
        pytest.param("--method fedavg --evaluation.judge finetuned", True, id="fedavg-finetuned"),
        ("--evaluation.judge before", True),
        ("--model fl_own_models.Normed --model.width 3 --federation.participation 0.5", True),
        ("--model fl_own_models.Lit --method fedamp", True),
        *((f"--method {name} {NEEDED.get(name, '')}", scored) for name, scored in WRAPPING.items()),
    ],
)
def test_export_gives_a_plain_model_with_the_clients_accuracy(fit, table, flags, plain):
    """By the lines that it prints."""
    finals = [float(row["accuracy"]) for row in table(fit("a", flags), "final.csv")]
    assert run_line("export --run runs/a --client 3 --out model.safetensors") == 0
    tensors, text = load_file("model.safetensors"), Path("model.py").read_text()
    namespace = {}
    exec(text, namespace)
    model = namespace["model"]
    loaded = model.state_dict()
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], x) for name, x in tensors.items())
    ruled = "# The run scored it by the method's own rule, not by model(x) alone: " in text
    assert ruled != plain
    part = prepare(DataConfig(fraction=0.4), 5, seed=0).client(3).test
    x, y = (torch.cat(parts) for parts in zip(*part.batches(1000), strict=True))
    with torch.no_grad():
        accuracy = float((model(x).argmax(1) == y).float().mean())
    assert ruled or accuracy == pytest.approx(finals[3], abs=1e-6)


# ---------------------------------------------------------------- methods and models by one flag


# ---------------------------------------------------------------- the run folder


def test_the_run_folder_is_what_scripts_rely_on(workplace, table, capsys):
    line = (
        "fit --config kapc_exact_digits --federation.rounds 2 --federation.clients 4 "
        "--federation.local_epochs 1 --out deep/runs --fabric.accelerator cpu"
    )
    assert run_line(line) == 0
    folder = workplace / "deep/runs/kapc_exact_digits-001"
    assert "deep/runs/kapc_exact_digits-001" in capsys.readouterr().out  # where everything is
    # beside it, not instead of it
    assert {"wandb", "tensorboard"} <= {path.name for path in folder.iterdir()}
    assert not [path for path in folder.rglob(".*") if path.is_file()]  # nothing half-written
    figures = list((folder / "figures").glob("*.png"))
    assert figures and all(file.read_bytes().startswith(b"\x89PNG") for file in figures)

    metrics, clients = table(folder), table(folder, "clients.csv")
    places = [(row["round"], row["client"]) for row in clients]
    assert places == [(str(t), str(c)) for t in (1, 2) for c in range(4)]
    means = [float(row["mean_accuracy"]) for row in metrics]
    first = [float(row["accuracy_after"]) for row in clients[:4]]
    assert means[0] == pytest.approx(np.mean(first))
    assert sum(int(row["upload_bytes"]) for row in clients[:4]) == int(metrics[0]["upload_bytes"])
    with np.load(folder / "relation" / "round-0002.npz") as held:
        assert held["rows"].shape == (4, 3, 4)
        assert np.allclose(held["rows"].sum(-1), 1)
        assert held["layers"].tolist() == ["hidden.0", "hidden.1", "classifier"]

    summary = json.loads((folder / "summary.json").read_text())
    wanted = {
        "method": "kapc",
        "rounds": 2,
        "clients": 4,
        "world_size": 1,
        "version": __version__,
        "best_mean_accuracy": max(means),
        "best_round": 1 + int(np.argmax(means)),
        "last_mean_accuracy": means[-1],
        "final_kinds": {"after": 4},
    }
    assert {name: summary[name] for name in wanted} == wanted
    kept = {"upload_bytes", "download_bytes"}  # scripts rely on these two: the run's totals
    for name in kept:
        assert summary[name] == summary[f"total_{name}"] == sum(int(row[name]) for row in metrics)
    assert summary.keys() & {*metrics[0], *clients[0]} == kept  # else one meaning a name


@pytest.mark.slow
def test_config_yaml_gives_the_same_run_again(fit, record):
    folder = fit("a", "--seed 3 --federation.participation 0.5 --data.alpha 0.3")
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert not {"out", "name", "resume"} & saved.keys()
    assert run_line("fit --config runs/a/config.yaml --name b") == 0
    assert record(folder.with_name("b")) == record(folder)
    other = record(fit("c", "--seed 4 --federation.participation 0.5 --data.alpha 0.3"))
    assert other.weights != record(folder).weights


def test_losses_are_those_of_clients_that_took_a_step(fit, table):
    """`local` with a budget of two epochs: who has spent it has no loss, and the round's mean is
    that of the others."""
    folder = fit(
        "a", "--method local --method.epochs 2 --federation.participation 0.6 --federation.rounds 8"
    )
    turns = Counter()
    losses = {str(t): [] for t in range(1, 9)}
    for row in table(folder, "clients.csv"):
        turns[row["client"]] += 1
        for name in ("train_loss", "coaching_loss"):
            assert bool(row[name]) == (turns[row["client"]] <= 2)
        if row["train_loss"]:
            losses[row["round"]].append(float(row["train_loss"]))
    assert {len(found) for found in losses.values()} == {0, 1, 2, 3}
    for row in table(folder):
        found = losses[row["round"]]
        assert row["train_loss"] == (repr(float(np.mean(found))) if found else "")
        assert row["coaching_loss"] == ("0.0" if found else "")


# ---------------------------------------------------------------- when models are judged


def test_judged_every_other_round_and_in_the_last(fit, table, record):
    folder = fit("a", "--evaluation.every 2")
    rows = table(folder)
    assert [bool(row["mean_accuracy"]) for row in rows] == [False, True, True]
    assert all(row["train_loss"] for row in rows)
    clients = table(folder, "clients.csv")
    assert {row["round"] for row in clients if row["accuracy_after"]} == {"2", "3"}
    # judging changes nothing
    assert record(folder).weights == record(fit("b", "--evaluation.every 1")).weights


# ---------------------------------------------------------------- where the samples lie


@pytest.mark.slow
def test_a_data_loader_gives_the_same_numbers(fit, record):
    flags = "--model fl_own_models.Lit --optimizer.name module"
    resident, loaded = (
        record(fit(when, flags, f"--data.resident {when}")) for when in ("always", "never")
    )
    assert resident == loaded


@pytest.mark.slow
def test_without_wandb_s_variable_nothing_waits_for_a_key(command, monkeypatch, workplace):
    for name in [n for n in os.environ if n.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(workplace))  # no key in a .netrc either
    done = command(
        "fit --config kapc_exact_digits --smoke --loggers.tensorboard null --fabric.accelerator cpu"
    )
    assert "W&B: offline, since no API key is known" in done.stderr


@pytest.mark.slow
def test_join_where_clients_run_several_architectures(fit, refused, capsys):
    """The one that is named, or the one at a place; without either it says which there are."""
    fit("a", "--config ../mixed.yaml --federation.clients 5 --federation.rounds 1 --method fedavg")
    np.savez("new.npz", x_train=np.zeros((30, 8, 8), np.uint8), y_train=np.arange(30) % 10)
    for name, architecture in (("mlp", "MLP("), ("1", "Normed(")):
        capsys.readouterr()
        assert (
            run_line(
                f"join --run runs/a --data new.npz --out of_{name}.safetensors "
                f"--architecture {name}"
            )
            == 0
        )
        assert architecture in Path(f"of_{name}.py").read_text()
    for words, value in (
        ("", "None"),
        (" --architecture cnn", "'cnn'"),
        (" --architecture 2", "'2'"),
    ):
        said = refused(f"join --run runs/a --data new.npz --out other.safetensors{words}")
        assert said.startswith(f"architecture={value}") and "mlp, normed" in said
