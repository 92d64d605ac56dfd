"""Is KAPC's learned relation informative? Its rows beside rows that know nothing and rows that know the truth.

    uv run python benchmarks/relation.py --out runs/relation

It can be stopped at any moment: finished runs are not repeated. rho of the exact relation is chosen first, on
validation data and with other seeds than the table's.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal, get_args

import numpy as np
import torch
import yaml
from scipy.stats import ttest_rel
from sklearn.cluster import AgglomerativeClustering
from sklearn.metrics import adjusted_rand_score
from torch import Tensor
from workloads import settings

from fl_lightning.callbacks.cube import CubeSettings, LearnedCube
from fl_lightning.callbacks.relations import Relation
from fl_lightning.cli.folder import CONFIG, write_config
from fl_lightning.cli.resolve import to_yaml
from fl_lightning.config import Component, Config, DataConfig, EvaluationConfig
from fl_lightning.core.relation import RelationInputs
from fl_lightning.core.run import RunContext
from fl_lightning.data import FederatedData
from fl_lightning.methods.kapc import KAPC
from fl_lightning.results.folder import RunFolder
from fl_lightning.rng import numpy_rng
from fl_lightning.run import fit

Fixed = Literal["uniform", "alone", "samples", "random", "oracle"]
Shuffle = Literal["shuffled", "others-shuffled"]
Rows = Literal["stepped", "exact", Fixed, Shuffle]

LABELS: dict[Rows, str] = {
    "uniform": "uniform, 1/N",
    "alone": "own model alone",
    "exact": "learned, exact",
    "oracle": "oracle",
    "stepped": "learned, stepped",
    "shuffled": "exact, of another client",
    "others-shuffled": "exact, others shuffled",
    "random": "random",
    "samples": "sample counts",
}
CORE = ("uniform", "alone", "exact", "oracle", "stepped", "shuffled")
"""Rows that are run before the rest."""
CLIENTS, GROUPS = 20, 4
SETS = {
    "hsu": DataConfig(partition="dirichlet", by="client", sizes="equal", alpha=0.3),
    "labels": DataConfig(partition="iid", planted="labels", groups=GROUPS),
    "rotation": DataConfig(partition="iid", planted="rotation", groups=GROUPS),
}
PULLS: dict[str, tuple[Literal["own", "server"], float]] = {"ours": ("server", 0.05), "paper": ("own", 1.0)}
"""Where a client starts its round, and lambda."""
RHOS = (0.1, 0.3, 1.0)
"""Of which rho of the exact relation is chosen, in units of each layer's spread."""
CHOICE_SEEDS = (100, 101)


class Given(Relation):
    """Rows of `kind` that stay as they are from the first round to the last (all clients take part)."""

    per_layer = True

    def __init__(self, kind: Fixed) -> None:
        self.kind = kind

    def on_fit_start(self, run: RunContext) -> None:
        """Write the table (layers, N, N)."""
        self.table = torch.from_numpy(given(self.kind, run.data, run.config.seed, len(run.layer_names)))

    def weights(self, inputs: RelationInputs) -> Tensor:
        """The receivers' rows, (L, m, n)."""
        return self.table[:, inputs.receivers][:, :, inputs.sources]


def given(kind: Fixed, data: FederatedData, seed: int, layers: int) -> np.ndarray:
    """Rows that are not learned, (layers, N, N).

    random: of each client and layer, uniform on the simplex. oracle: the mean of the true group; without groups, in
    proportion to the overlap of the true label mixes, sum_c min(p_i(c), p_j(c)), which is 1 for oneself.
    """
    n = data.clients
    if kind == "random":
        return numpy_rng(seed, "random rows").dirichlet(np.ones(n), size=(layers, n))
    table = np.ones((n, n))
    if kind == "alone":
        table = np.eye(n)
    elif kind == "samples":
        table *= data.train_sizes
    elif kind == "oracle":
        mixes = data.class_counts / data.class_counts.sum(1, keepdims=True)
        groups = np.array(data.groups)
        overlap = np.minimum(mixes[:, None], mixes[None]).sum(-1)
        table = (groups[:, None] == groups).astype(float) if groups.any() else overlap
    return np.tile(table / table.sum(1, keepdims=True), (layers, 1, 1))


