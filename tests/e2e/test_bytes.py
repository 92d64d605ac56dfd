"""The papers' byte counts on ResNet-18, from a real round (KAPC+BLS, Table 6; 10 participants,
truncated MiB)."""

import csv
import math

import numpy as np
import pytest
from lines import run_line

PLAIN = (
    "--callbacks null --fabric.accelerator cpu --fabric.threads 1 --evaluation.every 1 --loggers "
    "null"
)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Eleven training images and two test images a client: bytes do not depend on what is in
    them."""
    rng = np.random.default_rng(0)
    file = tmp_path_factory.mktemp("data") / "images.npz"
    arrays = {}
    for part, count in (("train", 110), ("test", 20)):
        arrays[f"x_{part}"] = rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        arrays[f"y_{part}"] = np.arange(count) % 10
    np.savez(file, **arrays)
    return file


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, up, down",
    [
        ("fedavg", 426.54, 426.54),
        ("fedper", 426.35, 426.35),  # the body alone, as the paper's FedBABU
        ("fedbn", 426.17, 426.17),
        ("kapc", 426.54, 426.17),  # normalisation up, never down
    ],
)
def test_one_round_on_resnet18(images, tmp_path, method, up, down):
    where = (
        f"--data.source arrays --data.root {images} --data.partition iid --out {tmp_path} --name "
        f"run"
    )
    size = (
        "--federation.clients 10 --federation.rounds 1 --federation.local_epochs 1 "
        "--federation.batch_size 16"
    )
    command = f"fit --method {method} --model resnet18 --model.stem 7x7 {size} {where} {PLAIN}"
    assert run_line(command) == 0
    with (tmp_path / "run" / "metrics.csv").open() as file:
        row = next(csv.DictReader(file))
    for way, wanted in (("upload", up), ("download", down)):
        mib = int(row[f"{way}_parameter_bytes"]) / 2**20
        assert math.floor(100 * mib) / 100 == wanted
        assert int(row[f"{way}_bytes"]) >= int(row[f"{way}_parameter_bytes"])
    # Buffers stand beside parameters: 9,600 running statistics of FedAvg and FedPer, none where
    # they stay at home.
    beside = int(row["upload_bytes"]) - int(row["upload_parameter_bytes"])
    assert beside == (10 * 4 * 9600 if method in ("fedavg", "fedper") else 0)
