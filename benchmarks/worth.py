"""Calibrates `fl-train worth`: consortia with a known truth, small models trained by SGD, and how often it is right.

    python benchmarks/worth.py run results.jsonl --count 300        some 4 s a consortium on one core
    python benchmarks/worth.py table results.jsonl

Each consortium is a line of the file, by its number: a stopped run goes on, and several may be put together. Every
silo has a linear teacher of a shared and an own part, a shift of its features and of its classes; students are logistic
models or small MLPs, trained with mini-batches. A consortium is trained as `fl-train worth` does: alone, FedAvg judged
after local training, and FedAvg with few or many further steps, on repeated stratified five-fold; in every second
consortium the three are instead training alone with other seeds, so that no silo gains. The truth is the mean gain over
fresh training sets of the silos' sizes, which are drawn and trained `--draws` times and tested on 10,000 fresh samples.
All trainings of a consortium are one batch of models.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from fl_lightning.data.owntest import folds as cut
from fl_lightning.gains.measure import measure
from fl_lightning.gains.silos import Silo
from fl_lightning.gains.statistics import Samples, Scores, verdict

SIZES = (20, 60, 60, 200, 200, 200, 1000, 1000)
FOLDS, BATCH, ROUNDS, STEPS, RATE, HIDDEN, TESTS = 5, 16, 8, 10, 0.3, 6, 10_000
METHODS = ("after", "short", "long")
MARGIN = 0.02


class World:
    """The silos of one consortium: teachers, shifts of features and of classes."""

    def __init__(self, number: int, features: int) -> None:
        self.rng, self.features = np.random.default_rng([31, number]), features
        own = self.rng.uniform(0, 1.2 if features < 20 else 0.7)  # with more features silos gain more from each other
        common = self.rng.normal(size=features)
        self.teachers = [common + own * self.rng.normal(size=features) for _ in SIZES]
        self.shifts = [self.rng.normal(0, self.rng.uniform(0, 0.6), features) for _ in SIZES]
        self.offsets = self.rng.normal(0, 0.7, len(SIZES))
        self.slope, self.mlp, self.null = self.rng.uniform(1, 3), number % 4 >= 2, number % 2 == 1

    def draw(self, silo: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Samples (size, features) and their classes 0 or 1."""
        x = self.rng.normal(size=(size, self.features)) + self.shifts[silo]
        logit = (
            self.slope * (x - self.shifts[silo]) @ self.teachers[silo] / math.sqrt(self.features) + self.offsets[silo]
        )
        return x.astype(np.float32), (self.rng.random(size) < 1 / (1 + np.exp(-logit))).astype(np.float32)


