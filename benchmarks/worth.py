"""Calibrates `fl-train worth`: consortia with a known truth, and how often it is right.

    python benchmarks/worth.py run results.jsonl --count 200    a second of one core each
    python benchmarks/worth.py table results.jsonl

Each consortium is a line of the file, by its number: a stopped run goes on. Every silo has a linear
teacher of a shared and an own part; one in seven shares nothing. Students are linear models of
least squares, whose descent has a closed form, so that silos train for *epochs*: a silo of 20 rows
takes fewer steps than one of 2,000. Alone stands for the three lengths of `worth` and for ridge;
federated are one model of all for three lengths, that model trained on by each silo, and partial
pooling with two penalties. The choices on other folds are those of `measure`. The truth is the mean
score of the chosen methods over fresh training sets (of four fifths of a silo), less that of the
best alone. Kinds of consortia, in turn:

    plain       accuracy
    null        the federated rows are ridges of the silo itself: nobody gains
    coin        labels by coin: nobody gains
    units       five rows of a person each, cut and counted by person
    copies      a third of a silo's rows are copies of others, in one fold
    rare        one row in twelve is of the second class, balanced accuracy
    auroc       the same, AUROC
    mae         a regression
    heavy       a regression whose errors have two degrees of freedom
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pandas import DataFrame
from scipy import stats
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from fl_lightning.data import units as cutting
from fl_lightning.lab.worth import LENGTHS, LINEAR, LOCAL
from fl_lightning.lab.worth.measure import contributions, measure
from fl_lightning.lab.worth.silos import Silo
from fl_lightning.lab.worth.statistics import Name, Samples, Scores, estimate

SIZES = (20, 60, 60, 200, 200, 600, 2000)
KINDS = ("plain", "null", "coin", "units", "copies", "rare", "auroc", "mae", "heavy")
METRICS: Mapping[str, Name] = {"rare": "balanced_accuracy", "auroc": "auroc", "mae": "mae"} | {
    "heavy": "mae"
}
FOLDS, EPOCHS, BATCH, RATE, OF_ONE = 5, 10, 16, 0.05, 5
ALPHAS = np.logspace(-1, 4, 11)
TESTS = 2000
Rows = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Features (n, p) with an intercept, targets (n,), and the number of each row's person."""


@dataclass(frozen=True)
class Moments:
    """Of a training set: X'X in its own directions, and X'y."""

    values: np.ndarray
    directions: np.ndarray
    target: np.ndarray
    rows: int

    @classmethod
    def of(cls, x: np.ndarray, y: np.ndarray) -> Moments:
        values, directions = np.linalg.eigh(x.T @ x)
        return cls(np.maximum(values, 0), directions, x.T @ y, len(y))

    def descended(self, steps: float, start: np.ndarray) -> np.ndarray:
        """Weights after so many steps of gradient descent on the mean squared error."""
        kept = (1 - RATE * np.minimum(self.values / self.rows, 1 / RATE)) ** steps
        at = self.directions.T
        best = at @ self.target / np.maximum(self.values, 1e-9)
        return self.directions @ (kept * (at @ start) + (1 - kept) * best)

    def ridge(self, alpha: float, towards: np.ndarray | None = None) -> np.ndarray:
        """Weights with a penalty on the distance to `towards` (None: 0)."""
        centre = np.zeros(len(self.target)) if towards is None else towards
        at = self.directions.T @ (self.target + alpha * centre)
        return self.directions @ (at / (self.values + alpha))


def chosen_ridge(x: np.ndarray, y: np.ndarray, moments: Moments) -> np.ndarray:
    """Ridge with the penalty of the least error when each row is left out."""
    at = x @ moments.directions
    best, least = ALPHAS[0], np.inf
    for alpha in ALPHAS:
        leverage = (at**2 / (moments.values + alpha)).sum(1)
        error = (y - x @ moments.ridge(alpha)) / np.maximum(1 - leverage, 1e-6)
        if (loss := float(np.square(error).mean())) < least:
            best, least = alpha, loss
    return moments.ridge(best)


