"""What is asked beyond the gain: a new silo, a federation without one of its silos, silos with
fewer samples, costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from fl_lightning.configuration.config import Config
from fl_lightning.foundation.log import in_bytes
from fl_lightning.lab.statistics import LEVEL, holm
from fl_lightning.lab.study.grid import place as folder_of
from fl_lightning.lab.worth import ALONE, FOLDS, LENGTHS, LOCAL, words
from fl_lightning.lab.worth import row as row_name
from fl_lightning.lab.worth import statistics as numbers
from fl_lightning.lab.worth.measure import best_alone, contributions
from fl_lightning.lab.worth.page import Section
from fl_lightning.lab.worth.runs import Task
from fl_lightning.lab.worth.scores import one, read
from fl_lightning.lab.worth.silos import Facts, Measured
from fl_lightning.results.result import RunResult

LABELLED = [0, 5, 20]
"""Labelled samples of each class that a new silo brings."""
SHARES = (0.1, 0.25, 0.5)
"""Of a silo's training samples; the whole has been measured already."""
BESIDE_ACCURACY = ("balanced_accuracy", "auroc")
"""What `--metric` may name that `evaluation.metrics` must name, too."""
SAME = 1e-6
"""Weights of a relation that lie no further apart are the same: they were kept as 32-bit
numbers."""


@dataclass(frozen=True)
class Row:
    """What trains a row.

    Args:
        config: of its runs, for the configured rounds.
        kind: of model that is scored.
        label: of the method.
        length: how many times the configured rounds it takes.
        first: the folder of its first run.
    """

    config: Config
    kind: str | None
    label: str
    length: int = 1
    first: str = ""

    def run(self, seed: int, **data: Any) -> Config:
        """The config of a run for its length, with other keys of `data`."""
        federation = replace(
            self.config.federation, rounds=self.length * self.config.federation.rounds
        )
        changed = replace(self.config.data, **data)
        return replace(self.config, seed=seed, data=changed, federation=federation)

    @property
    def name(self) -> str:
        """Of the row, as scores have it."""
        return row_name(self.label, self.length)

    @property
    def folder(self) -> str:
        """Of its own runs."""
        return folder_of(self.name)


def newcomers(out: Path, method: Row, alone: Row, silos: int) -> list[Task]:
    """Every silo held out once, by the chosen method and by training alone, for as many rounds as
    the others' run."""
    tasks: list[Task] = []
    for row, place in (
        (method, method.folder),
        (alone, folder_of(row_name("alone", alone.length))),
    ):
        for fold in range(FOLDS):
            away = [c for c in range(silos) if c % FOLDS == fold]
            if away and len(away) < silos:
                config = row.run(fold, held_out=away)
                task = Task(
                    _of_newcomers(config, row is alone),
                    out / "newcomers" / place / f"seed-{fold}",
                    None,
                    {row.label: row.kind},
                )
                tasks.append(task)
    return tasks


def _of_newcomers(config: Config, alone: bool) -> Config:
    evaluation = replace(config.evaluation, newcomer_samples=LABELLED)
    if alone:
        evaluation = replace(evaluation, newcomer_rounds=config.federation.rounds)
    # whichever --metric a later call names, newcomers have been scored by it
    if config.data.task == "classification":
        metrics = dict.fromkeys([*(evaluation.metrics or ()), *BESIDE_ACCURACY])
        evaluation = replace(evaluation, metrics=[*metrics])
    return replace(config, evaluation=evaluation)


def without(out: Path, method: Row, silos: int) -> list[Task]:
    """A cycle of the chosen method without each silo in turn."""
    tasks: list[Task] = []
    for away in range(silos if silos > 2 else 0):
        place = out / "without" / f"silo-{away}"
        for fold in range(FOLDS):
            run = place / "runs" / method.folder / f"seed-{fold}"
            config = method.run(fold, held_out=[away])
            tasks.append(Task(config, run, place, {method.label: method.kind}, [method.length]))
    return tasks


