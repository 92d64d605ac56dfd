"""Harm beyond the noise of a client's test samples, and over whom further metrics are means."""

from __future__ import annotations

from math import comb
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fl_lightning.lab.study.cells import Cell
from fl_lightning.lab.study.harm import harm_notes, noise, share_harmed


def cell(label: str, scores: list[float], tested: int = 25, **run: Any) -> Cell:
    rows = [{"client": c, "test_samples": tested} for c in range(len(scores))]
    settings = {"split": rows, "final": rows, "summary": {}, "setting": lambda key: None} | run
    metric = run.pop("metric", "accuracy")
    held = SimpleNamespace(**settings, rows=lambda table: settings[table])
    return Cell(label, label, "", 0, "after", held, dict(enumerate(scores)), "", metric)  # type: ignore[arg-type]


def test_one_test_sample_is_no_harm() -> None:
    alone = cell("local", [0.8, 0.8, 1.0])
    assert share_harmed(cell("a", [0.76, 0.8, 0.96]), alone) == 0
    assert share_harmed(cell("a", [0.4, 0.8, 0.5]), alone) == pytest.approx(2 / 3)
    assert share_harmed(alone, alone) is None


def test_by_chance_a_twentieth_of_the_clients_at_most_is_counted() -> None:
    """Two models of equal skill, 20,000 clients of 30 test samples: independent, and wrong about
    the same samples."""
    rng = np.random.default_rng(0)
    right = rng.random((20_000, 30))
    one, other = (right < 0.8).mean(1), (rng.random(right.shape) < 0.8).mean(1)
    mostly = np.where(rng.random(right.shape) < 0.8, right, rng.random(right.shape)) < 0.8
    for alone in (other, mostly.mean(1)):
        counted = np.mean([b - a > noise(a, b, 30) for a, b in zip(one, alone, strict=True)])
        assert 0 < counted < 0.06
    assert np.mean([b - a > noise(a, b, 30) for a, b in zip(one - 0.4, other, strict=True)]) > 0.9


def test_with_few_test_samples_more_are_counted_by_chance() -> None:
    """Of independent errors, exactly: with 3 to 7 samples up to 11 %, with 8 to 30 up to 7.5, as
    the note says."""

    def counted(n: int, skill: float) -> float:
        chances = [comb(n, k) * skill**k * (1 - skill) ** (n - k) for k in range(n + 1)]
        above = [
            (i, j)
            for i in range(n + 1)
            for j in range(i + 1, n + 1)
            if (j - i) / n > noise(i / n, j / n, n)
        ]
        return sum(chances[i] * chances[j] for i, j in above)

    most = {
        n: max(counted(n, percent / 100) for percent in range(50, 100))
        for n in (3, 7, 8, 10, 20, 30)
    }
    assert 0.10 < most[7] < most[3] < 0.11
    assert max(most[n] for n in (8, 10, 20, 30)) == pytest.approx(0.0755, abs=5e-4)


def test_what_is_counted_is_said() -> None:
    assert "it is no test" in harm_notes([cell("a", [0.5])])[0]
    validation = cell("a", [0.5], setting=lambda key: "validation")
    assert "every client below" in harm_notes([validation])[0]
    few = cell("a", [0.5], metric="auroc", final=[{}, {}, {}], summary={"least_test_class": 1})
    assert harm_notes([few])[1] == (
        "auroc: means are over 1 of 3 clients; the rarest class of a client's test part has 1 "
        "samples"
    )
