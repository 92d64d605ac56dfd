"""How long silos train, alone and federated, and that all sections go by the chosen metric."""

from __future__ import annotations

import csv
import json
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from fl_lightning.cli import main
from fl_lightning.configuration.config import FederationConfig
from fl_lightning.lab.worth.training import fall_at_the_end, training
from fl_lightning.training.schedule import Length

from .conftest import SMALL

NAMES = ["Aarau", "Basel", "Chur", "Pure", "Twin", "Zug"]


@pytest.mark.parametrize(
    ("losses", "share"),
    [
        ([1.0 - 0.1 * k for k in range(11)], 0.2),  # evenly
        ([1.0, 0.2, 0.1, 0.1, 0.1, 0.1], 0.0),
        ([1.0, 0.5], 1.0),
        ([1.0], 0.0),
        ([1.0, 1.1, 1.2], 0.0),
        ([], 0.0),
    ],
)
def test_the_share_of_the_fall_that_the_last_fifth_brings(
    losses: Sequence[float], share: float
) -> None:
    assert fall_at_the_end(losses) == pytest.approx(share)


def test_steps_stand_in_the_files_and_the_loss_that_still_falls_is_warned_of(out: Path) -> None:
    with (out / "runs" / "local" / "seed-0" / "clients.csv").open() as file:
        sizes = {row["name"]: int(row["train_samples"]) for row in csv.DictReader(file)}
    content = json.loads((out / "worth.json").read_text())
    rows = {row["silo"]: row for row in content["silos"]}
    steps = {
        name: 2 * math.ceil(size / FederationConfig().batch_size) for name, size in sizes.items()
    }
    assert {name: row["steps_alone"] for name, row in rows.items()} == steps
    with (out / "worth.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [int(line["steps_alone"]) for line in lines] == [*steps.values()]
    # two rounds are few
    assert all(row["still_falling"] for name, row in rows.items() if name != "Zug")
    page = (out / "worth.html").read_text()
    assert (
        "<h2>How long each silo trained</h2>" in page
        and "Warning: the loss of training alone still falls" in page
    )


def test_the_federations_steps_follow_from_its_passes(out: Path) -> None:
    """FedPer takes as many; a copy that is fine-tuned afterwards takes more."""
    federation = FederationConfig(rounds=2, local_epochs=1)
    plain = training(out, "runs/fedper/seed-0", federation, NAMES)
    assert plain.federated == plain.alone
    longer = training(out, "runs/fedper/seed-0", federation, NAMES, Length(3))
    assert all(longer.federated[name] == 2.5 * steps for name, steps in plain.alone.items())


@pytest.mark.parametrize("metric", ["balanced_accuracy", "auroc"])
def test_newcomers_are_scored_by_the_chosen_metric(
    out: Path, metric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is trained again: newcomers were scored by all that --metric may name."""
    monkeypatch.chdir(out.parent)
    before = {file: file.stat().st_mtime_ns for file in out.rglob("newcomers.csv")}
    assert (
        main(
            ["worth", *shlex.split(SMALL), "--out", "answer", "--repeats", "5", "--metric", metric]
        )
        == 0
    )
    content = json.loads((out / "worth.json").read_text())
    method = content["consortium"]["method"]
    scores: list[float] = []
    for file in (out / "newcomers" / method.replace(" ", ",")).rglob("newcomers.csv"):
        with file.open() as lines:
            rows = [row for row in csv.DictReader(lines) if row["samples_per_class"] == "20"]
        scores += [float(row[metric]) for row in rows if row.get(metric)]
    [of_20] = [
        row["federated"] for row in content["consortium"]["newcomers"] if row["labelled"] == 20
    ]
    assert of_20 == pytest.approx(sum(scores) / len(scores))
    text = (out / "worth.html").read_text().partition("A silo that joins later")[2]
    assert "share of cases judged right)" not in text
    # Pure has one class, and Zug may have
    assert re.search(r"It is defined for [45] of 6 silos", text)
    assert {file: at for file, at in before.items() if file.stat().st_mtime_ns != at} == {}
