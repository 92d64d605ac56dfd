"""Bad input: one line on stderr that says what is wrong, exit code 2, and nothing written."""

import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from fl_lightning.cli import main

QUIET = "--loggers null --callbacks.progress null --fabric.accelerator cpu --fabric.threads 1"
FIT = f"fit --config kapc_exact_digits {QUIET}"

CASES = {
    "more clients than samples": (
        "--federation.clients 2000",
        "federation.clients=2000",
        "samples",
    ),
    "more clients than a few samples": (
        "--data.fraction 0.05 --federation.clients 60",
        "federation.clients=60",
        "",
    ),
    "more processes than clients": (
        "--federation.clients 2 --fabric.devices 3",
        "fabric.devices=3",
        "use 2 or fewer",
    ),
    "no data": (
        "--data.source mnist --data.root nowhere",
        "data.root='nowhere'",
        "--data.download true",
    ),
    "no arrays": ("--data.source arrays --data.root x.npz", "data.root='x.npz'", "no such file"),
    "a table as arrays": (
        "--data.source arrays --data.root x.csv",
        "data.source='arrays'",
        "for the source table",
    ),
    "fedamp's alpha": ("--method fedamp --method.alpha 0.2", "method.alpha=0.2", "0.1111"),
    "model too small": ("--model cnn", "model.init_args.padding=0", "(1, 8, 8)"),
    "model of other data": (
        "--model fl_own_models.Normed --model.side 28",
        "model='fl_own_models.Normed'",
        "(1, 8, 8)",
    ),
    "epochs and steps": (
        "--federation.local_epochs 2 --federation.local_steps 3",
        "federation.local_steps=3",
        "one of them must be null",
    ),
    "a learning rate beyond 1.7e+38": ("--optimizer.lr 1e308", "optimizer.lr=1e+308", "1.7e+38"),
    "features of two widths": (
        "--config ../mixed.yaml --federation.clients 5 --method fedproto",
        "model='mlp 16, normed 36'",
        "equally many",
    ),
    "one architecture": (
        "--config ../mixed.yaml --federation.clients 5",
        "model=['mlp', 'normed']",
        "kapc mixes",
    ),
    "counts": (
        "--config ../mixed.yaml --federation.clients 6",
        "model=[3, 2]",
        "add up to federation.clients = 6",
    ),
    "no public data": ("--method ktpfl", "data.public=", "held_back"),
    "more public samples than there are": (
        "--method fedmd --data.public held_back --method.samples 999",
        "method.samples=999",
        "public samples",
    ),
    "a pull beyond 1.7e+38": (
        "--method fedamp --method.lam 1e30 --method.alpha 1e-30 --method.sigma 1",
        "method.lam=1e+30",
        "lam / (2 alpha) is too large for float32",
    ),
    "a body and a classifier": (
        "--method fedrep --model.hidden []",
        "model='mlp'",
        "needs a body below the classifier",
    ),
    "16 bits on a CPU": (
        "--fabric.precision 16-mixed",
        "fabric.precision='16-mixed'",
        "bf16-mixed",
    ),
    "a name that no disk takes": (f"--name {'x' * 300}", "name='xxx", "255 bytes"),
    "no global model": ("--evaluation.judge global", "evaluation.judge='global'", "global model"),
    "no optimiser": ("--optimizer.name module", "optimizer.name='module'", "configure_optimizers"),
    "no such client": (
        "--callbacks.heatmaps.clients [99]",
        "callbacks.heatmaps.clients=99",
        "0 to 9",
    ),
    "no GPU": ("--fabric.accelerator cuda --fabric.devices 99", "fabric.", "CUDA device"),
    "no MPS": ("--fabric.accelerator mps", "fabric.accelerator='mps'", "torch sees no MPS device"),
    "no accelerator's name": (
        "--fabric.accelerator abacus",
        "fabric.accelerator='abacus'",
        "one of auto, cpu, cuda, gpu, mps, tpu, xpu",
    ),
    "several nodes": ("--fabric.num_nodes 2", "fabric.num_nodes=2", "torchrun"),
}


