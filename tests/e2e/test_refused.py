"""Bad input: one line on stderr that says what is wrong, exit code 2, and nothing written."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_lightning.cli import main

Refused = Callable[..., str]

QUIET = "--loggers null --callbacks.progress null --fabric.accelerator cpu --fabric.threads 1"
FIT = f"fit --config kapc_exact_digits {QUIET}"

CASES = {
    "unknown key": (
        "--federation.ronds 3",
        "federation.ronds: '3'",
        "did you mean federation.rounds?",
    ),
    "wrong type": ("--federation.rounds many", "federation.rounds: 'many'", "a whole number"),
    "missing config": ("--config nothing.yaml", "config: 'nothing.yaml'", "kapc_exact_digits"),
    "unknown method": ("--method fedvag", "method: 'fedvag'", "did you mean fedavg?"),
    "alpha 0": ("--data.alpha 0", "data.alpha: 0.0", "above 0"),
    "alpha below 0": ("--data.alpha -0.5", "data.alpha: -0.5", "above 0"),
    "participation 0": ("--federation.participation 0", "federation.participation: 0.0", "(0, 1]"),
    "participation 1.5": (
        "--federation.participation 1.5",
        "federation.participation: 1.5",
        "(0, 1]",
    ),
    "more clients than samples": (
        "--federation.clients 2000",
        "federation.clients: 2000",
        "samples",
    ),
    "more clients than a few samples": (
        "--data.fraction 0.05 --federation.clients 60",
        "federation.clients: 60",
        "",
    ),
    "more processes than clients": (
        "--federation.clients 2 --fabric.devices 3",
        "fabric.devices: 3",
        "2 clients",
    ),
    "no data": (
        "--data.source mnist --data.root nowhere",
        "data.root: 'nowhere'",
        "--data.download true",
    ),
    "no arrays": ("--data.source arrays --data.root x.npz", "data.root: 'x.npz'", "no such file"),
    "a root that no source reads": (
        "--data.root nowhere",
        "data.root: 'nowhere'",
        "digits reads no files",
    ),
    "a table as arrays": (
        "--data.source arrays --data.root x.csv",
        "data.source: 'arrays'",
        "for the source table",
    ),
    "no such source": ("--data.source minst", "data.source: 'minst'", "did you mean mnist?"),
    "fedamp's alpha": ("--method fedamp --method.alpha 0.2", "method.alpha: 0.2", "0.1111"),
    "model too small": ("--model cnn", "model.init_args.padding: 0", "(1, 8, 8)"),
    "model of other data": (
        "--model fl_own_models.Normed --model.side 28",
        "model: 'fl_own_models.Normed'",
        "(1, 8, 8)",
    ),
    "epochs and steps": (
        "--federation.local_epochs 2 --federation.local_steps 3",
        "federation.local_steps: 3",
        "one of them must be null",
    ),
    "an executor that is gone": (
        "--fabric.executor graph",
        "fabric.executor: 'graph'",
        "auto, loop, vmap",
    ),
    "a learning rate beyond 32 bits": ("--optimizer.lr 1e308", "optimizer.lr: 1e+308", "32 bits"),
    "features of two widths": (
        "--config ../mixed.yaml --federation.clients 5 --method fedproto",
        "model: 'mlp 16, normed 36'",
        "equally many",
    ),
    "one architecture": (
        "--config ../mixed.yaml --federation.clients 5",
        "model: ['mlp', 'normed']",
        "kapc mixes",
    ),
    "counts": (
        "--config ../mixed.yaml --federation.clients 6",
        "model: [3, 2]",
        "add up to federation.clients = 6",
    ),
    "no public data": ("--method ktpfl", "data.public: ", "held_back"),
    "more public samples than there are": (
        "--method fedmd --data.public held_back --method.samples 999",
        "method.samples: 999",
        "public samples",
    ),
    "an infinite argument": ("--method fedprox --method.mu .inf", "method.mu: inf", "finite"),
    "a pull beyond 32 bits": (
        "--method fedamp --method.lam 1e30 --method.alpha 1e-30 --method.sigma 1",
        "method.lam: 1e+30",
        "lam / (2 alpha) must be a number of 32 bits",
    ),
    "a body and a classifier": (
        "--method fedrep --model.hidden []",
        "model: 'mlp'",
        "it must have both",
    ),
    "16 bits on a CPU": (
        "--fabric.precision 16-mixed",
        "fabric.precision: '16-mixed'",
        "bf16-mixed",
    ),
    "a name that no disk takes": (f"--name {'x' * 300}", "name: 'xxx", "255 bytes"),
    "no global model": ("--evaluation.judge global", "evaluation.judge: 'global'", "global model"),
    "no optimiser": ("--optimizer.name module", "optimizer.name: 'module'", "configure_optimizers"),
    "no such client": (
        "--callbacks.heatmaps.clients [99]",
        "callbacks.heatmaps.clients: 99",
        "0 to 9",
    ),
    "no GPU": ("--fabric.accelerator cuda --fabric.devices 99", "fabric.", "CUDA device"),
    "several nodes": ("--fabric.num_nodes 2", "fabric.num_nodes: 2", "torchrun"),
    "no seed": ("--seed -1", "seed: -1", "[0, 2**63)"),
}


@pytest.mark.parametrize(("flags", "begins", "says"), CASES.values(), ids=CASES)
def test_refused(refused: Refused, flags: str, begins: str, says: str) -> None:
    error = refused(FIT, flags)
    assert error.startswith(begins)
    assert " is not allowed; " in error
    assert says in error


def test_no_data_and_no_network(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, workplace: Path
) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nothing listens
    (workplace / "nowhere" / "MNIST" / "raw").mkdir(parents=True)  # torchvision makes these
    error = refused(FIT, "--data.source mnist --data.root nowhere --data.download true")
    assert error.startswith("data.root: 'nowhere' ")
    assert "--data.source digits" in error


def test_an_existing_run_is_left_alone(fit: Callable[..., Path], refused: Refused) -> None:
    fit("a")
    assert "--resume" in refused(FIT, "--name a")
    Path("runs/b").mkdir()
    (Path("runs/b") / "notes.txt").write_text("mine")
    assert "it is no run: remove it" in refused(FIT, "--name b")


@pytest.mark.parametrize(
    "verb", ["test --run {}", "export --client 0 --out m.safetensors --run {}"]
)
def test_a_folder_that_is_no_run(refused: Refused, verb: str, workplace: Path) -> None:
    assert "there is no run" in refused(verb.format("nowhere"))
    (workplace / "empty").mkdir()
    assert "there is no run" in refused(verb.format("empty"))


def test_a_run_without_a_checkpoint(fit: Callable[..., Path], refused: Refused) -> None:
    fit("a", "--callbacks.checkpoint null")
    assert "no checkpoint" in refused("test --run runs/a")
    assert "no checkpoint" in refused("export --run runs/a --client 0 --out m.safetensors")


def test_export_of_a_client_that_does_not_exist(fit: Callable[..., Path], refused: Refused) -> None:
    fit("a")
    assert refused("export --run runs/a --client 5 --out m.safetensors").startswith("client: '5' ")
    assert refused("export --run runs/a --client -1 --out m.safetensors").startswith(
        "client: '-1' "
    )


@pytest.mark.sampled("hidden", "fedavg")
@pytest.mark.parametrize(
    ("flags", "begins"),
    [
        ("--model.hidden [17]", "model.hidden: [17] "),
        ("--model cnn", "model: 'cnn' "),
        ("--method fedavg", "method: 'fedavg' "),
        ("--seed 9", "seed: 9 "),
        ("--federation.rounds 2", "federation.rounds: 2 "),
        (
            "--callbacks.checkpoint null",
            "callbacks.checkpoint: None is not allowed; the run began with it; ",
        ),
    ],
)
def test_resumed_as_another_run(
    fit: Callable[..., Path],
    small: Callable[..., list[str]],
    refused: Refused,
    flags: str,
    begins: str,
) -> None:
    fit("a")
    assert refused(*small("a", flags, "--resume")).startswith(begins)


def test_resumed_on_other_data(
    small: Callable[..., list[str]],
    refused: Refused,
    workplace: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The folder of the data may move, but their split may not change; other contents of as many
    samples are named."""
    x, y = np.random.default_rng(0).random((300, 5), np.float32), np.arange(300) % 3
    for name, size in (("one", 200), ("moved", 200), ("other", 190)):
        np.savez(
            workplace / f"{name}.npz",
            x_train=x[:size],
            y_train=y[:size],
            x_test=x[200:],
            y_test=y[200:],
        )
    assert main(small("a", "--data.root one.npz", "--federation.rounds 2")) == 0
    before = {file: file.read_bytes() for file in (workplace / "runs/a").glob("*.csv")}
    error = refused(*small("a", "--data.root other.npz", "--federation.rounds 3 --resume"))
    assert (
        error.startswith("data.root: 'other.npz'") and "not those that the run began with" in error
    )
    assert before == {file: file.read_bytes() for file in (workplace / "runs/a").glob("*.csv")}
    split = workplace / "runs/a/split.csv"
    # a power cut: it is written without waiting for the disk
    split.write_bytes(split.read_bytes()[:-20])
    assert main(small("a", "--data.root moved.npz", "--federation.rounds 3 --resume")) == 0
    assert split.read_bytes() == before[split]
    assert "other samples" not in capsys.readouterr().err
    np.savez(
        workplace / "mended.npz",
        x_train=x[:200] + 1,
        y_train=y[:200],
        x_test=x[200:],
        y_test=y[200:],
    )
    assert main(small("a", "--data.root mended.npz", "--federation.rounds 4 --resume")) == 0
    assert "data: other samples than the run began with, from round 4 on" in capsys.readouterr().err


