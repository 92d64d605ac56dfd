"""What docs/privacy.md shows: bounds on epsilon by canaries, where epsilon is known; what runs of a study tell.

    python benchmarks/privacy.py mechanism --runs 200
    fl-train study privacy/digits --out studies/privacy
    python benchmarks/privacy.py learned studies/privacy

`mechanism`: 1,000 canaries through the noise itself, at the noise of epsilon 1, 4 and 8. `learned`: a row for each
method of a study, what the server and another client learn. Prints tables in Markdown, line by line.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch
from scipy.stats import t

from fl_lightning.audit.attacks import DRAWS, Row, _scored, auc, label_mixes, relations, shuffle
from fl_lightning.audit.observe import Observed, observed
from fl_lightning.cli.commands import load
from fl_lightning.privacy.accounting import DELTA, Mechanism, calibrated, epsilon
from fl_lightning.privacy.bound import lower_bound, share_right
from fl_lightning.privacy.mechanism import Noise, noisy
from fl_lightning.study.folder import StudyFolder

CLAIMS = (1.0, 4.0, 8.0)
GUESSES = 0.2
"""As `callbacks.canaries` has it."""


def interval(values: list[float]) -> str:
    """Mean, and Student's interval of 95 % over runs."""
    if len(values) < 2:
        return f"{values[0]:.2f}"
    half = t.ppf(0.975, len(values) - 1) * stdev(values) / len(values) ** 0.5
    return f"{mean(values):.2f} ({mean(values) - half:.2f} to {mean(values) + half:.2f})"


def line(claim: float, bounds: list[float]) -> str:
    """A row: the claim, the bounds, and in how many runs they are below it."""
    below = sum(bound <= claim for bound in bounds)
    low, high = share_right(len(bounds), below)
    third = sum(bound > claim / 3 for bound in bounds)
    return (f"| {claim:g} | {interval(bounds)} | {max(bounds):.2f} | {below} of {len(bounds)} "
            f"({low:.1%} to {high:.1%}) | {third} of {len(bounds)} |")  # fmt: skip


def head() -> None:
    """Of the table of bounds."""
    print("| claimed epsilon | bound, mean (95 %) | largest | below the claim | above a third of it |")
    print("| --- | --- | --- | --- | --- |")


def mechanism(runs: int, canaries: int = 1000, numbers: int = 100) -> None:
    """Directions of `numbers` numbers, bounded and noised by `privacy.mechanism.noisy`, one message each."""
    head()
    for claim in CLAIMS:
        size = calibrated(lambda z: [Mechanism(z, 1)], claim, DELTA, "epsilon")
        assert epsilon([Mechanism(size, 1)], DELTA) <= claim * 1.001
        bounds = []
        for run in range(runs):
            draws = torch.Generator().manual_seed(run)
            coins = torch.rand(canaries, generator=draws) < 0.5
            units = torch.nn.functional.normalize(torch.randn(canaries, numbers, generator=draws), dim=1)
            sent = [noisy(10 * unit * coin, Noise(1.0, size), draws) for unit, coin in zip(units, coins, strict=True)]
            order = (torch.stack(sent) * units).sum(1).argsort()
            half = round(GUESSES * canaries / 2)
            right = int((~coins[order[:half]]).sum() + coins[order[-half:]].sum())
            bounds.append(lower_bound(canaries, 2 * half, right, DELTA))
        print(line(claim, bounds), flush=True)


LIRA = ("server: upload", "another client", "public: personal model", "public: global model")
"""Views, in the order of the columns."""
BY_SEED = (
    ("server: relation", "who shares"),
    ("another client: its row", "who shares"),
    ("server: upload", "label mix"),
)
"""Viewer and question of what is measured run by run."""


def member(runs: Sequence[Observed], view: str) -> str:
    """AUC of online LiRA in the eyes of a viewer, with a bootstrap interval, and that of shuffled memberships."""
    scores = [run.samples.confidence[view] for run in runs]
    if any(np.isnan(score).any() for score in scores):
        return "-"
    clients = np.concatenate([k * 10**6 + run.samples.client for k, run in enumerate(runs)])
    digests, values, rng = [run.samples.digest for run in runs], [], np.random.default_rng(0)
    for members in (
        [run.samples.member for run in runs],
        [shuffle(run.samples.client, run.samples.member) for run in runs],
    ):
        _, truth, score = _scored(clients, digests, members, scores)
        drawn = [auc(truth[d], score[d]) for d in (rng.integers(0, len(truth), len(truth)) for _ in range(DRAWS))]
        values.append((auc(truth, score), *np.percentile(drawn, [2.5, 97.5])))
    (value, low, high), (control, *_) = values
    return f"{value:.3f} ({low:.3f} to {high:.3f}); {control:.3f}"


def by_seed(rows: Sequence[Row], runs: int, viewer: str, attack: str) -> str:
    """Mean over seeds, and Student's interval; of relations the mean over layers."""
    values = [row.value for row in rows if row.viewer == viewer and row.attack.startswith(attack)
              and ", layer" not in row.measure and row.value == row.value]  # fmt: skip
    return interval(values) if len(values) == runs else "-"


def learned(study: Path, methods: Sequence[str]) -> None:
    """A row for each of the `methods` (none: all) of a study, over the seeds that have ended."""
    folder = StudyFolder(study)
    print("| method | seeds | member: upload | member: received | member: personal | member: global "
          "| group: cube | group: row | classes: bias |")  # fmt: skip
    print("| --- " * 9 + "|")
    cells = sorted(folder.cells(), key=lambda cell: str(cell["label"]))
    for label, group in groupby(cells, key=lambda cell: str(cell["label"])):
        places = [study / cell["folder"] for cell in group if folder.finished(cell["folder"])]
        if len(places) < 3 or (methods and label not in methods):
            continue
        runs = [observed(load(place), place) for place in places]
        rows = [row for run in runs for row in relations(run) + label_mixes(run)]
        cells_ = [member(runs, view) for view in LIRA] + [by_seed(rows, len(runs), *what) for what in BY_SEED]
        print(f"| `{label}` | {len(runs)} | {' | '.join(cells_)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("mechanism", "learned"))
    parser.add_argument("study", type=Path, nargs="?")
    parser.add_argument("methods", nargs="*")
    parser.add_argument("--runs", type=int, default=200)
    given = parser.parse_args()
    if given.what == "mechanism":
        mechanism(given.runs)
    else:
        learned(given.study, given.methods)
