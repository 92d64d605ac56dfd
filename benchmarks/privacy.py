"""What docs/privacy.md shows: bounds on epsilon by canaries, where epsilon is known; what runs of a study tell.

    python benchmarks/privacy.py mechanism --runs 200
    python benchmarks/privacy.py runs --runs 100
    fl-train study privacy/digits --out studies/privacy
    python benchmarks/privacy.py learned studies/privacy

`mechanism`: 1,000 canaries through the noise itself, at the noise of epsilon 1, 4 and 8. `runs`: whole runs of FedAvg
with 300 clients that are canaries, under local and under central privacy of these epsilons. `learned`: a row for each
method of a study, what the server and another client learn. Prints tables in Markdown, line by line.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory

import torch
from scipy.stats import t

from fl_lightning.audit.attacks import CONTROL, Row, label_mixes, lira, relations
from fl_lightning.audit.observe import observed
from fl_lightning.cli.commands import load
from fl_lightning.cli.resolve import complete, plan
from fl_lightning.cli.study import QUIET
from fl_lightning.files import make_folder
from fl_lightning.privacy.accounting import DELTA, Mechanism, calibrated, epsilon
from fl_lightning.privacy.bound import lower_bound, share_right
from fl_lightning.privacy.mechanism import Noise, noisy
from fl_lightning.run import fit
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


def whole(kind: str, claim: float, seed: int, folder: Path) -> float:
    """The bound of one run: FedAvg on the digits, everybody a canary, a round of one step."""
    config = complete(plan([QUIET, {
        "seed": seed, "method": "fedavg", "model": {"name": "mlp", "init_args": {"hidden": [64]}},
        "data": {"source": "digits", "partition": "iid", "min_samples": 1},
        "federation": {"clients": 300, "rounds": 1, "local_epochs": None, "local_steps": 1},
        "callbacks": {
            "canaries": {"guesses": GUESSES}, kind: {"clip": 1.0, "epsilon_target": claim}, "checkpoint": None,
        },
    }]))  # fmt: skip
    make_folder(folder)
    summary = fit(config, folder)
    assert summary["privacy_epsilon"] <= claim * 1.001
    return float(summary["privacy_epsilon_bound"])


def runs(number: int) -> None:
    """A table for each mechanism."""
    torch.set_num_threads(1)
    for kind in ("localprivacy", "centralprivacy"):
        print(f"\n{kind}\n")
        head()
        for claim in CLAIMS:
            with TemporaryDirectory() as folder:
                bounds = [whole(kind, claim, seed, Path(folder) / str(seed)) for seed in range(number)]
            print(line(claim, bounds), flush=True)


LIRA = ("server: upload", "another client", "public: personal model", "public: global model")
"""Views, in the order of the columns."""
BY_SEED = (
    ("server: relation", "who shares"),
    ("another client: its row", "who shares"),
    ("server: upload", "label mix"),
)
"""Viewer and question of what is measured run by run."""


def member(rows: Sequence[Row], view: str) -> str:
    """AUC of online LiRA in the eyes of a viewer with a bootstrap interval; 95 % of shuffled memberships."""
    own = {row.measure: row for row in rows if row.viewer == view}
    if not own:
        return "-"
    real, control = own["AUC"], own[CONTROL]
    return f"{real.value:.3f} ({real.low:.3f} to {real.high:.3f}); {control.low:.3f} to {control.high:.3f}"


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
        of_samples = lira(runs)
        cells_ = [member(of_samples, view) for view in LIRA] + [by_seed(rows, len(runs), *what) for what in BY_SEED]
        print(f"| `{label}` | {len(runs)} | {' | '.join(cells_)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("mechanism", "runs", "learned"))
    parser.add_argument("study", type=Path, nargs="?")
    parser.add_argument("methods", nargs="*")
    parser.add_argument("--runs", type=int, default=200)
    given = parser.parse_args()
    if given.what == "mechanism":
        mechanism(given.runs)
    elif given.what == "runs":
        runs(given.runs)
    else:
        learned(given.study, given.methods)