def train(x: Tensor, y: Tensor, sizes: Tensor, world: World, seed: int, federated: bool) -> dict[str, list[Tensor]]:
    """Models of all fits and silos, (fits, silos, ...) each parameter, by method; alone: `local`.

    Args:
        x: (fits, silos, most, features), padded.
        y: (fits, silos, most).
        sizes: (fits, silos) samples that are no padding.
        world: which student.
        seed: of first models, one for all silos of a fit, and of batches.
        federated: train with the server, too.
    """
    noise = torch.Generator().manual_seed(seed)
    fits, silos = sizes.shape
    width = HIDDEN if world.mlp else 1
    first = [torch.randn(fits, 1, x.shape[-1], width, generator=noise) * 0.4, torch.zeros(fits, 1, 1, width)]
    first += [torch.randn(fits, 1, width, 1, generator=noise) * 0.4] if world.mlp else []
    start = [p.expand(fits, silos, *p.shape[2:]).clone() for p in first]

    def steps(model: list[Tensor], count: int) -> list[Tensor]:
        for _ in range(count):
            at = (torch.rand(fits, silos, BATCH, generator=noise) * sizes[..., None]).long()
            bx = torch.take_along_dim(x, at[..., None], 2)
            by = torch.take_along_dim(y, at, 2)
            model = [p.detach().requires_grad_() for p in model]
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits(model, bx), by, reduction="sum") / BATCH
            model = [p - RATE * g for p, g in zip(model, torch.autograd.grad(loss, model), strict=True)]
        return [p.detach() for p in model]

    models = {"local": steps(start, ROUNDS * STEPS)}
    if not federated:
        return models
    weight = (sizes / sizes.sum(1, keepdim=True))[..., None, None]
    model = start
    for _ in range(ROUNDS):
        models["after"] = steps(model, STEPS)
        model = [(weight * p).sum(1, keepdim=True).expand_as(p).clone() for p in models["after"]]
    models["short"], models["long"] = steps(model, STEPS // 3), steps(model, 3 * STEPS)
    return models


def logits(model: list[Tensor], x: Tensor) -> Tensor:
    """Of samples (fits, silos, n, features)."""
    z = x @ model[0] + model[1]
    return (torch.tanh(z) @ model[2])[..., 0] if len(model) > 2 else z[..., 0]


def trained(xs: list[list[np.ndarray]], ys: list[list[np.ndarray]], world: World, seed: int) -> dict[str, list[Tensor]]:
    """The models of all fits and silos: alone, and by three methods, or by training alone with other seeds."""
    fits, silos = len(xs), len(SIZES)
    most = max(len(y) for fit in ys for y in fit)
    x, y = torch.zeros(fits, silos, most, world.features), torch.zeros(fits, silos, most)
    sizes = torch.tensor([[len(own) for own in fit] for fit in ys])
    for f in range(fits):
        for c in range(silos):
            x[f, c, : sizes[f, c]] = torch.from_numpy(xs[f][c])
            y[f, c, : sizes[f, c]] = torch.from_numpy(ys[f][c])
    models = train(x, y, sizes, world, seed, not world.null)
    if world.null:
        models |= {m: train(x, y, sizes, world, seed + 1 + k, False)["local"] for k, m in enumerate(METHODS)}
    return models


def measured(world: World, seed: int, cycles: int) -> list[Silo]:
    """The silos as `fl-train worth` sees them: drawn, cut, trained and tested, cycle by cycle."""
    data = [world.draw(c, size) for c, size in enumerate(SIZES)]
    folds = [np.stack([cut(y.astype(int), FOLDS, world.rng) for _ in range(cycles)]) for _, y in data]
    places = [(cycle, fold) for cycle in range(cycles) for fold in range(FOLDS)]
    xs, ys = ([[own[k][of[c] != f] for own, of in zip(data, folds, strict=True)] for c, f in places] for k in (0, 1))
    models = trained(xs, ys, world, seed)
    silos = []
    for c, (x, y) in enumerate(data):
        rows = {}
        for label, model in models.items():
            scored = logits([p[:, c : c + 1] for p in model], torch.from_numpy(x).expand(len(places), 1, *x.shape))[
                :, 0
            ]
            hit = ((scored > 0).numpy() == y).astype(float)
            right = np.zeros((cycles, len(y)))
            for place, (cycle, fold) in enumerate(places):
                tested = folds[c][cycle] == fold
                right[cycle, tested] = hit[place, tested]
            rows[label] = Scores(right)
        silos.append(Silo(c, f"{c}", Samples(y.astype(int), folds[c], np.arange(len(y))), rows, size=len(y)))
    return silos


def truth(world: World, seed: int, draws: int) -> dict[str, list[float]]:
    """Mean gain of each method over training alone, by silo, over fresh training sets."""
    sets = [[world.draw(c, size) for c, size in enumerate(SIZES)] for _ in range(draws)]
    models = trained([[x for x, _ in one] for one in sets], [[y for _, y in one] for one in sets], world, seed)
    gains: dict[str, list[float]] = {label: [] for label in METHODS}
    for c in range(len(SIZES)):
        x, y = world.draw(c, TESTS)
        tests = torch.from_numpy(x).expand(draws, 1, *x.shape)
        right = {
            label: float(((logits([p[:, c : c + 1] for p in model], tests) > 0).numpy() == y).mean())
            for label, model in models.items()
        }
        for label in METHODS:
            gains[label].append(0.0 if world.null else right[label] - right["local"])
    return gains


def nadeau_bengio(silo: Silo, method: str) -> tuple[float, float]:
    """Their interval over repetitions, on the same fits, of a method that is fixed."""
    difference, folds = silo.rows[method].right - silo.rows["local"].right, silo.samples.folds
    means = np.array([row[of == f].mean() for row, of in zip(difference, folds, strict=True) for f in range(FOLDS)])
    error = math.sqrt((1 / len(means) + 1 / (FOLDS - 1)) * means.var(ddof=1))
    half = float(stats.t.ppf(0.975, len(means) - 1)) * error
    return float(means.mean()) - half, float(means.mean()) + half


def consortium(number: int, features: int, cycles: int, draws: int) -> dict[str, Any]:
    """One line of the file."""
    world = World(number, features)
    silos = measured(world, 1000 * number, cycles)
    true = truth(world, 1000 * number + 500, draws)
    answer = measure(silos, "accuracy", MARGIN)
    rows = []
    for one in answer.answers:
        picked = sum(true[m][one.silo.number] * count for m, count in answer.picks.items()) / sum(answer.picks.values())
        low, high = nadeau_bengio(one.silo, answer.method)
        row = {"size": one.silo.size, "true": picked, "verdict": one.verdict, "reason": bool(one.reason)}
        assert one.estimate is not None
        row |= {"gain": one.estimate.gain, "half": one.estimate.half, "low": one.low, "high": one.high}
        rows.append(row | {"theirs": [low, high], "true_fixed": true[answer.method][one.silo.number]})
    sure = answer.consortium.get("surely_gain", [])
    return {
        "number": number,
        "features": features,
        "null": world.null,
        "mlp": world.mlp,
        "cycles": cycles,
        "silos": rows,
        "sure": len(sure),
    }


def table(lines: Iterable[dict[str, Any]]) -> str:
    """The table of goals, by size."""
    lines = list(lines)
    by_size: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        for row in line["silos"]:
            by_size[row["size"]].append(row | {"null": line["null"]})
    text = [f"{len(lines)} consortia, {sum(line['null'] for line in lines)} without any gain", ""]
    head = "| samples | silos | coverage | half-width | no gain, `gains` | wrong sign | named of 5 to 10 points: ours, "
    text += [head + "Nadeau and Bengio |"]
    text += ["| --- | --- | --- | --- | --- | --- | --- |"]
    for size, rows in sorted(by_size.items()):
        cover = np.mean([r["low"] <= r["true"] <= r["high"] for r in rows])
        null = [r["verdict"] == "gains" for r in rows if r["null"]]
        apart = [r for r in rows if abs(r["true"]) > 0.01]
        wrong = [r["verdict"] == ("harmed" if r["true"] > 0 else "gains") for r in apart]
        real = [r for r in rows if 0.05 <= r["true"] <= 0.1]
        ours = [r["verdict"] == "gains" for r in real]
        theirs = [verdict(*r["theirs"], MARGIN) == "gains" and not r["reason"] for r in real]
        half = 100 * np.median([r["half"] for r in rows])
        text.append(
            f"| {size} | {len(rows)} | {100 * cover:.1f} | {half:.1f} | {_share(null)} | {_share(wrong)} | "
            f"{_share(ours)}, {_share(theirs)} |"
        )
    nulls = [line for line in lines if line["null"]]
    text += [
        "",
        f"consortia without any gain where a silo surely gains (Holm): {_share([line['sure'] > 0 for line in nulls])}",
    ]
    return "\n".join(text)


def _share(events: list[bool]) -> str:
    return f"{100 * np.mean(events):.1f} % of {len(events)}" if events else "-"


def main(argv: list[str] | None = None) -> None:
    """Run consortia, or print the table of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=300, help="consortia: numbers from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--features", type=int, default=24, help="of a sample: 8 easy, 24 hard")
    parser.add_argument("--cycles", type=int, default=4)
    parser.add_argument("--draws", type=int, default=100, help="fresh training sets of the truth")
    given = parser.parse_args(argv)
    lines = [json.loads(line) for line in given.file.read_text().splitlines()] if given.file.exists() else []
    if given.what == "table":
        print(table(lines))
        return
    torch.set_num_threads(1)
    done = {line["number"] for line in lines if line["features"] == given.features}
    for number in range(given.first, given.first + given.count):
        if number not in done:
            line = json.dumps(consortium(number, given.features, given.cycles, given.draws))
            with given.file.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
