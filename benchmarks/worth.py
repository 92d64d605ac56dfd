"""Calibrates `fl-train worth`: consortia with a known truth, small models trained by SGD, and how
often it is right.

    python benchmarks/worth.py run results.jsonl --count 300        some 3 s a consortium on one core
    python benchmarks/worth.py promises promises.jsonl --first 10000 --count 300
    python benchmarks/worth.py table results.jsonl

Each consortium is a line of the file, by its number: a stopped run goes on, and several may be put
together. Every silo has a linear teacher of a shared and an own part, a shift of its features and
of its classes; one in seven has a teacher that shares nothing. Samples have 8, 24 or 96 features:
the more, and the more alike the teachers, the more a silo gains. Students are logistic models or
small MLPs, trained with mini-batches. A consortium is trained as `fl-train worth` does: alone,
FedAvg judged after local training, and FedAvg with few or many further steps, on repeated
stratified five-fold; in every second consortium the three are instead training alone with other
seeds, so that no silo gains. The truth is the mean gain over fresh training sets of the silos'
sizes, which are drawn, trained and tested on fresh samples `--draws` times. Promises are kept or
not: of every consortium twice as many cycles are run as are judged, and one silo that "cannot tell
yet" is given as many fresh samples as its sentence asks for; `promises` runs consortia for this
alone. All trainings of a consortium are one batch of models.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pandas import DataFrame, Series
from scipy import stats
from torch import Tensor

from fl_lightning.data.sampling import in_turn
from fl_lightning.lab.worth.measure import measure
from fl_lightning.lab.worth.silos import Answer, Silo
from fl_lightning.lab.worth.statistics import Samples, Scores, verdict
from fl_lightning.lab.worth.words import narrower

SIZES = (20, 60, 60, 200, 200, 200, 1000, 2000)
WORLDS = ((8, 1.2), (24, 0.7), (96, 0.3))
"""Features of a sample, and the most that a teacher's own part may weigh, the shared part being
1."""
FOLDS, BATCH, ROUNDS, STEPS, RATE, HIDDEN = 5, 16, 8, 10, 0.3, 6
MOST = 20_000
"""Samples of a silo, above which a promise is not tried."""
TESTS, AT_ONCE = 2_500, 25
"""Fresh test samples of a silo for each fresh training set, and training sets that are one batch of
models."""
METHODS = ("after", "short", "long")
MARGIN = 0.02


class World:
    """The silos of one consortium: teachers, shifts of features and of classes."""

    def __init__(self, number: int) -> None:
        self.rng, (self.features, most) = (
            np.random.default_rng([31, number]),
            WORLDS[number // 4 % len(WORLDS)],
        )
        own = self.rng.uniform(0, most)
        common = self.rng.normal(size=self.features)
        apart = self.rng.random(len(SIZES)) < 1 / 7
        self.teachers = [
            (1 - a) * common + (a or own) * self.rng.normal(size=self.features) for a in apart
        ]
        self.shifts = [self.rng.normal(0, self.rng.uniform(0, 0.6), self.features) for _ in SIZES]
        self.offsets = self.rng.normal(0, 0.7, len(SIZES))
        self.slope, self.mlp, self.null = self.rng.uniform(1, 3), number % 4 >= 2, number % 2 == 1

    def draw(self, silo: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Samples (size, features) and their classes 0 or 1."""
        x = self.rng.standard_normal((size, self.features), dtype=np.float32)
        logit = self.slope * x @ self.teachers[silo] / math.sqrt(self.features) + self.offsets[silo]
        y = self.rng.random(size) < 1 / (1 + np.exp(-logit))
        return x + self.shifts[silo].astype(np.float32), y.astype(np.float32)


