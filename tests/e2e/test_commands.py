"""`fl-train test`, `export` and `list` on real runs; every method; the run folder; judged
rounds."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn

from fl_lightning import __version__
from fl_lightning.cli import main
from fl_lightning.configuration import catalogue
from fl_lightning.configuration.catalogue import KINDS, table
from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import prepare
from fl_lightning.methods import Method


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What `fl-train test` has printed, by name."""
    return dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())


# ---------------------------------------------------------------- test


@pytest.mark.sampled("[]", "fedavg", "finetuned")
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
def test_test_gives_the_final_accuracies_again(
    fit: Callable[..., Path], capsys: pytest.CaptureFixture[str], record: Any, flags: str
) -> None:
    folder = fit("a", flags)
    before = record(folder)
    summary = json.loads((folder / "summary.json").read_text())
    capsys.readouterr()
    assert main(["test", "--run", "runs/a"]) == 0
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


def test_test_shows_scores_on_the_test_set_of_all(
    fit: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fit("a", "--method fedavg --data.global_test true --evaluation.judge after")
    capsys.readouterr()
    assert main(["test", "--run", "runs/a"]) == 0
    again, summary = told(capsys), json.loads((folder / "summary.json").read_text())
    name = "final_global_test_accuracy_global"
    assert again[name] == str(summary[name]) == str(summary["last_global_test_accuracy_global"])


def test_test_on_two_processes(
    fit: Callable[..., Path], on_ranks: Callable[..., None], table: Any
) -> None:
    flags = "--federation.participation 0.5"
    folder = fit("a", flags)
    finals = [float(row["accuracy"]) for row in table(folder, "final.csv")]
    on_ranks(2, ["test", "--run", "runs/a"])
    again = (folder.parents[1] / "rank-0").read_text()
    assert f"final_mean_accuracy          {np.mean(finals)}" in again
    assert (folder.parents[1] / "rank-1").read_text() == ""


# ---------------------------------------------------------------- export

LOAD = """
import runpy
import numpy as np, torch
model = runpy.run_path("model.py")["model"]
held = np.load("client.npz")
with torch.no_grad():
    right = model(torch.from_numpy(held["x"])).argmax(1).numpy() == held["y"]
print(right.mean())
"""


@pytest.mark.sampled("[]", "Lit", "finetuned")
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--method fedavg",
        "--method fedavg --evaluation.judge after",
        "--method fedavg --evaluation.judge finetuned",
        "--evaluation.judge before",
        "--model fl_own_models.Normed --model.width 3 --federation.participation 0.5",
        "--model fl_own_models.Lit --method fedamp",
    ],
)
def test_export_gives_a_plain_model_with_the_clients_accuracy(
    fit: Callable[..., Path],
    table: Callable[..., list[dict[str, str]]],
    workplace: Path,
    flags: str,
) -> None:
    finals = [float(row["accuracy"]) for row in table(fit("a", flags), "final.csv")]
    part = prepare(DataConfig(fraction=0.4), 5, seed=0).client(3).test
    x, y = (torch.cat(parts) for parts in zip(*part.batches(1000), strict=True))
    np.savez(workplace / "client.npz", x=x.numpy(), y=y.numpy())
    assert main(["export", "--run", "runs/a", "--client", "3", "--out", "model.safetensors"]) == 0
    tensors = load_file("model.safetensors")
    namespace: dict[str, Any] = {}
    exec(Path("model.py").read_text(), namespace)
    model: nn.Module = namespace["model"]
    assert tensors.keys() == model.state_dict().keys()
    with torch.no_grad():
        accuracy = float((model(x).argmax(1) == y).float().mean())
    assert accuracy == pytest.approx(finals[3], abs=1e-6)


WRAPPING = {
    **dict.fromkeys(("fedcp", "dbe", "pfedfda", "partialpooling"), True),
    **dict.fromkeys(
        ("fedrod", "gpfl", "fedem", "knnper --method.lam 0.5", "fedproto", "fedtgp"), False
    ),
    "moon --method.projection 8": True,
}
"""Methods that train another network than the user's, or score more than it; whether model(x) is
what they score."""