def curve(out: Path, method: Row, alone: Row, plain: Sequence[str]) -> list[Task]:
    """A cycle of training alone and of the chosen method with a share of each silo's training
    samples."""
    tasks: list[Task] = []
    for share in SHARES:
        place = out / "curve" / f"share-{share:g}"
        for row, lengths, more in ((alone, LENGTHS, plain), (method, [method.length], ())):
            for fold in range(FOLDS):
                part = share * row.config.data.train_share
                run = place / "runs" / row.folder / f"seed-{fold}"
                config = row.run(fold, train_share=part)
                tasks.append(Task(config, run, place, {row.label: row.kind}, lengths, more))
    return tasks


# ---------------------------------------------------------------- read


def of_newcomers(tasks: Sequence[Task], measured: Measured) -> tuple[list[dict[str, Any]], Section]:
    """What a new silo gets by labelled samples, mean over silos: with the others' model, and
    alone."""
    metric = measured.metric
    scores: dict[tuple[str, int], list[float]] = {}
    rounds = [(t.config.evaluation.newcomer_rounds, t.config.federation.rounds) for t in tasks]
    part = min((own / whole for own, whole in rounds), default=0.0)
    trained = [
        ("alone" if task.folder.parent.name.startswith("alone") else "federated", row)
        for task in tasks
        for row in RunResult(task.folder).rows("newcomers")
    ]
    for label, row in trained:
        if metric in row:
            scores.setdefault((label, int(row["samples_per_class"])), []).append(float(row[metric]))
    samples = "labelled samples" if metric == "mae" else "labelled samples of each class"
    text = (
        f"Every silo was left out once, and came when all was over, with so many {samples}: score "
        f"of the model that {measured.method} gives it, trained on these with {100 * part:.0f} % "
        f"of the passes "
        "that a whole training makes over a silo's samples, and of one that it trains on these "
        "alone, with all of "
        f"them; mean over silos ({words.METRICS[metric]}). {_left_out(trained, metric)}"
    ).strip()
    section = Section("A silo that joins later", text, [samples, "with the others", "alone"])
    means_by_count: list[dict[str, Any]] = []
    for count in LABELLED:
        each = {key: scores.get((key, count)) for key in ("federated", "alone")}
        means = {key: float(np.mean(values)) if values else None for key, values in each.items()}
        means_by_count.append({"labelled": count} | means)
        cells = ["-" if mean is None else words.score(mean, metric) for mean in means.values()]
        section.rows.append([str(count), *cells])
    return means_by_count, section


def _left_out(trained: Sequence[tuple[str, Mapping[str, Any]]], metric: numbers.Name) -> str:
    """Says over how many silos a newcomers' mean is, where the metric is not defined for all of
    them."""
    silos = {row["client"] for _, row in trained}
    scored = {row["client"] for _, row in trained if metric in row}
    if trained and not scored:
        return (
            f"Its runs were not scored by {metric}: delete the folder newcomers, and the same "
            f"command trains them."
        )
    return (
        f"It is defined for {len(scored)} of {len(silos)} silos."
        if len(scored) < len(silos)
        else ""
    )