@pytest.mark.parametrize("flags, begins, says", CASES.values(), ids=CASES)
def test_refused(refused, flags, begins, says):
    error = refused(FIT, flags)
    assert error.startswith(begins)
    assert ": " in error
    assert says in error


def test_no_data_and_no_network(refused, monkeypatch, workplace):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nothing listens
    (workplace / "nowhere" / "MNIST" / "raw").mkdir(parents=True)  # torchvision makes these
    error = refused(FIT, "--data.source mnist --data.root nowhere --data.download true")
    assert error.startswith("data.root='nowhere'")
    assert "--data.source digits" in error


def test_an_existing_run_is_left_alone(fit, refused):
    fit("a")
    assert "--resume" in refused(FIT, "--name a")
    Path("runs/b").mkdir()
    (Path("runs/b") / "notes.txt").write_text("mine")
    assert "it is no run: remove it" in refused(FIT, "--name b")


def test_a_run_without_a_checkpoint(fit, refused):
    fit("a", "--callbacks.checkpoint null")
    assert "no checkpoint" in refused("test --run runs/a")
    assert "no checkpoint" in refused("export --run runs/a --client 0 --out m.safetensors")


@pytest.mark.slow
def test_resumed_on_other_data(small, refused, capsys):
    """The folder of the data may move, but their split may not change; other contents of as many
    samples are named."""
    x, y = np.random.default_rng(0).random((300, 5), np.float32), np.arange(300) % 3
    for name, size, more in (
        ("one", 200, 0),
        ("moved", 200, 0),
        ("other", 190, 0),
        ("new", 200, 1),
    ):
        train = {"x_train": x[:size] + more, "y_train": y[:size]}
        np.savez(f"{name}.npz", **train, x_test=x[200:], y_test=y[200:])

    def words(root, rounds, *more):
        return small("a", f"--data.root {root}.npz --federation.rounds {rounds}", *more)

    assert main(words("one", 2)) == 0
    error = refused(*words("other", 3, "--resume"))
    assert error.startswith("data.root='other.npz'")
    assert "not those that the run began with" in error
    split = Path("runs/a/split.csv")
    before = split.read_bytes()
    # a power cut: it is written without waiting for the disk
    split.write_bytes(before[:-20])
    assert main(words("moved", 3, "--resume")) == 0
    assert split.read_bytes() == before
    assert "other samples" not in capsys.readouterr().err
    assert main(words("new", 4, "--resume")) == 0
    assert "data: other samples than the run began with, from round 4 on" in capsys.readouterr().err


def test_a_finished_run_without_its_checkpoints_does_not_begin_again(fit, small, refused):
    folder = fit("a")
    before = (folder / "metrics.csv").read_bytes()
    shutil.rmtree(folder / "checkpoints")
    assert "would begin again over its own tables" in refused(
        *small("a", "--federation.rounds 9 --resume")
    )
    assert (folder / "metrics.csv").read_bytes() == before


def test_a_model_that_has_changed_under_its_name(
    fit,
    small,
    refused,
    monkeypatch,
):
    """The config says the same, yet the class is another now."""
    flags = "--model fl_own_models.Normed"
    fit("a", flags)
    import fl_own_models
    from torch import nn

    class Normed(fl_own_models.Normed):  # type: ignore[misc, name-defined]
        def __init__(self, side: int = 8, width: int = 4):
            super().__init__(side, width)
            self.extra = nn.Linear(2, 2)

    monkeypatch.setattr(fl_own_models, "Normed", Normed)
    assert "model" in refused(*small("a", flags, "--federation.rounds 5 --resume"))
    assert "model" in refused("test --run runs/a")


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("flags", ["--model cnn", "--method fedamp --method.alpha 0.2"])
def test_found_by_the_ranks_themselves(command, workplace, flags):
    start = time.monotonic()
    done = command(FIT, "--fabric.devices 2", flags, code=2)
    assert time.monotonic() - start < 90
    assert done.stdout == ""
    assert done.stderr.startswith("fl-train: error: m")
    assert done.stderr.count("\n") == 1
    assert not list(workplace.iterdir())
