"""Harm beyond the noise of a client's test samples, and over whom further metrics are means."""

from math import comb
from types import SimpleNamespace

import numpy as np
import pytest
from pandas import DataFrame, Series

from fl_lightning.lab.statistics import noise_threshold
from fl_lightning.lab.study.compare import share_harmed
from fl_lightning.lab.study.scores import COLUMNS


def table(*cells, metric="accuracy", **run):
    """Runs of one setting and seed, with 25 test samples of each client."""
    rows = []
    for label, scores in cells:
        sizes = [{"client": c, "test_samples": 25} for c in range(len(scores))]
        held = {"split": sizes, "final": sizes, "summary": {}, "setting": lambda key: None} | run
        made = SimpleNamespace(**held, rows=held.get)
        names = (label, label, "", 0, "after", metric, "", "", made)
        rows.append((*names, Series(scores, dtype=float)))
    return DataFrame(rows, columns=[*COLUMNS, "scores"])


def test_one_test_sample_is_no_harm():
    alone = ("local", [0.8, 0.8, 1.0])
    shares = share_harmed(table(alone, ("a", [0.76, 0.8, 0.96]), ("b", [0.4, 0.8, 0.5])))
    assert shares.tolist() == pytest.approx([np.nan, 0, 2 / 3], nan_ok=True)


def test_with_few_test_samples_more_are_counted_by_chance():
    """Of independent errors, exactly: with 3 to 7 samples up to 11 %, with 8 to 30 up to 7.5, as
    the note says."""

    def counted(n, skill):
        chances = np.array([comb(n, k) * skill**k * (1 - skill) ** (n - k) for k in range(n + 1)])
        ours, alone = np.meshgrid(*[np.arange(n + 1) / n] * 2, indexing="ij")
        above = alone - ours > noise_threshold(ours, alone, np.array(n))
        return float(chances @ above @ chances)

    most = {n: max(counted(n, p / 100) for p in range(50, 100)) for n in (3, 7, 8, 10, 20, 30)}
    assert 0.10 < most[7] < most[3] < 0.11
    assert max(most[n] for n in (8, 10, 20, 30)) == pytest.approx(0.0755, abs=5e-4)