def of_without(
    out: Path, method: Row, measured: Measured, facts: Facts
) -> tuple[dict[str, Any], Section]:
    """What each silo loses where another is missing, (silos, silos): by how much the score of row i
    falls without j."""
    names, metric = list(facts.names), measured.metric
    count = len(names)
    effect, half = np.full((count, count), math.nan), np.full((count, count), math.nan)
    ps: dict[tuple[int, int], float] = {}
    for j in range(count if count > 2 else 0):
        for i in range(count):
            missed = _missed(out, i, j, method, measured, facts) if i != j else None
            if missed is not None:
                effect[i, j], half[i, j] = missed.gain, missed.half
                if not measured.answers[i].reason:
                    ps[i, j] = missed.p_of_no_gain
    sure = [pair for pair, p in zip(ps, holm(list(ps.values())), strict=True) if p <= LEVEL]
    content: dict[str, Any] = {"silos": names, "missed": effect.tolist(), "half": half.tolist()}
    content["surely"] = [[names[i], names[j]] for i, j in sorted(sure)]
    relation, rank = _relation(out, count, folder_of(method.label)), math.nan
    if relation is not None:
        off = ~np.eye(count, dtype=bool) & np.isfinite(effect)
        rank = (
            float(stats.spearmanr(effect[off], relation[off]).statistic)
            if off.sum() > 3
            else math.nan
        )
        content |= {"relation": relation.tolist(), "rank_correlation": rank}
    surely = (
        "; ".join(f"{one} would miss {other}" for one, other in content["surely"])
        or "of no pair is it sure"
    )
    worse = (
        "error of the silo of a row rises"
        if metric == "mae"
        else "score of the silo of a row falls"
    )
    text = (
        f"How much the {worse} where the silo of a column does not take part "
        f"({measured.method}, one cycle; {words.METRICS[metric]}), with half of its 95 % interval. "
        f"A positive number: it would be missed. "
        f"All pairs considered together (Holm, 5 %): {surely}."
    )
    if math.isfinite(rank):
        text += f" Rank correlation with the relation that the method has learned: {rank:.2f}."
    section = Section("Who would miss whom", text, ["", *names])
    for name, row, widths in zip(names, effect, half, strict=True):
        cells = [
            f"{words.signed(x, metric)} ± {words.amount(w, metric)}"
            for x, w in zip(row, widths, strict=True)
        ]
        section.rows.append(
            [name, *(c if math.isfinite(x) else "-" for c, x in zip(cells, row, strict=True))]
        )
    return content, section


def _missed(
    out: Path, i: int, j: int, method: Row, measured: Measured, facts: Facts
) -> numbers.Estimate | None:
    """What silo i has from silo j, on the samples that no other silo has; None where that is not
    defined."""
    metric, like = measured.metric, measured.answers[i].silo
    if not len(like.samples):
        return None
    places = out, out / "without" / f"silo-{j}"
    whole, part = (one(place, like, [method.name], facts) for place in places)
    there, away = (
        numbers.contributions(metric, silo.rows[method.name], silo.samples)
        for silo in (whole, part)
    )
    return numbers.estimate(metric, away, there, whole.samples)


def _relation(out: Path, count: int, folder: str) -> np.ndarray | None:
    """Mean over layers of the last relation of the first cycle's runs; None where all silos have
    one row."""
    kept = []
    for place in sorted((out / "runs" / folder).glob("seed-[0-4]")):
        run = RunResult(place)
        cube = run.cube() if run.relation_rounds else None
        if cube is not None and cube.shape[0] == count:
            kept.append(np.nanmean(cube, axis=1))
    mean = np.mean(kept, axis=0) if kept else np.zeros((count, count))
    return mean if np.ptp(mean, axis=0).max() > SAME else None


def of_curve(out: Path, measured: Measured, facts: Facts) -> tuple[dict[str, Any], Section]:
    """Mean gain over silos by the share of their training samples, with its interval, and where it
    ends."""
    metric, points = measured.metric, []
    rows = measured.answers[0].silo.rows
    labels = [label for label in rows if label in ALONE or label == measured.method]
    for share in (*SHARES, 1.0):
        place = out if share == 1 else out / "curve" / f"share-{share:g}"
        folder = folder_of(LOCAL[0] if share == 1 else LOCAL[-1])
        judged = [silo for silo in read(place, labels, 1, facts) if not words.why_not(silo, metric)]
        estimates = []
        both = zip(judged, best_alone(judged, metric) if judged else [], strict=True)
        for silo, (alone, _) in both:
            federated = contributions(silo, metric)[measured.method]
            estimates.append(numbers.estimate(metric, alone, federated, silo.samples))
        known = [one for one in estimates if one is not None]
        if known:
            clients = RunResult(place / "runs" / folder / "seed-0").clients
            sizes = clients.groupby("client")["train_samples"].first()
            size = float(sizes[[silo.number for silo in judged]].mean())
            gain, low, high = numbers.mean_gain(known)
            points.append({"share": share, "samples": size, "gain": gain, "low": low, "high": high})
    ends = {key: _crossing(points, key) for key in ("gain", "low", "high")}
    content = {"points": points, "pays_up_to": ends["gain"]}
    content |= {"pays_up_to_low": ends["low"], "pays_up_to_high": ends["high"]}
    section = Section(
        "With fewer samples",
        f"Mean gain over the best alone where each silo trains on a share of its samples "
        f"({measured.method}, one cycle). "
        f"{_until(ends, points)}",
        ["share", "training samples of a silo", "mean gain", "95 % interval"],
    )
    for p in points:
        cells = [words.signed(p[key], metric) for key in ("gain", "low", "high")]
        section.rows.append(
            [f"{100 * p['share']:.0f} %", f"{p['samples']:.0f}", cells[0], " to ".join(cells[1:])]
        )
    return content, section