@pytest.mark.sampled("fedrod", "dbe")
@pytest.mark.parametrize("method", WRAPPING)
def test_what_a_method_builds_loads_by_the_printed_lines(
    fit: Callable[..., Path], table: Callable[..., list[dict[str, str]]], method: str
) -> None:
    finals = [
        float(row["accuracy"])
        for row in table(fit("a", f"--method {method}", "--seed 0"), "final.csv")
    ]
    assert main(["export", "--run", "runs/a", "--client", "3", "--out", "model.safetensors"]) == 0
    namespace: dict[str, Any] = {}
    text = Path("model.py").read_text()
    exec(text, namespace)
    loaded, tensors = namespace["model"].state_dict(), load_file("model.safetensors")
    assert loaded.keys() == tensors.keys() and all(
        torch.equal(loaded[name], x) for name, x in tensors.items()
    )
    assert (
        "# The run scored it by the method's own rule, not by model(x) alone: " in text
    ) != WRAPPING[method]
    part = prepare(DataConfig(fraction=0.4), 5, seed=0).client(3).test
    x, y = (torch.cat(parts) for parts in zip(*part.batches(1000), strict=True))
    with torch.no_grad():
        accuracy = float((namespace["model"](x).argmax(1) == y).float().mean())
    assert not WRAPPING[method] or accuracy == pytest.approx(finals[3], abs=1e-6)


def test_every_method_that_builds_or_scores_more_is_among_them() -> None:
    """So that a new one is tried, too."""
    found = set()
    for name, entry in catalogue.table("methods").items():
        module, _, cls = entry.class_path.rpartition(".")
        kind = getattr(importlib.import_module(module), cls)
        if (
            kind.build is not Method.build
            or kind.outputs is not Method.outputs
            or kind.prepare is not Method.prepare
        ):
            found.add(name)
    assert found == {key.split()[0] for key in WRAPPING} - {"pfedfda"}