class Shuffled(LearnedCube):
    """The learned rows, given to the wrong clients by one draw for the whole run (all clients take part).

    shuffled: every client receives by the row of another. others-shuffled: by its own, in which what it gives to others
    is shuffled among them: its own weight stays.
    """

    def __init__(self, settings: CubeSettings, how: Shuffle) -> None:
        super().__init__(settings)
        self.how = how

    def on_fit_start(self, run: RunContext) -> None:
        """Draw who receives by whose row, and where each weight of it goes, (N,) and (N, N)."""
        rng, n = numpy_rng(run.config.seed, "shuffled rows"), run.clients
        circle = rng.permutation(n)
        self.row, self.place = np.arange(n), np.tile(np.arange(n), (n, 1))
        if self.how == "shuffled":
            self.row[circle] = np.roll(circle, 1)
            return
        for client, places in enumerate(self.place):
            others = np.delete(np.arange(n), client)
            places[others] = rng.permutation(others)

    def weights(self, inputs: RelationInputs) -> Tensor:
        """The rows as shuffled, (L, m, n)."""
        return super().weights(inputs)[:, torch.from_numpy(self.row)[:, None], torch.from_numpy(self.place)]


@dataclass(frozen=True)
class Compared(KAPC):
    """KAPC with other `rows`; all else as it is."""

    rows: Rows = "stepped"

    def relation(self) -> Relation:
        """The relation that `rows` names."""
        if self.rows in get_args(Fixed):
            return Given(self.rows)  # type: ignore[arg-type]
        return Shuffled(self, self.rows) if self.rows in get_args(Shuffle) else super().relation()  # type: ignore[arg-type]


def config(data: str, pull: str, rows: Rows, seed: int, rounds: int, rho: float, validation: float = 0.0) -> Config:
    """One run: the digits on 20 clients, and KAPC whose prior is uniform."""
    start, lam = PULLS[pull]
    method = {"rows": rows, "start": start, "lam": lam}
    if rows in ("exact", *get_args(Shuffle)):
        method |= {"solver": "exact", "rho_units": "spread", "beta": 2 * lam * rho}
    return settings(
        Component("relation.Compared", method), Component("fl_lightning.models.mlp.MLP", {"hidden": [64, 32]}),
        replace(SETS[data], validation=validation), 0.2, EvaluationConfig(every=rounds, models=["after"]), seed,
        "vmap", {"every": rounds}, rounds=rounds, clients=CLIENTS, local_epochs=2, batch_size=36,
    )  # fmt: skip


def folder_of(out: Path, data: str, pull: str, rows: Rows, seed: int, rho: float | None = None) -> Path:
    """Where a run lies; with `rho`, one of those that choose it."""
    name = f"{data}-{pull}-{rows}-seed{seed}"
    return out / name if rho is None else out / "choice" / f"{name}-rho{rho}"


def plan(out: Path, seeds: Sequence[int], rounds: int) -> Iterator[tuple[Path, Callable[[], Config]]]:
    """All runs: those that choose rho, then row by row, the core first. A configuration is asked for in its turn."""
    for seed in CHOICE_SEEDS:
        for data, pull, rho in ((d, p, r) for d in SETS for p in PULLS for r in RHOS):
            folder = folder_of(out, data, pull, "exact", seed, rho)
            yield folder, lambda a=(data, pull, "exact", seed, rounds, rho, 0.2): config(*a)
    ranked = [rows for rows in LABELS if rows in CORE], [rows for rows in LABELS if rows not in CORE]
    for pull, rows in ((p, r) for some in ranked for p in PULLS for r in some):
        for data, seed in ((d, s) for d in SETS for s in seeds):
            folder = folder_of(out, data, pull, rows, seed)
            yield folder, lambda a=(data, pull, rows, seed, rounds): config(*a, rho=choice(out, a[0], a[1])[0])


def choice(out: Path, data: str, pull: str) -> tuple[float, list[float]]:
    """The rho that is best on validation data, and the accuracy there for each of `RHOS`."""
    scores = [
        mean(last(folder_of(out, data, pull, "exact", s, rho), "validation_accuracy") for s in CHOICE_SEEDS)
        for rho in RHOS
    ]
    return RHOS[scores.index(max(scores))], scores


def last(folder: Path, column: str = "mean_accuracy") -> float:
    """A finished run's figure in the last round, in per cent."""
    return 100 * RunFolder(folder).read("metrics")[-1][column]


def informed(folder: Path, rounds: int) -> tuple[float, float, float]:
    """Of the last round's rows: mean r_ii; of what is given to others, the own group's share less chance; agreement.

    Agreement is the adjusted Rand index of the true groups and clusters by the rows' mean over the layers, made
    symmetric (average linkage, cut at the true number): it asks for the order of the weights only, not for their size.
    """
    view = RunFolder(folder).read_relation(rounds)
    rows = view.rows.astype(float).transpose(1, 0, 2)  # (L, N, N)
    group = np.arange(CLIENTS) % GROUPS
    same = (group[:, None] == group) & ~np.eye(CLIENTS, dtype=bool)
    own = rows.diagonal(axis1=1, axis2=2)
    receives = own < 1 - 1e-9
    share = (rows * same).sum(-1)[receives] / (1 - own[receives])
    likeness = rows.mean(0) + rows.mean(0).T
    clusters = AgglomerativeClustering(GROUPS, metric="precomputed", linkage="average")
    labels = clusters.fit_predict(likeness.max() - likeness)
    chance = (CLIENTS / GROUPS - 1) / (CLIENTS - 1)
    lead = float(share.mean()) - chance if share.size else float("nan")
    return float(own.mean()), lead, float(adjusted_rand_score(group, labels))