def train(
    x: Tensor, y: Tensor, sizes: Tensor, world: World, seed: int, federated: bool
) -> dict[str, list[Tensor]]:
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
    first = [
        torch.randn(fits, 1, x.shape[-1], width, generator=noise) * 0.4,
        torch.zeros(fits, 1, 1, width),
    ]
    first += [torch.randn(fits, 1, width, 1, generator=noise) * 0.4] if world.mlp else []
    start = [p.expand(fits, silos, *p.shape[2:]).clone() for p in first]

    def steps(model: list[Tensor], count: int) -> list[Tensor]:
        for _ in range(count):
            at = (torch.rand(fits, silos, BATCH, generator=noise) * sizes[..., None]).long()
            bx = torch.take_along_dim(x, at[..., None], 2)
            by = torch.take_along_dim(y, at, 2)
            model = [p.detach().requires_grad_() for p in model]
            loss = (
                torch.nn.functional.binary_cross_entropy_with_logits(
                    logits(model, bx), by, reduction="sum"
                )
                / BATCH
            )
            model = [
                p - RATE * g for p, g in zip(model, torch.autograd.grad(loss, model), strict=True)
            ]
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


def right(model: list[Tensor], silo: int, x: Tensor, y: np.ndarray) -> np.ndarray:
    """Whether the silo's model of each fit is right, (fits, n), for samples (fits, 1, n, features)
    of classes y."""
    hits: np.ndarray = (logits([p[:, silo : silo + 1] for p in model], x)[:, 0] > 0).numpy() == y
    return hits


def trained(
    xs: list[list[np.ndarray]], ys: list[list[np.ndarray]], world: World, seed: int
) -> dict[str, list[Tensor]]:
    """The models of all fits and silos: alone, and by three methods, or by training alone with
    other seeds."""
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
        models |= {
            m: train(x, y, sizes, world, seed + 1 + k, False)["local"]
            for k, m in enumerate(METHODS)
        }
    return models


def measured(world: World, seed: int, cycles: int, sizes: Sequence[int] = SIZES) -> list[Silo]:
    """The silos as `fl-train worth` sees them: drawn, cut, trained and tested, cycle by cycle."""
    data = [world.draw(c, size) for c, size in enumerate(sizes)]
    folds = [
        np.stack(
            [in_turn(y.astype(int), FOLDS, world.rng, drawn_first=True) for _ in range(cycles)]
        )
        for _, y in data
    ]
    places = [(cycle, fold) for cycle in range(cycles) for fold in range(FOLDS)]
    xs, ys = (
        [[own[k][of[c] != f] for own, of in zip(data, folds, strict=True)] for c, f in places]
        for k in (0, 1)
    )
    models = trained(xs, ys, world, seed)
    silos = []
    for c, (x, y) in enumerate(data):
        rows = {}
        for label, model in models.items():
            hit = right(model, c, torch.from_numpy(x).expand(len(places), 1, *x.shape), y)
            scored = np.zeros((cycles, len(y)))
            for place, (cycle, fold) in enumerate(places):
                tested = folds[c][cycle] == fold
                scored[cycle, tested] = hit[place, tested]
            rows[label] = Scores(scored)
        silos.append(
            Silo(c, f"{c}", Samples(y.astype(int), folds[c], np.arange(len(y))), rows, size=len(y))
        )
    return silos


def first(silo: Silo, cycles: int) -> Silo:
    """The silo after so many of its cycles."""
    samples = Samples(silo.samples.labels, silo.samples.folds[:cycles], silo.samples.units)
    rows = {label: Scores(row.right[:cycles]) for label, row in silo.rows.items()}
    return Silo(silo.number, silo.name, samples, rows, size=silo.size)