class World:
    """The silos of one consortium."""

    def __init__(self, number: int) -> None:
        self.rng = np.random.default_rng([50, number])
        self.kind = KINDS[number % len(KINDS)]
        self.metric: Name = METRICS.get(self.kind, "accuracy")
        features, most = ((4, 1.2), (12, 0.7), (40, 0.3))[number // len(KINDS) % 3]
        own, common = self.rng.uniform(0, most), self.rng.normal(size=features)
        apart = self.rng.random(len(SIZES)) < 1 / 7
        self.teachers = [
            ((1 - a) * common + (a or own) * self.rng.normal(size=features)) / features**0.5
            for a in apart
        ]
        self.offsets = self.rng.normal(0, 0.5, len(SIZES))

    def draw(self, silo: int, size: int, person: bool = False) -> Rows:
        """Rows of a silo; `person`: each of a person of its own, as new ones are."""
        rng, teacher = self.rng, self.teachers[silo]
        many = OF_ONE if self.kind == "units" and not person else 1
        person_of = np.arange(size) // many
        x = rng.normal(size=(size, len(teacher)))
        if self.kind == "units":
            centre = rng.normal(size=(size, len(teacher)))
            x = centre[person_of] + 0.3 * x
        signal = 2 * x @ teacher + self.offsets[silo]
        signal += rng.normal(size=size)[person_of] * (self.kind == "units")
        if self.metric == "mae":
            noise = rng.standard_t(2, size) if self.kind == "heavy" else rng.normal(size=size)
            y = signal + noise
        elif self.kind == "coin":
            y = rng.choice([-1.0, 1.0], size)
        else:
            rare = 3.2 if self.kind in ("rare", "auroc") else 0.0
            y = np.where(signal + rng.logistic(size=size) > rare, 1.0, -1.0)
        if self.kind == "copies" and not person:
            copied = rng.random(size) < 1 / 3
            person_of = np.where(copied, rng.integers(0, size, size), person_of)
            x, y = x[person_of], y[person_of]
        return np.column_stack([x, np.ones(size)]), y, person_of

    def trained(self, sets: Sequence[Rows]) -> list[dict[str, np.ndarray]]:
        """Weights of every row for each silo."""
        moments = [Moments.of(x, y) for x, y, _ in sets]
        everyone = Moments.of(*(np.concatenate([rows[k] for rows in sets]) for k in (0, 1)))
        steps = [EPOCHS * -(-m.rows // BATCH) for m in moments]
        nothing = np.zeros(len(everyone.target))
        mean_steps = float(np.mean(steps))
        pooled = {n: everyone.descended(n * mean_steps, nothing) for n in LENGTHS}
        models = []
        for (x, y, _), own, count in zip(sets, moments, steps, strict=True):
            alone = {
                label: own.descended(n * count, nothing)
                for label, n in zip(LOCAL, LENGTHS, strict=True)
            } | {LINEAR: chosen_ridge(x, y, own)}
            if self.kind == "null":
                ours = {f"ridge {a:g}": own.ridge(a) for a in (1.0, 3.0, 10.0)}
            else:
                ours = {f"pooled x{n}": w for n, w in pooled.items()}
                ours |= {"after": own.descended(count, pooled[LENGTHS[-1]])}
                ours |= {f"pooling {a}": own.ridge(a, pooled[LENGTHS[-1]]) for a in (10, 100)}
            models.append(alone | ours)
        return models

    def score(self, said: np.ndarray, y: np.ndarray) -> float:
        """More is better; as `worth` has it."""
        if self.metric == "mae":
            return -float(np.abs(said - y).mean())
        if self.metric == "auroc":
            return float(roc_auc_score(y > 0, said))
        if self.metric == "balanced_accuracy":
            return float(balanced_accuracy_score(y > 0, said > 0))
        return float(((said > 0) == (y > 0)).mean())

    def scores(self, said: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Of each row whether it is right, or its error."""
        return np.abs(said - y) if self.metric == "mae" else ((said > 0) == (y > 0)).astype(float)


def measured(world: World, cycles: int) -> list[Silo]:
    """The silos as `fl-train worth` sees them: drawn, cut, trained and tested, cycle by cycle."""
    data = [world.draw(c, size) for c, size in enumerate(SIZES)]
    labels = [
        np.zeros(len(y), int) if world.metric == "mae" else (y > 0).astype(int) for _, y, _ in data
    ]
    folds = [
        np.stack([cutting.folds(rows[2], own, FOLDS, world.rng) for _ in range(cycles)])
        for rows, own in zip(data, labels, strict=True)
    ]
    said: list[dict[str, np.ndarray]] = [{} for _ in SIZES]
    for cycle in range(cycles):
        for fold in range(FOLDS):
            sets = [
                (x[of[cycle] != fold], y[of[cycle] != fold], person[of[cycle] != fold])
                for (x, y, person), of in zip(data, folds, strict=True)
            ]
            for c, models in enumerate(world.trained(sets)):
                tested = folds[c][cycle] == fold
                for label, weights in models.items():
                    table = said[c].setdefault(label, np.zeros((cycles, len(tested))))
                    table[cycle, tested] = data[c][0][tested] @ weights
    silos = []
    for c, (_, y, person) in enumerate(data):
        rows = {
            label: Scores(world.scores(each, y), np.stack([np.zeros_like(each), each], -1))
            for label, each in said[c].items()
        }
        samples = Samples(labels[c], folds[c], person)
        several = len(np.unique(person)) if world.kind == "units" else 0
        silos.append(Silo(c, f"{c}", samples, rows, size=len(y), units=several))
    return silos


def truth(world: World, draws: int) -> list[dict[str, float]]:
    """Mean score of each row by silo, over fresh training sets, on fresh persons."""
    sums: list[dict[str, float]] = [{} for _ in SIZES]
    for _ in range(draws):
        sets = [world.draw(c, max(4, size * 4 // 5)) for c, size in enumerate(SIZES)]
        for c, models in enumerate(world.trained(sets)):
            x, y, _ = world.draw(c, TESTS, person=True)
            for label, weights in models.items():
                value = world.score(x @ weights, y)
                sums[c][label] = sums[c].get(label, 0.0) + value / draws
    return sums


def consortium(number: int, cycles: int, draws: int) -> dict[str, Any]:
    """One line of the file."""
    world = World(number)
    silos = measured(world, cycles)
    true = truth(world, draws)
    answer = measure(silos, world.metric, None, cycles)
    rows = []
    for one in answer.answers:
        scores = true[one.silo.number]
        alone = max([*LOCAL, LINEAR], key=lambda label: scores[label])
        picked = sum(scores[m] * count for m, count in answer.picks.items())
        gain = picked / sum(answer.picks.values()) - scores[alone]
        best = max(answer.picks, key=lambda label: scores[label])
        parts = contributions(one.silo, world.metric)
        oracle = estimate(world.metric, parts[alone], parts[best], one.silo.samples)
        if one.estimate is None or oracle is None:
            continue
        rows.append(
            {
                "size": one.silo.size,
                "true": gain,
                "margin": one.margin,
                "verdict": one.verdict,
                "judged": not one.reason or one.verdict != "cannot tell yet",
                "low": one.low,
                "high": one.high,
                "oracle": oracle.gain > stats.norm.ppf(0.975) * oracle.variance**0.5,
            }
        )
    return {"number": number, "kind": world.kind, "silos": rows}


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """By kind and by size of silos."""
    rows = DataFrame([row | {"kind": line["kind"]} for line in lines for row in line["silos"]])
    rows["covered"] = rows["true"].between(rows["low"], rows["high"])
    rows["half"] = (rows["high"] - rows["low"]) / 2 / rows["margin"]
    text = [
        "| silos | number | coverage, % | half-width, margins | false `gains` | false `harmed` | "
        "gains of 2 to 5 margins named | by an oracle |",
        "| --- " * 8 + "|",
    ]
    large = rows[rows["size"] >= 40]
    groups = [*large.groupby("kind", sort=False), *rows.groupby("size")]
    for name, own in groups:
        nothing, some = own[own["true"] <= 0], own[own["true"] / own["margin"] >= 2]
        some = some[some["true"] / some["margin"] <= 5]
        cells = [
            f"{100 * own['covered'].mean():.1f}",
            f"{own['half'].median():.1f}",
            _share(nothing["verdict"] == "gains"),
            _share(own.loc[own["true"] >= 0, "verdict"] == "harmed"),
            _share(some["verdict"] == "gains"),
            _share(some["oracle"]),
        ]
        text.append(f"| {name} | {len(own)} | {' | '.join(cells)} |")
    return "\n".join(text)


def _share(events: Any) -> str:
    return f"{int(events.sum())} of {len(events)}"


def main(argv: list[str] | None = None) -> None:
    """Run consortia, or print the table of a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--cycles", type=int, default=2)
    parser.add_argument("--draws", type=int, default=30, help="fresh training sets of the truth")
    given = parser.parse_args(argv)
    text = given.file.read_text() if given.file.exists() else ""
    lines = [json.loads(line) for line in text.splitlines()]
    if given.what == "table":
        print(table(lines))
        return
    done = {line["number"] for line in lines}
    for number in range(given.count):
        if number not in done:
            line = consortium(number, given.cycles, given.draws)
            with given.file.open("a") as file:
                file.write(json.dumps(line, default=bool) + "\n")


if __name__ == "__main__":
    main()