def _crossing(points: Sequence[Mapping[str, float]], key: str) -> float | None:
    """Samples from which on it is 0 or below, on lines through the points over the logarithm of
    samples; None: nowhere, or at all sizes."""
    for left, right in reversed(list(itertools.pairwise(points))):
        if right[key] > 0:
            return None
        if left[key] > 0:
            part = left[key] / (left[key] - right[key])
            return math.exp(
                math.log(left["samples"]) * (1 - part) + math.log(right["samples"]) * part
            )
    return None


def _until(ends: Mapping[str, float | None], points: Sequence[Mapping[str, float]]) -> str:
    pays = [p["gain"] > 0 for p in points]
    if pays != sorted(pays, reverse=True):
        at, not_at = (
            ", ".join(f"{100 * p['share']:.0f} %" for p in points if (p["gain"] > 0) is it)
            for it in (True, False)
        )
        return f"By the means it pays at {at} of the samples, and not at {not_at}."
    if ends["gain"] is None:
        return (
            "It pays at all of these sizes."
            if any(pays)
            else "It does not pay at any of these sizes."
        )
    if ends["low"] is None and ends["high"] is None:
        size = f"{ends['gain']:.0f}"
        return (
            f"By the means it pays up to about {size} training samples of a silo; the intervals do "
            f"not tell."
        )
    low = f"{ends['low']:.0f}" if ends["low"] is not None else "fewer than measured"
    high = f"{ends['high']:.0f}" if ends["high"] is not None else "more than measured"
    return f"It pays up to about {ends['gain']:.0f} training samples of a silo ({low} to {high})."


def costs(out: Path, measured: Measured, method: Row) -> tuple[dict[str, Any], Section]:
    """What the method to take asks of each silo in one training: bytes and seconds, from its first
    run."""
    run = RunResult(out / method.first)
    rounds = method.length * method.config.federation.rounds
    part = rounds / max(run.rounds_done, 1)
    clients = run.clients[run.clients["round"] <= rounds]
    numbers_of = [answer.silo.number for answer in measured.answers]
    sums = clients.groupby("client")[["upload_bytes", "download_bytes"]].sum()
    sums = sums.reindex(numbers_of, fill_value=0).astype(float)
    # processes train their silos at once: the slowest one's time counts
    at_once = run.summary.get("world_size") or 1
    seconds = (
        (run.total("seconds_client") or 0.0)
        * part
        * at_once
        / max(run.clients["client"].nunique(), 1)
    )
    content = {"rounds": rounds, "seconds_a_silo": seconds} | sums.to_dict("list")
    text = (
        f"One training of {measured.method}: {rounds} rounds, {seconds:.2g} seconds of "
        f"training for a silo on "
        "this machine, mean over silos. Bytes are those of all rounds."
    )
    section = Section("What it costs a silo", text, ["silo", "sent", "received"])
    for answer, (up, down) in zip(measured.answers, sums.to_numpy(), strict=True):
        section.rows.append([answer.silo.name, in_bytes(up), in_bytes(down)])
    return content, section