def truth(world: World, seed: int, draws: int) -> dict[str, list[float]]:
    """Mean gain of each method over training alone, by silo, over fresh training sets."""
    gains: dict[str, list[float]] = {label: [0.0] * len(SIZES) for label in METHODS}
    for part in range(0, 0 if world.null else draws, AT_ONCE):
        many = min(AT_ONCE, draws - part)
        sets = [[world.draw(c, size) for c, size in enumerate(SIZES)] for _ in range(many)]
        xs, ys = ([[own[k] for own in one] for one in sets] for k in (0, 1))
        models = trained(xs, ys, world, seed + part // AT_ONCE)
        for c in range(len(SIZES)):
            x, y = world.draw(c, many * TESTS)
            tests, labels = torch.from_numpy(x).view(many, 1, TESTS, -1), y.reshape(many, TESTS)
            share = {
                label: float(right(model, c, tests, labels).mean())
                for label, model in models.items()
            }
            for label in METHODS:
                gains[label][c] += (share[label] - share["local"]) * many / draws
    return gains


def with_more(
    world: World, seed: int, cycles: int, answers: Sequence[Answer]
) -> dict[str, Any] | None:
    """What becomes of a silo that cannot tell yet with as many fresh samples as its sentence asks
    for; None without such a silo, or where its sentence asks for more than `MOST`, or says that
    samples alone do not help."""
    unsure = [
        one
        for one in answers
        if one.verdict == "cannot tell yet" and not one.reason and one.estimate
    ]
    if not unsure:
        return None
    one = unsure[int(world.rng.integers(len(unsure)))]
    assert one.estimate is not None
    target = narrower(one.estimate.half)
    needed = one.estimate.samples_for(one.silo.size, target)
    line = {
        "size": one.silo.size,
        "half": one.estimate.half,
        "wanted": target,
        "needed": needed,
        "reached": None,
    }
    if needed is None or needed > MOST:
        return line
    sizes = [needed if c == one.silo.number else size for c, size in enumerate(SIZES)]
    after = (
        measure(measured(world, seed, cycles, sizes), "accuracy", MARGIN)
        .answers[one.silo.number]
        .estimate
    )
    assert after is not None
    return line | {"reached": after.half}


def nadeau_bengio(silo: Silo, method: str) -> tuple[float, float]:
    """Their interval over repetitions, on the same fits, of a method that is fixed."""
    difference, folds = silo.rows[method].right - silo.rows["local"].right, silo.samples.folds
    means = np.array(
        [
            row[of == f].mean()
            for row, of in zip(difference, folds, strict=True)
            for f in range(FOLDS)
        ]
    )
    error = math.sqrt((1 / len(means) + 1 / (FOLDS - 1)) * means.var(ddof=1))
    half = float(stats.t.ppf(0.975, len(means) - 1)) * error
    return float(means.mean()) - half, float(means.mean()) + half


def consortium(number: int, cycles: int, draws: int) -> dict[str, Any]:
    """One line of the file."""
    world = World(number)
    longer = measured(world, 1000 * number, 2 * cycles)
    true = truth(world, 1000 * number + 500, draws)
    answer = measure([first(silo, cycles) for silo in longer], "accuracy", MARGIN)
    twice = measure(longer, "accuracy", MARGIN)
    rows = []
    for one, later in zip(answer.answers, twice.answers, strict=True):
        picked = sum(true[m][one.silo.number] * count for m, count in answer.picks.items()) / sum(
            answer.picks.values()
        )
        low, high = nadeau_bengio(one.silo, answer.method)
        row = {
            "size": one.silo.size,
            "true": picked,
            "verdict": one.verdict,
            "reason": bool(one.reason),
        }
        assert one.estimate is not None and later.estimate is not None
        row |= {
            "gain": one.estimate.gain,
            "half": one.estimate.half,
            "low": one.low,
            "high": one.high,
        }
        row |= {"half_twice": later.estimate.half, "foretold": one.estimate.half_after(2 * cycles)}
        rows.append(
            row | {"theirs": [low, high], "true_fixed": true[answer.method][one.silo.number]}
        )
    line = {
        "number": number,
        "features": world.features,
        "null": world.null,
        "mlp": world.mlp,
        "cycles": cycles,
    }
    more = with_more(world, 1000 * number + 700, cycles, answer.answers)
    return line | {
        "silos": rows,
        "sure": len(answer.consortium.get("surely_gain", [])),
        "more": more,
    }


def promise(number: int, cycles: int) -> dict[str, Any]:
    """The same with nothing but `more`."""
    world = World(number)
    answers = measure(measured(world, 1000 * number, cycles), "accuracy", MARGIN).answers
    more = with_more(world, 1000 * number + 700, cycles, answers)
    return {"number": number, "null": world.null, "silos": [], "sure": 0, "more": more}


def table(lines: Sequence[dict[str, Any]]) -> str:
    """The table of goals, by size."""
    rows = DataFrame([row | {"null": line["null"]} for line in lines for row in line["silos"]])
    text = [f"{len(lines)} consortia, {sum(line['null'] for line in lines)} without any gain", ""]
    head = (
        "| samples | silos | coverage | half-width | no gain, `gains` | wrong sign | named of 5 to "
        "10 points: ours, "
    )
    text += [head + "Nadeau and Bengio |", "| --- " * 7 + "|"]
    for size, own in rows.groupby("size") if len(rows) else ():  # of promises alone there are none
        cover, named = (
            own["true"].between(own["low"], own["high"]).mean(),
            own["verdict"] == "gains",
        )
        apart = own[own["true"].abs() > 0.01]
        wrong = apart["verdict"] == np.where(apart["true"] > 0, "harmed", "gains")
        real = own["true"].between(0.05, 0.1)
        theirs = [
            verdict(*r["theirs"], MARGIN) == "gains" and not r["reason"]
            for _, r in own[real].iterrows()
        ]
        shares = (
            f"{_share(named[own['null']])} | {_share(wrong)} | {_share(named[real])}, "
            f"{_share(theirs)}"
        )
        text.append(
            f"| {size} | {len(own)} | {100 * cover:.1f} | {100 * own['half'].median():.1f} | "
            f"{shares} |"
        )
    sure = [line["sure"] > 0 for line in lines if line["null"]]
    text += ["", f"consortia without any gain where a silo surely gains (Holm): {_share(sure)}"]
    return "\n".join([*text, *_promises(lines)])


def _promises(lines: Sequence[dict[str, Any]]) -> list[str]:
    """How many promises were kept, of more own samples by size and of twice as many cycles."""
    promised = [line["more"] for line in lines if line.get("more")]
    tried = [one for one in promised if one["reached"] is not None]
    without = [one["needed"] is None for one in promised]
    text = [
        f"half-width promised for more own samples kept: "
        f"{_share([o['reached'] <= o['wanted'] for o in tried])}"
    ]
    for size in sorted({one["size"] for one in tried}):
        own = [one["reached"] <= one["wanted"] for one in tried if one["size"] == size]
        text.append(f"of silos of {size}: {_share(own)}")
    text.append(
        f"samples alone would not do, it said: {_share(without)}; more than {MOST}, not tried: "
    )
    text[-1] += f"{sum(one['reached'] is None and one['needed'] is not None for one in promised)}"
    rows = [row for line in lines for row in line["silos"] if row["foretold"]]
    if rows:
        ends = np.percentile([row["half_twice"] / row["foretold"] for row in rows], [10, 50, 90])
        text.append(
            "half-width after twice the cycles / foretold, 10, 50, 90 %: "
            + ", ".join(f"{x:.2f}" for x in ends)
        )
    return text


def _share(events: Sequence[bool] | Series) -> str:
    return f"{100 * np.mean(events):.1f} % of {len(events)}" if len(events) else "-"


def main(argv: list[str] | None = None) -> None:
    """Run consortia, or print the table of a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["run", "promises", "table"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=300, help="consortia: numbers from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cycles", type=int, default=4)
    parser.add_argument("--draws", type=int, default=100, help="fresh training sets of the truth")
    given = parser.parse_args(argv)
    lines = (
        [json.loads(line) for line in given.file.read_text().splitlines()]
        if given.file.exists()
        else []
    )
    if given.what == "table":
        print(table(lines))
        return
    torch.set_num_threads(1)
    done = {line["number"] for line in lines}
    for number in range(given.first, given.first + given.count):
        if number not in done:
            promises = given.what == "promises"
            line = (
                promise(number, given.cycles)
                if promises
                else consortium(number, given.cycles, given.draws)
            )
            with given.file.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
