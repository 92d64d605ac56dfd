"""A user's own models and data, without editing the project."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

Table = Callable[..., list[dict[str, str]]]


def test_own_module(fit: Callable[..., Path], table: Table) -> None:
    folder = fit("a", "--model fl_own_models.Normed --model.width 6 --federation.local_epochs 3")
    accuracies = [float(row["mean_accuracy"]) for row in table(folder)]
    assert accuracies[-1] > 0.6
    with np.load(folder / "relation" / "round-0001.npz") as held:
        assert held["layers"].tolist() == ["conv", "out"]
    # The papers' byte counts: convolution and classifier go down, BatchNorm goes up only,
    # statistics stay.
    shared, norm = 6 * 9 + 6 + 54 * 10 + 10, 12
    (first, *_) = table(folder, "clients.csv")
    assert (int(first["download_bytes"]), int(first["upload_bytes"])) == (
        4 * shared,
        4 * (shared + norm),
    )


def test_own_lightning_module_trains_by_its_own_rules(
    fit: Callable[..., Path], table: Table
) -> None:
    import fl_own_models

    fl_own_models.Lit.steps = fl_own_models.Lit.optimizers_made = 0
    flags = "--model fl_own_models.Lit --federation.local_epochs 3"
    own = table(fit("a", flags, "--optimizer.name module"))
    assert fl_own_models.Lit.steps > 0
    assert fl_own_models.Lit.optimizers_made == 1
    assert float(own[-1]["mean_accuracy"]) > 0.6
    faster = table(fit("b", flags, "--optimizer.name module --model.lr 0.02"))
    assert faster[0]["train_loss"] != own[0]["train_loss"]
    fl_own_models.Lit.optimizers_made = 0
    sgd = table(fit("c", flags))
    assert fl_own_models.Lit.optimizers_made == 0
    assert sgd[0]["train_loss"] != own[0]["train_loss"]


@pytest.fixture
def arrays(workplace: Path) -> Path:
    """The digits as arrays of a user's own."""
    digits = load_digits()
    x, y = digits.images.astype(np.float32), digits.target
    np.savez(
        workplace / "mine.npz",
        x_train=x[:800],
        y_train=y[:800],
        x_test=x[800:1000],
        y_test=y[800:1000],
    )
    return workplace / "mine.npz"


def test_own_arrays(fit: Callable[..., Path], table: Table, arrays: Path) -> None:
    folder = fit(
        "a",
        f"--data.source arrays --data.root {arrays} --data.fraction 1 --federation.local_epochs 3",
    )
    assert float(table(folder)[-1]["mean_accuracy"]) > 0.5
    assert sum(int(row["train_samples"]) for row in table(folder, "clients.csv")[:5]) == 800
    again = fit(
        "b",
        f"--data.source mnist --data.root {arrays} --data.fraction 1 --federation.local_epochs 3",
    )
    # an .npz file overrides any source
    assert table(again, "final.csv") == table(folder, "final.csv")


def test_own_images(fit: Callable[..., Path], table: Table, workplace: Path) -> None:
    digits = load_digits()
    for k in range(300):
        folder = (
            workplace / "pictures" / ("train" if k < 240 else "test") / f"digit_{digits.target[k]}"
        )
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[k] * 15).astype(np.uint8)).save(folder / f"{k}.png")
    run = fit(
        "a",
        "--data.source images --data.root pictures --data.fraction 1 --federation.clients 3",
        "--data.partition iid --federation.local_epochs 5",
    )
    assert float(table(run)[-1]["mean_accuracy"]) > 0.5


@pytest.mark.parametrize("partition", ["pathological", "rotated", "iid"])
def test_every_partition(fit: Callable[..., Path], table: Table, partition: str) -> None:
    assert len(table(fit("a", f"--data.partition {partition}"))) == 3


def test_mnist(fit: Callable[..., Path], table: Table, fl_data: Path) -> None:
    flags = (
        f"--config kapc_mnist --loggers null --data.root {fl_data} --data.fraction 0.02 "
        f"--federation.clients 4"
    )
    folder = fit(
        "a",
        flags,
        "--federation.rounds 2 --model mlp --federation.local_epochs 3 --optimizer.lr 0.05",
    )
    assert float(table(folder)[-1]["mean_accuracy"]) > 0.6
