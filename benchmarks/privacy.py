"""What docs/privacy.md shows: bounds on epsilon by canaries, where epsilon is known; what runs of a study tell.

    python benchmarks/privacy.py mechanism --runs 200
    python benchmarks/privacy.py runs --runs 100
    fl-train study privacy/digits --out studies/privacy
    python benchmarks/privacy.py learned studies/privacy
    fl-train study privacy/relation --out studies/relation
    python benchmarks/privacy.py relation studies/relation
    fl-train study privacy/trajectories --out studies/trajectories
    python benchmarks/privacy.py trajectories studies/trajectories

`mechanism`: 1,000 canaries through the noise itself, at the noise of epsilon 1, 4 and 8. `runs`: whole runs of FedAvg
with 300 clients that are canaries, under local and under central privacy of these epsilons. `learned`: a row for each
method of a study, what the server and another client learn. `relation`: who shares a group, and the accuracy, for each
row of a study. `trajectories`: attacks on the last round's models beside those on all rounds kept. Prints tables in
Markdown, line by line.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory

import numpy as np
import torch
from scipy.stats import t

from fl_lightning.audit.attacks import CONTROL, Row, auc, label_mixes, lira, relations, thresholds
from fl_lightning.audit.observe import VIEWS, observed
from fl_lightning.cli.commands import load
from fl_lightning.cli.resolve import complete, plan
from fl_lightning.cli.study import QUIET
from fl_lightning.files import make_folder
from fl_lightning.privacy.accounting import DELTA, Mechanism, calibrated, epsilon
from fl_lightning.privacy.bound import lower_bound, share_right
from fl_lightning.privacy.mechanism import Noise, noisy
from fl_lightning.results.folder import RunFolder
from fl_lightning.run import fit
from fl_lightning.study.folder import StudyFolder

CLAIMS = (1.0, 4.0, 8.0)
GUESSES = 0.2
"""As `callbacks.canaries` has it."""


def interval(values: list[float], digits: int = 2) -> str:
    """Mean, and Student's interval of 95 % over runs."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}"
    half = t.ppf(0.975, len(values) - 1) * stdev(values) / len(values) ** 0.5
    return f"{mean(values):.{digits}f} ({mean(values) - half:.{digits}f} to {mean(values) + half:.{digits}f})"


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


WAYS = ("", ", mean over rounds", ", rise over rounds")
"""Versions of an attack, behind its name: the last round, and all that are kept."""
LIRA = ("server: upload", "another client", "public: personal model", "public: global model")
"""Views, in the order of the columns."""
BY_SEED = (
    ("server: relation", "who shares"),
    ("another client: its row", "who shares"),
    ("server: upload", "label mix"),
)
"""Viewer and question of what is measured run by run."""


def member(rows: Sequence[Row], view: str, attack: str = "LiRA") -> str:
    """AUC of online LiRA in the eyes of a viewer with a bootstrap interval; 95 % of shuffled memberships."""
    own = {row.measure: row for row in rows if row.viewer == view and row.attack == attack}
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
    print("| method | seeds | member: upload | member: received | member: personal | member: global "
          "| group: cube | group: row | classes: bias |")  # fmt: skip
    print("| --- " * 9 + "|")
    for label, places in finished(study, methods):
        runs = [observed(load(place), place) for place in places]
        rows = [row for run in runs for row in relations(run) + label_mixes(run)]
        of_samples = lira(runs)
        cells_ = [member(of_samples, view) for view in LIRA] + [by_seed(rows, len(runs), *what) for what in BY_SEED]
        print(f"| `{label}` | {len(runs)} | {' | '.join(cells_)} |", flush=True)


def finished(study: Path, methods: Sequence[str]) -> Iterator[tuple[str, list[Path]]]:
    """The folders of the runs that have ended, of each of the `methods` (none: all) with three seeds at least."""
    folder = StudyFolder(study)
    cells = sorted(folder.cells(), key=lambda cell: str(cell["label"]))
    for label, group in groupby(cells, key=lambda cell: str(cell["label"])):
        places = [study / cell["folder"] for cell in group if folder.finished(cell["folder"])]
        if len(places) >= 3 and (not methods or label in methods):
            yield label, places