def test_a_finished_run_without_its_checkpoints_does_not_begin_again(
    fit: Callable[..., Path], small: Callable[..., list[str]], refused: Refused
) -> None:
    folder = fit("a")
    before = (folder / "metrics.csv").read_bytes()
    shutil.rmtree(folder / "checkpoints")
    assert "would begin again over its own tables" in refused(
        *small("a", "--federation.rounds 9 --resume")
    )
    assert (folder / "metrics.csv").read_bytes() == before


def test_a_folder_of_the_users_is_not_cleared_away(refused: Refused, workplace: Path) -> None:
    """`--resume` begins or goes on with a run; a folder of something else is left alone."""
    (workplace / "runs" / "a").mkdir(parents=True)
    (workplace / "runs" / "a" / "notes.txt").write_text("mine")
    assert refused(FIT, "--name a --resume").startswith("name: 'a'")
    assert (workplace / "runs" / "a" / "notes.txt").read_text() == "mine"


def test_a_model_that_has_changed_under_its_name(
    fit: Callable[..., Path],
    small: Callable[..., list[str]],
    refused: Refused,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The config says the same, yet the class is another now."""
    flags = "--model fl_own_models.Normed"
    fit("a", flags)
    import fl_own_models
    from torch import nn

    class Normed(fl_own_models.Normed):  # type: ignore[misc, name-defined]
        def __init__(self, side: int = 8, width: int = 4) -> None:
            super().__init__(side, width)
            self.extra = nn.Linear(2, 2)

    monkeypatch.setattr(fl_own_models, "Normed", Normed)
    assert "model" in refused(*small("a", flags, "--federation.rounds 5 --resume"))
    assert "model" in refused("test --run runs/a")


def test_arrays_that_do_not_fit(refused: Refused, workplace: Path) -> None:
    flat = {"x_train": np.zeros((90, 5), np.float32), "y_train": np.arange(90) % 3}
    np.savez(workplace / "flat.npz", **flat, x_test=flat["x_train"], y_test=flat["y_train"])
    few = "--federation.clients 2 --data.partition iid"
    assert refused(FIT, f"--data.root flat.npz {few} --model cnn").startswith("model")
    assert refused(FIT, f"--data.root flat.npz {few} --data.augment flip").startswith(
        "data.augment: 'flip'"
    )
    np.savez(workplace / "half.npz", x_train=flat["x_train"])
    assert "lacks y_train, x_test, y_test" in refused(FIT, "--data.root half.npz")


@pytest.mark.parametrize(
    "text", ["federation: {rounds: [1}", "- a\n- b\n", "federation:\n  ronds: 3\n", "\0"]
)
def test_a_config_that_cannot_be_read(refused: Refused, workplace: Path, text: str) -> None:
    (workplace / "bad.yaml").write_text(text)
    assert "bad.yaml" in refused("fit --config bad.yaml")


@pytest.mark.slow
def test_as_commands(command: Callable[..., Any], workplace: Path) -> None:
    for words in ("fit --federation.ronds 3", f"{FIT} --model cnn", "test --run nowhere"):
        done = command(words, code=2)
        assert done.stdout == ""
        assert done.stderr.startswith("fl-train: error: ")
        assert done.stderr.count("\n") == 1
    assert not list(workplace.iterdir())


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("flags", ["--model cnn", "--method fedamp --method.alpha 0.2"])
def test_found_by_the_ranks_themselves(
    command: Callable[..., Any], workplace: Path, flags: str
) -> None:
    start = time.monotonic()
    done = command(FIT, "--fabric.devices 2", flags, code=2)
    assert time.monotonic() - start < 90
    assert done.stdout == ""
    assert done.stderr.startswith("fl-train: error: m")
    assert done.stderr.count("\n") == 1
    assert not list(workplace.iterdir())
