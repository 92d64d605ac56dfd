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
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from measure import markdown
from pandas import DataFrame
from scipy import stats
from sklearn.linear_model import RidgeCV
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from fl_lightning.data import units as cutting
from fl_lightning.lab.worth import LENGTHS, LINEAR, LOCAL
from fl_lightning.lab.worth.measure import measure
from fl_lightning.lab.worth.silos import Silo
from fl_lightning.lab.worth.statistics import Name, ScoredSamples, Scores, estimate

SIZES = (20, 60, 60, 200, 200, 600, 2000)
KINDS = ("plain", "null", "coin", "units", "copies", "rare", "auroc", "mae", "heavy")
METRICS: Mapping[str, Name] = {
    "rare": "balanced_accuracy",
    "auroc": "auroc",
    "mae": "mae",
    "heavy": "mae",
}
FOLDS = 5
EPOCHS = 10
BATCH = 16
RATE = 0.05
ROWS_OF_PERSON = 5
ALPHAS = np.logspace(-1, 4, 11)
TESTS = 2000
Rows = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Features (n, p) with an intercept, targets (n,), and the number of each row's person."""
Weights = dict[str, np.ndarray]
"""Weights of linear models, by kind."""


@dataclass(frozen=True)
class Moments:
    """Moments of a training set: eigenvalues and eigenvectors of X'X, and X'y."""

    values: np.ndarray
    directions: np.ndarray
    target: np.ndarray
    rows: int

    @classmethod
    def of(
        cls,
        x: np.ndarray,
        y: np.ndarray,
    ) -> Moments:
        values, directions = np.linalg.eigh(x.T @ x)
        return cls(
            np.maximum(values, 0),
            directions,
            x.T @ y,
            len(y),
        )

    def descended(
        self,
        steps: float,
        start: np.ndarray,
    ) -> np.ndarray:
        """Return weights after so many steps of gradient descent on the mean squared error."""
        remaining = (1 - RATE * np.minimum(self.values / self.rows, 1 / RATE)) ** steps
        optimum = self.directions.T @ self.target / np.maximum(self.values, 1e-9)
        path = remaining * (self.directions.T @ start) + (1 - remaining) * optimum
        return self.directions @ path

    def ridge(
        self,
        alpha: float,
        centre: np.ndarray,
    ) -> np.ndarray:
        """Return weights with a penalty on the distance to `centre`."""
        projected = self.directions.T @ (self.target + alpha * centre)
        return self.directions @ (projected / (self.values + alpha))