def difference(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Mean and spread over seeds of the paired differences, and the 95 % t interval of their mean; empty if unknown."""
    if not ours or not theirs:
        return ""
    pairs = [a - b for a, b in zip(ours, theirs, strict=True)]
    if not any(pairs):
        return "0"
    low, high = ttest_rel(ours, theirs).confidence_interval(0.95)
    return f"{mean(pairs):+.2f} ± {stdev(pairs):.2f} [{low:+.2f}, {high:+.2f}]"


def scores(out: Path, data: str, pull: str, rows: Rows, seeds: Sequence[int]) -> list[float]:
    """The last accuracy of every seed, in per cent; empty until all have run."""
    folders = [folder_of(out, data, pull, rows, seed) for seed in seeds]
    return [last(f) for f in folders] if all(map(finished_rounds, folders)) else []


def table(out: Path, seeds: Sequence[int], rounds: int) -> str:
    """What there is of all seeds, as markdown."""
    per_pull = [f"{pull}: {what}" for pull in PULLS for what in ("last, %", "less uniform")]
    facts = [f"{what}, {' / '.join(PULLS)}" for what in ("r_ii", "own group less chance", "Rand index")]
    head = ["data", "rows", *per_pull, *facts]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for data, (rows, label) in ((d, item) for d in SETS for item in LABELS.items()):
        cells, means = [data, label], []
        for pull in PULLS:
            ours, plain = (scores(out, data, pull, r, seeds) for r in (rows, "uniform"))
            cells += [f"{mean(ours):.2f}" if ours else "", difference(ours, plain) if rows != "uniform" else ""]
            views = [informed(folder_of(out, data, pull, rows, s), rounds) for s in seeds if ours]
            means.append(np.mean(views or [[np.nan] * 3], 0))
        shown = 3 if SETS[data].planted != "none" else 1
        cells += [" / ".join(_figure(f[k]) for f in means) if k < shown else "" for k in range(3)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_beside(out, seeds)])


def _beside(out: Path, seeds: Sequence[int]) -> Iterator[str]:
    """By data and pull: how rho was chosen, and the exact relation beside two other rows."""
    for data, pull in ((d, p) for d in SETS for p in PULLS):
        figures = zip(RHOS, choice(out, data, pull)[1], strict=True)
        words = f"- {data}, {pull}: validation accuracy at rho " + ", ".join(f"{r:g}: {x:.2f}" for r, x in figures)
        exact, alone, oracle = (scores(out, data, pull, rows, seeds) for rows in ("exact", "alone", "oracle"))
        yield f"{words}; exact less alone {difference(exact, alone)}, less oracle {difference(exact, oracle)}"


def _figure(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.2f}"


def run(folder: Path, wanted: Config) -> None:
    """Run `wanted` in `folder`, or what is left of it; exits if the folder holds another run."""
    if finished_rounds(folder) >= wanted.federation.rounds:
        return
    folder.mkdir(parents=True, exist_ok=True)
    saved = folder / CONFIG
    if saved.exists() and _identity(saved.read_text(encoding="utf-8")) != _identity(to_yaml(wanted)):
        raise SystemExit(f"{folder} holds a run with other settings: remove it, or give another --out")
    write_config(folder, wanted)
    fit(wanted, folder, resume=True)


def finished_rounds(folder: Path) -> int:
    """Rounds of a run that has ended; 0 if it has not."""
    try:
        return int(RunFolder(folder).read_summary()["rounds"])
    except FileNotFoundError:
        return 0


def _identity(text: str) -> dict[str, Any]:
    """A configuration without its number of rounds, which may change from call to call."""
    settings: dict[str, Any] = yaml.safe_load(text)
    settings["federation"].pop("rounds")
    return settings


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path, default=Path("runs/relation"))
    args = parser.parse_args(argv)
    runs = list(plan(args.out, args.seeds, args.rounds))
    for number, (folder, wanted) in enumerate(runs, 1):
        if finished_rounds(folder) < args.rounds:
            print(f"{number}/{len(runs)} {folder.name}", file=sys.stderr, flush=True)
            run(folder, wanted())
    print(table(args.out, args.seeds, args.rounds))


if __name__ == "__main__":
    main()