def relation(study: Path, methods: Sequence[str]) -> None:
    """Means over seeds with Student's interval: AUC for who shares a group, from the last round and from the mean over
    all but the first (nobody has trained before it); whether the greatest weight is of the group, and accuracy, in %,
    with its difference from the same seeds without a defence.
    """
    heads = ["group: cube", "group: row", "group: cube, all rounds", "greatest of the group, %", "accuracy, %",
             "difference"]  # fmt: skip
    print(f"| method, defence | seeds | {' | '.join(heads)} |")
    print("| --- " * (2 + len(heads)) + "|")
    plain: dict[str, list[float]] = {}
    for label, places in finished(study, methods):
        runs = [observed(load(place), place) for place in places]
        rows = [row for run in runs for row in relations(run)]
        cells = [by_seed(rows, len(places), *what) for what in BY_SEED[:2]]
        firsts, of_all = [], []
        for run, place in zip(runs, places, strict=True):
            folder, same = RunFolder(place), np.equal.outer(run.groups, run.groups)
            apart = ~np.eye(len(same), dtype=bool)
            others = np.where(apart, run.relation["mean"], -1.0)
            firsts.append(100 * float(same[np.arange(len(same)), others.argmax(1)].mean()))
            whole = np.mean([folder.read_relation(t).rows.mean(1) for t in folder.relation_rounds()[1:]], axis=0)
            of_all.append(auc(same[apart], whole[apart]))
        scores = [100 * (RunFolder(place).read_summary() or {})["final_mean_accuracy"] for place in places]
        base = plain.setdefault(label.split()[0], scores)  # of the method without a defence, the first of its rows
        apart_by = [score - other for score, other in zip(scores, base, strict=True)]
        cells += [interval(of_all), interval(firsts, 0), interval(scores, 1), interval(apart_by, 1)]
        print(f"| `{label}` | {len(places)} | {' | '.join(cells)} |", flush=True)


def trajectories(study: Path, methods: Sequence[str]) -> None:
    """A row for each view: both attacks on the last round's models, and on the mean and the rise over the rounds kept.

    LiRA: bootstrap intervals, and 95 % of shuffles; loss threshold: mean over seeds with Student's interval.
    """
    heads = [f"{attack}{way}" for attack in ("LiRA", "loss threshold") for way in WAYS]
    print(f"| method | viewer | rounds | {' | '.join(heads)} |")
    print("| --- " * (3 + len(heads)) + "|")
    for label, places in finished(study, methods):
        runs = [observed(load(place), place) for place in places]
        rows = lira(runs)
        singles = [row for run in runs for row in thresholds(run) if row.measure == "AUC"]
        for view in VIEWS:
            if not any(row.viewer == view for row in rows):
                continue
            cells = [member(rows, view, f"LiRA{way}") for way in WAYS]
            cells += [_threshold(singles, view, way) for way in WAYS]
            print(f"| `{label}` | {view} | {len(runs[0].rounds)} | {' | '.join(cells)} |", flush=True)


def _threshold(rows: Sequence[Row], view: str, way: str) -> str:
    values = [row.value for row in rows if row.viewer == view and row.attack == f"loss threshold{way}"]
    return interval(values, 3) if values else "-"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("mechanism", "runs", "learned", "relation", "trajectories"))
    parser.add_argument("study", type=Path, nargs="?")
    parser.add_argument("methods", nargs="*")
    parser.add_argument("--runs", type=int, default=200)
    given = parser.parse_args()
    if given.what == "mechanism":
        mechanism(given.runs)
    elif given.what == "runs":
        runs(given.runs)
    else:
        table = {"learned": learned, "relation": relation, "trajectories": trajectories}[given.what]
        table(given.study, given.methods)
