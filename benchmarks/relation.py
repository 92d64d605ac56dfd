"""Is KAPC's learned relation informative? KAPC with rows that know nothing, and with rows that know the truth.

cd benchmarks
fl-train study relation_rho.yaml --out ../runs/relation-rho     which rho, on validation data, by fl-train compare
fl-train study relation.yaml --out ../runs/relation             with that rho, on other seeds
python relation.py ../runs/relation                             fl-train compare has accuracies, this the rest
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from fl_lightning.callbacks.cube import CubeSettings, LearnedCube
from fl_lightning.callbacks.relations import Relation
from fl_lightning.core.protocols import RelationInputs
from fl_lightning.core.run import RunContext
from fl_lightning.data import FederatedData
from fl_lightning.methods.kapc import KAPC
from fl_lightning.results.result import RunResult
from fl_lightning.rng import numpy_rng
from fl_lightning.study.cells import read

Fixed = Literal["uniform", "alone", "samples", "random", "oracle"]
Shuffle = Literal["shuffled", "others-shuffled"]
GROUPS = 4


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

    rows: Literal["stepped", "exact"] | Fixed | Shuffle = "stepped"

    def relation(self) -> Relation:
        """The relation that `rows` names."""
        if self.rows in get_args(Fixed):
            return Given(self.rows)  # type: ignore[arg-type]
        return Shuffled(self, self.rows) if self.rows in get_args(Shuffle) else super().relation()  # type: ignore[arg-type]


def informed(run: RunResult) -> tuple[float, float, float]:
    """Of the last round's rows: mean r_ii; of what is given to others, the own group's share less chance; agreement.

    Agreement is `rand_index`, which asks for the order of the weights only, not for their size. Without planted groups
    the last two are NaN.
    """
    view = run.relation()
    rows = view.rows.astype(float).transpose(1, 0, 2)  # (L, N, N)
    clients = rows.shape[-1]
    group = np.arange(clients) % GROUPS
    same = (group[:, None] == group) & ~np.eye(clients, dtype=bool)
    own = rows.diagonal(axis1=1, axis2=2)
    receives = own < 1 - 1e-9
    share = (rows * same).sum(-1)[receives] / (1 - own[receives])
    chance = (clients / GROUPS - 1) / (clients - 1)
    lead = float(share.mean()) - chance if share.size and run.has("rand_index") else float("nan")
    return float(own.mean()), lead, run.column("rand_index")[-1]


def table(study: Path) -> str:
    """Means over seeds of `informed`, by setting and row, in Markdown."""
    facts = defaultdict(list)
    for cell in read([study])[0]:
        facts[cell.setting, cell.label].append(informed(cell.run))
    lines = ["| data | rows | r_ii | own group less chance | Rand index |", "| --- " * 5 + "|"]
    for names, runs in facts.items():
        means = ("-" if np.isnan(value) else f"{value:.2f}" for value in np.mean(runs, axis=0))
        lines.append(f"| {' | '.join([*names, *means])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