class World:
    """The silos of one consortium."""

    def __init__(self, number: int) -> None:
        self.rng = np.random.default_rng([50, number])
        self.kind = KINDS[number % len(KINDS)]
        self.metric: Name = METRICS.get(self.kind, "accuracy")
        features, most = ((4, 1.2), (12, 0.7), (40, 0.3))[number // len(KINDS) % 3]
        own_part = self.rng.uniform(0, most)
        common = self.rng.normal(size=features)
        self.teachers = []
        for shares_nothing in self.rng.random(len(SIZES)) < 1 / 7:
            scale = 1.0 if shares_nothing else own_part
            own_teacher = scale * self.rng.normal(size=features)
            self.teachers.append((common * (not shares_nothing) + own_teacher) / features**0.5)
        self.offsets = self.rng.normal(0, 0.5, len(SIZES))

    def draw(
        self,
        silo: int,
        size: int,
        new_persons: bool = False,
    ) -> Rows:
        """Draw rows of a silo; `new_persons`: each row is of a person of its own."""
        rng = self.rng
        teacher = self.teachers[silo]
        by_person = self.kind == "units"
        person_of = np.arange(size) // (ROWS_OF_PERSON if by_person and not new_persons else 1)
        x = rng.normal(size=(size, len(teacher)))
        if by_person:
            centre = rng.normal(size=(size, len(teacher)))
            x = centre[person_of] + 0.3 * x
        signal = 2 * x @ teacher + self.offsets[silo]
        signal += rng.normal(size=size)[person_of] * by_person
        if self.metric == "mae":
            noise = rng.standard_t(2, size) if self.kind == "heavy" else rng.normal(size=size)
            y = signal + noise
        elif self.kind == "coin":
            y = rng.choice([-1.0, 1.0], size)
        else:
            threshold = 3.2 if self.kind in ("rare", "auroc") else 0.0
            y = np.where(
                signal + rng.logistic(size=size) > threshold,
                1.0,
                -1.0,
            )
        if self.kind == "copies" and not new_persons:
            is_copy = rng.random(size) < 1 / 3
            person_of = np.where(
                is_copy,
                rng.integers(0, size, size),
                person_of,
            )
            x = x[person_of]
            y = y[person_of]
        return np.column_stack([x, np.ones(size)]), y, person_of

    def trained(self, sets: Sequence[Rows]) -> list[Weights]:
        """Train all kinds of models on the rows of each silo."""
        moments = [Moments.of(x, y) for x, y, _ in sets]
        all_x, all_y, _ = map(np.concatenate, zip(*sets, strict=True))
        everyone = Moments.of(all_x, all_y)
        steps = [EPOCHS * -(-silo.rows // BATCH) for silo in moments]
        zero = np.zeros(len(everyone.target))
        pooled = [everyone.descended(n * float(np.mean(steps)), zero) for n in LENGTHS]
        longest = pooled[-1]
        models = []
        for (x, y, _), silo, count in zip(sets, moments, steps, strict=True):
            lengths_alone = zip(LOCAL, LENGTHS, strict=True)
            weights = {label: silo.descended(n * count, zero) for label, n in lengths_alone}
            weights[LINEAR] = RidgeCV(ALPHAS, fit_intercept=False).fit(x, y).coef_
            if self.kind == "null":
                weights |= {f"ridge {a:g}": silo.ridge(a, zero) for a in (1.0, 3.0, 10.0)}
            else:
                for n, shared in zip(LENGTHS, pooled, strict=True):
                    weights[f"pooled x{n}"] = shared
                weights["after"] = silo.descended(count, longest)
                weights |= {f"pooling {a}": silo.ridge(a, longest) for a in (10, 100)}
            models.append(weights)
        return models

    def score(
        self,
        predictions: np.ndarray,
        y: np.ndarray,
    ) -> float:
        """Return the score of predictions, greater is better."""
        if self.metric == "auroc":
            return float(roc_auc_score(y > 0, predictions))
        if self.metric == "balanced_accuracy":
            return float(balanced_accuracy_score(y > 0, predictions > 0))
        mean = float(self.scores(predictions, y).mean())
        return -mean if self.metric == "mae" else mean

    def scores(
        self,
        predictions: np.ndarray,
        y: np.ndarray,
    ) -> np.ndarray:
        """Return for each row whether it is right, or its error."""
        if self.metric == "mae":
            return np.abs(predictions - y)
        return ((predictions > 0) == (y > 0)).astype(float)


def measured(world: World, cycles: int) -> list[Silo]:
    """Return the silos as `fl-train worth` sees them: drawn, cut, trained and tested in cycles."""
    data = [world.draw(silo, size) for silo, size in enumerate(SIZES)]
    labels = []
    folds = []
    for _, y, person in data:
        classes = np.zeros(len(y), int) if world.metric == "mae" else (y > 0).astype(int)
        cuts = [cutting.folds(person, classes, FOLDS, world.rng) for _ in range(cycles)]
        labels.append(classes)
        folds.append(np.stack(cuts))
    predictions: list[Weights] = [{} for _ in SIZES]
    for cycle in range(cycles):
        for fold in range(FOLDS):
            is_tested = [cuts[cycle] == fold for cuts in folds]
            sets = []
            for (x, y, person), tested in zip(data, is_tested, strict=True):
                sets.append((x[~tested], y[~tested], person[~tested]))
            for silo, models in enumerate(world.trained(sets)):
                tested = is_tested[silo]
                x = data[silo][0][tested]
                for label, weights in models.items():
                    empty = np.zeros((cycles, len(tested)))
                    predictions[silo].setdefault(label, empty)[cycle, tested] = x @ weights
    silos = []
    for number, (_, y, person) in enumerate(data):
        rows = {}
        for label, outputs in predictions[number].items():
            logits = np.stack([np.zeros_like(outputs), outputs], -1)
            rows[label] = Scores(world.scores(outputs, y), logits)
        samples = ScoredSamples(labels[number], folds[number], person)
        units = len(np.unique(person)) if world.kind == "units" else 0
        silos.append(
            Silo(
                number,
                f"{number}",
                samples,
                rows,
                size=len(y),
                units=units,
            )
        )
    return silos


def truth(world: World, draws: int) -> list[Counter[str]]:
    """Return mean scores by silo over fresh training sets, on fresh persons."""
    means: list[Counter[str]] = [Counter() for _ in SIZES]
    for _ in range(draws):
        sets = [world.draw(silo, max(4, size * 4 // 5)) for silo, size in enumerate(SIZES)]
        for silo, models in enumerate(world.trained(sets)):
            x, y, _ = world.draw(silo, TESTS, new_persons=True)
            for label, weights in models.items():
                means[silo][label] += world.score(x @ weights, y) / draws  # type: ignore[assignment]
    return means


def consortium(
    number: int,
    cycles: int,
    draws: int,
) -> dict[str, Any]:
    """Return one line of the file."""
    world = World(number)
    silos = measured(world, cycles)
    true_scores = truth(world, draws)
    answer = measure(silos, world.metric, None, cycles)
    picks = answer.picks
    rows = []
    for verdict in answer.answers:
        silo = verdict.silo
        scores = true_scores[silo.number]
        alone = max([*LOCAL, LINEAR], key=lambda label: scores[label])
        best = max(picks, key=lambda label: scores[label])
        federated = sum(scores[label] * count for label, count in picks.items())
        oracle = estimate(
            world.metric,
            silo.rows[alone],
            silo.rows[best],
            silo.samples,
        )
        if verdict.estimate is None or oracle is None:
            continue
        rows.append(
            {
                "size": silo.size,
                "true": federated / sum(picks.values()) - scores[alone],
                "margin": verdict.margin,
                "verdict": verdict.verdict,
                "reason": verdict.reason,
                "low": verdict.low,
                "high": verdict.high,
                "oracle": oracle.gain > stats.norm.ppf(0.975) * oracle.variance**0.5,
            }
        )
    return {"number": number, "kind": world.kind, "silos": rows}


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return a table by kind and by size of silos."""
    rows = DataFrame([row | {"kind": line["kind"]} for line in lines for row in line["silos"]])
    rows["covered"] = rows["true"].between(rows["low"], rows["high"])
    rows["half"] = (rows["high"] - rows["low"]) / 2 / rows["margin"]
    rows["margins"] = rows["true"] / rows["margin"]
    large = rows[rows["size"] >= 40]
    table_rows = []
    for name, group in [*large.groupby("kind", sort=False), *rows.groupby("size")]:
        some_gain = group[group["margins"].between(2, 5)]
        without_gain = group.loc[group["true"] <= 0, "verdict"]
        without_loss = group.loc[group["true"] >= 0, "verdict"]
        table_rows.append(
            {
                "silos": name,
                "number": len(group),
                "coverage, %": f"{100 * group['covered'].mean():.1f}",
                "half-width, margins": f"{group['half'].median():.1f}",
                "false `gains`": _share(without_gain == "gains"),
                "false `harmed`": _share(without_loss == "harmed"),
                "gains of 2 to 5 margins named": _share(some_gain["verdict"] == "gains"),
                "by an oracle": _share(some_gain["oracle"]),
            }
        )
    return markdown(table_rows)


def _share(events: Any) -> str:
    return f"{int(events.sum())} of {len(events)}"


def main(argv: list[str] | None = None) -> None:
    """Run consortia, or print the table of a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--cycles", type=int, default=2)
    parser.add_argument("--draws", type=int, default=30, help="fresh training sets of the truth")
    args = parser.parse_args(argv)
    text = args.file.read_text() if args.file.exists() else ""
    lines = [json.loads(line) for line in text.splitlines()]
    if args.command == "table":
        print(table(lines))
        return
    numbers = {line["number"] for line in lines}
    for number in range(args.count):
        if number not in numbers:
            line = consortium(number, args.cycles, args.draws)
            with args.file.open("a") as file:
                file.write(json.dumps(line, default=bool) + "\n")


if __name__ == "__main__":
    main()