@pytest.mark.slow
def test_an_exported_model_needs_nothing_of_the_run(
    fit: Callable[..., Path], workplace: Path
) -> None:
    folder = fit("a")
    assert main(["export", "--run", "runs/a", "--client", "0", "--out", "model.safetensors"]) == 0
    for path in sorted(folder.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    np.savez(
        workplace / "client.npz", x=np.zeros((2, 1, 8, 8), np.float32), y=np.zeros(2, np.int64)
    )
    done = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 0 <= float(done.stdout) <= 1


# ---------------------------------------------------------------- list


def test_list(command: Callable[..., Any]) -> None:
    lines = command("list").stdout.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == list(KINDS)
    told = [line.split()[0] for line in lines if line.startswith(" ") and not line.endswith(":")]
    assert sorted(told) == sorted(name for kind in KINDS for name in table(kind))


# ---------------------------------------------------------------- methods and models by one flag


NEEDS = {
    "dbe": "--evaluation.judge after",  # what clients begin round 3 with has trained for one round
    **dict.fromkeys(("fedora", "fedfomo", "knnper"), "--data.validation 0.2"),
    **dict.fromkeys(
        ("fedmd", "simpfd", "topkpfd", "ktpfl"), "--data.public held_back --method.samples 24"
    ),
    **dict.fromkeys(("feddf", "pfeddf"), "--data.public held_back --method.steps 5"),
    "pfedhn": "--method.hyper_lr 0.1",  # three rounds are few
    "fedsalora": "--model.adapters.rank 2",
    # three rounds are few for its global model
    "ffalora": "--model.adapters.rank 2 --evaluation.judge after",
    "blurrelation": "--callbacks.blurrelation.decimals 2",
    "attack": "--callbacks.attack.kind sign_flip --callbacks.attack.clients [1]",
    "krum": "--callbacks.krum.attackers 0 --method fedavg",
    "localprivacy": "--callbacks.localprivacy.clip 1 --callbacks.localprivacy.noise 1",
    "median": "--method fedavg",
    "normbound": "--callbacks.normbound.bound 1",
    "canaries": "--callbacks.localprivacy.clip 1 --callbacks.localprivacy.noise 1",
    "centralprivacy": "--callbacks.centralprivacy.clip 1 --callbacks.centralprivacy.noise 1 "
    "--method fedavg",
    "trimmedmean": "--callbacks.trimmedmean.share 0.2 --method fedavg",
    "stepprivacy": "--optimizer.privacy.clip 1 --optimizer.privacy.noise 1",
}
"""What some ask for beyond their name."""


@pytest.mark.sampled("[fedavg]", "[kapc]", "[ktpfl]")
@pytest.mark.parametrize("method", table("methods"))
def test_every_method_runs_and_learns_on_the_shipped_config(
    fit: Callable[..., Path], table: Callable[..., list[dict[str, str]]], method: str
) -> None:
    """The counterpart of KAPC's config is one flag away."""
    folder = fit("a", f"--method {method}", "--federation.local_epochs 3", NEEDS.get(method, ""))
    metrics = [float(row["mean_accuracy"]) for row in table(folder)]
    assert len(metrics) == 3
    assert metrics[-1] > 0.25
    assert json.loads((folder / "summary.json").read_text())["method"] == method
    sent = [int(row["upload_bytes"]) for row in table(folder)]
    assert all(sent) if method != "local" else not any(sent)


# the others are in other tests
@pytest.mark.sampled("attack", "fixedrate", "krum", "layerselection", "topk")
@pytest.mark.parametrize("callback", table("callbacks"))
def test_every_shipped_callback_can_be_named(
    fit: Callable[..., Path], table: Callable[..., list[dict[str, str]]], callback: str
) -> None:
    assert (
        len(
            table(
                fit("a", f"--callbacks {callback} --federation.rounds 2", NEEDS.get(callback, ""))
            )
        )
        == 2
    )


# ---------------------------------------------------------------- the run folder


def test_the_run_folder_is_what_scripts_rely_on(
    workplace: Path, table: Callable[..., list[dict[str, str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    line = (
        "fit --config kapc_exact_digits --federation.rounds 2 --federation.clients 4 "
        "--federation.local_epochs 1"
    )
    assert main([*line.split(), "--out", "deep/runs", "--fabric.accelerator", "cpu"]) == 0
    out, err = capsys.readouterr()
    folder = workplace / "deep" / "runs" / "kapc_exact_digits-001"
    assert str(folder.relative_to(workplace)) in out  # where everything is
    assert "round 2/2" in err
    present = {path.name for path in folder.iterdir()}
    assert {
        "config.yaml",
        "metrics.csv",
        "clients.csv",
        "relation",
        "figures",
        "checkpoints",
        "summary.json",
    } <= present
    assert {"wandb", "tensorboard"} <= present  # beside it, not instead of it
    assert not [path for path in folder.rglob(".*") if path.is_file()]  # nothing half-written

    metrics = table(folder)
    assert [row["round"] for row in metrics] == ["1", "2"]
    columns = "mean_accuracy worst_accuracy std_accuracy train_loss upload_bytes download_bytes "
    columns += "upload_parameter_bytes download_parameter_bytes seconds"
    for row in metrics:
        assert set(columns.split()) <= row.keys()
        assert all(float(row[name]) >= 0 for name in columns.split())
        assert any(name.startswith("memory") for name in row)
        assert 0 <= float(row["worst_accuracy"]) <= float(row["mean_accuracy"]) <= 1
    clients = table(folder, "clients.csv")
    assert [(row["round"], row["client"]) for row in clients] == [
        (str(t), str(c)) for t in (1, 2) for c in range(4)
    ]
    first = [float(row["accuracy_after"]) for row in clients[:4]]
    assert float(metrics[0]["mean_accuracy"]) == pytest.approx(np.mean(first))
    assert sum(int(row["upload_bytes"]) for row in clients[:4]) == int(metrics[0]["upload_bytes"])

    assert {path.name for path in (folder / "relation").iterdir()} == {
        "round-0001.npz",
        "round-0002.npz",
    }
    with np.load(folder / "relation" / "round-0002.npz") as held:
        assert held["rows"].shape == (4, 3, 4)
        assert np.allclose(held["rows"].sum(-1), 1)
        assert held["layers"].tolist() == ["hidden.0", "hidden.1", "classifier"]
    figures = list((folder / "figures").glob("*.png"))
    assert figures
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in figures)

    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["method"], summary["rounds"], summary["clients"], summary["world_size"]) == (
        "kapc",
        2,
        4,
        1,
    )
    assert summary["version"] == __version__
    accuracies = [float(row["mean_accuracy"]) for row in metrics]
    assert summary["best_mean_accuracy"] == max(accuracies)
    assert summary["best_round"] == 1 + int(np.argmax(accuracies))
    assert summary["last_mean_accuracy"] == accuracies[-1]
    for name in (
        "upload_bytes",
        "download_bytes",
        "upload_parameter_bytes",
        "download_parameter_bytes",
    ):
        assert summary[f"total_{name}"] == sum(int(row[name]) for row in metrics)
    kept = {"upload_bytes", "download_bytes"}  # scripts rely on these two: the run's totals
    assert all(summary[name] == summary[f"total_{name}"] for name in kept)
    assert summary.keys() & {*metrics[0], *clients[0]} == kept  # else one meaning a name
    bests = [max(float(row["accuracy_after"]) for row in clients[c::4]) for c in range(4)]
    assert summary["mean_best_accuracy"] == pytest.approx(np.mean(bests))
    assert summary["mean_best_clients"] == 4
    assert summary["best_accuracy_before"] == max(float(row["accuracy_before"]) for row in metrics)
    assert [row["model"] for row in table(folder, "final.csv")] == ["after"] * 4
    assert summary["final_kinds"] == {"after": 4}
    assert summary["wall_seconds"] > 0


def test_config_yaml_gives_the_same_run_again(fit: Callable[..., Path], record: Any) -> None:
    folder = fit("a", "--seed 3 --federation.participation 0.5 --data.alpha 0.3")
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert not {"out", "name", "resume"} & saved.keys()
    assert main(["fit", "--config", "runs/a/config.yaml", "--name", "b"]) == 0
    assert record(folder.with_name("b")) == record(folder)
    other = record(fit("c", "--seed 4 --federation.participation 0.5 --data.alpha 0.3"))
    assert other.weights != record(folder).weights


def test_losses_are_those_of_clients_that_took_a_step(
    fit: Callable[..., Path], table: Callable[..., list[dict[str, str]]]
) -> None:
    """`local` with a budget of two epochs: who has spent it has no loss, and the round's mean is
    that of the others."""
    folder = fit(
        "a", "--method local --method.epochs 2 --federation.participation 0.6 --federation.rounds 8"
    )
    turns: Counter[str] = Counter()
    losses: dict[str, list[float]] = {str(t): [] for t in range(1, 9)}
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


def test_where_nobody_takes_a_step_columns_of_losses_are_empty(
    fit: Callable[..., Path], table: Callable[..., list[dict[str, str]]]
) -> None:
    folder = fit("a", "--federation.local_epochs 0 --federation.rounds 1")
    for name in ("metrics.csv", "clients.csv"):
        assert all(row["train_loss"] == row["coaching_loss"] == "" for row in table(folder, name))
    (row,) = table(folder)
    assert (
        row["objective_relation"] and not row.get("objective") and not row.get("objective_coaching")
    )


# ---------------------------------------------------------------- when models are judged


def test_judged_every_other_round_and_in_the_last(
    fit: Callable[..., Path], table: Callable[..., list[dict[str, str]]], record: Any
) -> None:
    metrics = table(fit("a", "--evaluation.every 2 --federation.rounds 5"))
    assert [bool(row["mean_accuracy"]) for row in metrics] == [False, True, False, True, True]
    assert all(row["train_loss"] for row in metrics)
    clients = table(Path("runs/a"), "clients.csv")
    assert {row["round"] for row in clients if row["accuracy_after"]} == {"2", "4", "5"}
    every = record(fit("b", "--evaluation.every 1 --federation.rounds 5"))
    assert record(Path("runs/a")).weights == every.weights  # judging changes nothing


@pytest.mark.parametrize("method", ["kapc", "fedavg"])
def test_finetuned_copies_are_judged_when_asked_for(
    fit: Callable[..., Path], table: Callable[..., list[dict[str, str]]], record: Any, method: str
) -> None:
    given = f"--method {method} --federation.rounds 2"
    folder = fit("a", given, "--evaluation.models [after,finetuned] --evaluation.finetune_epochs 3")
    for row in table(folder, "clients.csv"):
        assert 0 <= float(row["accuracy_finetuned"]) <= 1
        assert "accuracy_before" not in row
    plain = fit("b", given)
    assert "accuracy_finetuned" not in table(plain)[0]
    assert record(folder).weights == record(plain).weights  # it was a copy


# ---------------------------------------------------------------- where the samples lie


def test_a_data_loader_gives_the_same_numbers(fit: Callable[..., Path], record: Any) -> None:
    for k, flags in enumerate(["", "--model fl_own_models.Lit --optimizer.name module"]):
        resident = fit(f"resident-{k}", flags, "--data.resident always")
        assert record(fit(f"loaded-{k}", flags, "--data.resident never")) == record(resident)


@pytest.mark.slow
def test_a_data_loader_gives_the_same_numbers_with_augmentation(
    fit: Callable[..., Path], fl_data: Path, record: Any
) -> None:
    flags = (
        f"--data.source mnist --data.root {fl_data} --data.fraction 0.01 --data.augment crop_flip"
    )
    resident = fit("resident", flags, "--data.resident always")
    assert record(fit("loaded", flags, "--data.resident never")) == record(resident)
    assert record(resident) != record(fit("plain", flags, "--data.augment none"))


@pytest.mark.slow
def test_without_wandb_s_variable_nothing_waits_for_a_key(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, workplace: Path
) -> None:
    for name in [n for n in os.environ if n.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(workplace))  # no key in a .netrc either
    done = command(
        "fit --config kapc_exact_digits --smoke --loggers.tensorboard null --fabric.accelerator cpu"
    )
    assert "W&B: offline, since no API key is known" in done.stderr


def test_join_where_clients_run_several_architectures(
    fit: Callable[..., Path], refused: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The one that is named, or the one at a place; without either it says which there are."""
    fit("a", "--config ../mixed.yaml --federation.clients 5 --federation.rounds 1 --method fedavg")
    np.savez("new.npz", x_train=np.zeros((30, 8, 8), np.uint8), y_train=np.arange(30) % 10)
    for name, architecture in (("mlp", "MLP("), ("1", "Normed(")):
        capsys.readouterr()
        assert (
            main(
                f"join --run runs/a --data new.npz --out of_{name}.safetensors "
                f"--architecture {name}".split()
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
        assert said.startswith(f"architecture: {value} ") and "mlp, normed" in said
