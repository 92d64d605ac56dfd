"""What is trained and measured beyond the gain: a new silo, a federation without one of its silos,
silos with fewer samples, costs."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from fl_lightning.configuration.config import Config
from fl_lightning.foundation.log import in_bytes
from fl_lightning.lab.statistics import LEVEL, holm
from fl_lightning.lab.study.grid import label_folder as folder_of
from fl_lightning.lab.worth import ALONE, FOLDS, LENGTHS, LOCAL, statistics, words
from fl_lightning.lab.worth import row as row_name
from fl_lightning.lab.worth.measure import best_alone
from fl_lightning.lab.worth.page import Section
from fl_lightning.lab.worth.runs import Task
from fl_lightning.lab.worth.scores import read, silo_like
from fl_lightning.lab.worth.silos import Measured, SiloFacts
from fl_lightning.lab.worth.statistics import Array
from fl_lightning.results.result import RunResult

LABELLED = [0, 5, 20]
"""Labelled samples of each class that a new silo brings."""
SHARES = (0.1, 0.25, 0.5)
"""Shares of a silo's training samples; all samples have been measured already."""
BESIDE_ACCURACY = ("balanced_accuracy", "auroc")
"""Metrics of `--metric` that newcomers' runs are always scored by."""
SAME = 1e-6
"""Weights of a relation that lie no further apart are the same: they were kept as 32-bit
statistics."""
Points = Sequence[Mapping[str, float]]
"""Of each share `share`, `samples`, `gain`, `low` and `high`, ascending."""


@dataclass(frozen=True)
class Row:
    """A method with a length of training, as rows of the answer are named.

    Args:
        config: of its runs, for the longest length.
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

    @property
    def name(self) -> str:
        """The row's name in scores and tables, as "ditto x3"."""
        return row_name(self.label, self.length)

    @property
    def folder(self) -> str:
        """Name of the folder of its runs."""
        return folder_of(self.name)

    @property
    def rounds(self) -> int:
        """Rounds of one training."""
        return self.config.federation.rounds // LENGTHS[-1] * self.length

    def config_of(self, seed: int, **data: Any) -> Config:
        """The config of a run of its length, with other keys of `data`."""
        return replace(
            self.config,
            seed=seed,
            data=replace(self.config.data, **data),
            federation=replace(self.config.federation, rounds=self.rounds),
        )

    def task(
        self,
        place: Path,
        seed: int,
        lengths: Sequence[int] = (),
        plain: Sequence[str] = (),
        **data: Any,
    ) -> Task:
        """A training whose run and scores are kept in `place`."""
        run = place / "runs" / self.folder / f"seed-{seed}"
        lengths = lengths or [self.length]
        return Task(
            self.config_of(seed, **data), run, place, {self.label: self.kind}, lengths, plain
        )


def newcomer_tasks(
    out: Path,
    method: Row,
    alone: Row,
    silos: int,
) -> list[Task]:
    """Trainings that hold every silo out once, of the chosen method and of training alone, for as
    many rounds as the others' run."""
    places = (method, method.folder), (alone, folder_of(row_name("alone", alone.length)))
    tasks: list[Task] = []
    for row, place in places:
        for fold in range(FOLDS):
            held_out = list(range(fold, silos, FOLDS))
            if 0 < len(held_out) < silos:
                config = _newcomer_config(row.config_of(fold, held_out=held_out), row is alone)
                folder = out / "newcomers" / place / f"seed-{fold}"
                tasks.append(
                    Task(
                        config,
                        folder,
                        None,
                        {row.label: row.kind},
                    )
                )
    return tasks


def _newcomer_config(config: Config, alone: bool) -> Config:
    evaluation = replace(config.evaluation, newcomer_samples=LABELLED)
    if alone:
        evaluation = replace(evaluation, newcomer_rounds=config.federation.rounds)
    # whichever --metric a later call names, newcomers have been scored by it
    if config.data.task == "classification":
        metrics = dict.fromkeys([*(evaluation.metrics or ()), *BESIDE_ACCURACY])
        evaluation = replace(evaluation, metrics=list(metrics))
    return replace(config, evaluation=evaluation)


def leave_one_out_tasks(out: Path, method: Row, silos: int) -> list[Task]:
    """A cycle of the chosen method without each silo in turn; no training with two silos."""
    return [
        method.task(out / "without" / f"silo-{silo}", fold, held_out=[silo])
        for silo in range(silos if silos > 2 else 0)
        for fold in range(FOLDS)
    ]


def curve_tasks(
    out: Path,
    method: Row,
    alone: Row,
    plain: Sequence[str],
) -> list[Task]:
    """A cycle of training alone and of the chosen method with a share of each silo's training
    samples."""
    tasks: list[Task] = []
    for share, fold in itertools.product(SHARES, range(FOLDS)):
        place = out / "curve" / f"share-{share:g}"
        part = share * method.config.data.train_share
        tasks.append(
            alone.task(
                place,
                fold,
                LENGTHS,
                plain,
                train_share=part,
            )
        )
        tasks.append(method.task(place, fold, train_share=part))
    return tasks


# ---------------------------------------------------------------- newcomers


def newcomer_section(
    tasks: Sequence[Task], measured: Measured
) -> tuple[list[dict[str, Any]], Section]:
    """Mean score of a new silo by its labelled samples, with the others' model and alone: for
    `worth.json`, and as a table."""
    metric = measured.metric
    scores: dict[tuple[str, int], list[float]] = defaultdict(list)
    rows: list[Mapping[str, Any]] = []
    for task in tasks:
        model = "alone" if task.folder.parent.name.startswith("alone") else "federated"
        for row in RunResult(task.folder).rows("newcomers"):
            rows.append(row)
            if metric in row:
                scores[model, int(row["samples_per_class"])].append(float(row[metric]))
    samples = "labelled samples" if metric == "mae" else "labelled samples of each class"
    text = (
        f"Every silo was left out once, and came when all was over, with so many {samples}: score "
        f"of the model that {measured.method} gives it, trained on these with "
        f"{100 * _share_of_passes(tasks):.0f} % of the passes that a whole training makes over a "
        "silo's samples, and of one that it trains on these alone, with all of them; mean over "
        f"silos ({words.METRICS[metric]}). {_undefined(rows, metric)}"
    )
    section = Section(
        "A silo that joins later", text.strip(), [samples, "with the others", "alone"]
    )
    means_by_count: list[dict[str, Any]] = []
    for count in LABELLED:
        means: dict[str, Any] = {"labelled": count}
        cells = [str(count)]
        for model in ("federated", "alone"):
            values = scores[model, count]
            means[model] = float(np.mean(values)) if values else None
            cells.append(words.score(means[model], metric) if values else "-")
        means_by_count.append(means)
        section.rows.append(cells)
    return means_by_count, section


def _share_of_passes(tasks: Sequence[Task]) -> float:
    """Rounds of a newcomer with the others' model, as a share of a training's; 0 without tasks."""
    shares = [
        task.config.evaluation.newcomer_rounds / task.config.federation.rounds for task in tasks
    ]
    return min(shares, default=0.0)


def _undefined(rows: Sequence[Mapping[str, Any]], metric: statistics.Name) -> str:
    """Says over how many silos a newcomers' mean is, where the metric is not defined for all of
    them; empty where it is."""
    silos = {row["client"] for row in rows}
    scored_silos = {row["client"] for row in rows if metric in row}
    if len(scored_silos) == len(silos):
        return ""
    if not scored_silos:
        return (
            f"Its runs were not scored by {metric}: delete the folder newcomers, and the same "
            "command trains them."
        )
    return f"It is defined for {len(scored_silos)} of {len(silos)} silos."


# ---------------------------------------------------------------- without one silo


def leave_one_out_section(
    out: Path, method: Row, measured: Measured, facts: SiloFacts
) -> tuple[dict[str, Any], Section]:
    """By how much the score of silo i falls without silo j, (silos, silos): for `worth.json`, and
    as a table."""
    names, metric = list(facts.names), measured.metric
    count = len(names)
    effect = np.full((count, count), math.nan)
    half = effect.copy()
    p_values: dict[tuple[int, int], float] = {}
    for j in range(count if count > 2 else 0):
        for i, answer in enumerate(measured.answers):
            missed = (
                _missed(
                    out,
                    i,
                    j,
                    method,
                    measured,
                    facts,
                )
                if i != j
                else None
            )
            if missed is not None:
                effect[i, j], half[i, j] = missed.gain, missed.half
                if not answer.reason:
                    p_values[i, j] = missed.p_of_no_gain
    adjusted = zip(p_values, holm(list(p_values.values())), strict=True)
    pairs = sorted(pair for pair, p in adjusted if p <= LEVEL)
    surely = [[names[i], names[j]] for i, j in pairs]
    content: dict[str, Any] = {
        "silos": names,
        "missed": effect.tolist(),
        "half": half.tolist(),
        "surely": surely,
    }
    listed = "; ".join(f"{silo} would miss {missed}" for silo, missed in surely)
    worse = "error of the silo of a row rises"
    if metric != "mae":
        worse = "score of the silo of a row falls"
    text = (
        f"How much the {worse} where the silo of a column does not take part "
        f"({measured.method}, one cycle; {words.METRICS[metric]}), with half of its 95 % interval. "
        f"A positive number: it would be missed. "
        f"All pairs considered together (Holm, 5 %): {listed or 'of no pair is it sure'}."
    )
    relation = _relation(out, count, folder_of(method.label))
    if relation is not None:
        rank = _rank_correlation(effect, relation)
        content |= {"relation": relation.tolist(), "rank_correlation": rank}
        if math.isfinite(rank):
            text += f" Rank correlation with the relation that the method has learned: {rank:.2f}."
    section = Section("Who would miss whom", text, ["", *names])
    for i, name in enumerate(names):
        cells = [_with_half(effect[i, j], half[i, j], metric) for j in range(count)]
        section.rows.append([name, *cells])
    return content, section


def _missed(
    out: Path, i: int, j: int, method: Row, measured: Measured, facts: SiloFacts
) -> statistics.Estimate | None:
    """What silo i gains by silo j, on the samples that no other silo has; None where that is not
    defined."""
    metric, like = measured.metric, measured.answers[i].silo
    if not len(like.samples):
        return None
    with_j = silo_like(
        out,
        like,
        [method.name],
        facts,
    )
    without_j = silo_like(
        out / "without" / f"silo-{j}",
        like,
        [method.name],
        facts,
    )
    there, away = (silo.rows[method.name] for silo in (with_j, without_j))
    return statistics.estimate(
        metric,
        away,
        there,
        with_j.samples,
    )


def _relation(out: Path, count: int, folder: str) -> Array | None:
    """Last relation, mean over layers and the first cycle's runs; None if no run has kept one, or
    if all silos' rows are equal."""
    relations = []
    for place in sorted((out / "runs" / folder).glob("seed-[0-4]")):  # the FOLDS seeds of a cycle
        run = RunResult(place)
        if run.relation_rounds and len(cube := run.cube()) == count:
            relations.append(np.nanmean(cube, axis=1))
    if not relations:
        return None
    mean: Array = np.mean(relations, axis=0)
    return mean if np.ptp(mean, axis=0).max() > SAME else None


def _rank_correlation(effect: Array, relation: Array) -> float:
    """Spearman's, over pairs of two silos whose effect is known; NaN of fewer than four."""
    pairs = ~np.eye(len(effect), dtype=bool) & np.isfinite(effect)
    if pairs.sum() < 4:
        return math.nan
    return float(stats.spearmanr(effect[pairs], relation[pairs]).statistic)


def _with_half(effect: float, half: float, metric: statistics.Name) -> str:
    if not math.isfinite(effect):
        return "-"
    return f"{words.signed(effect, metric)} ± {words.amount(half, metric)}"


# ---------------------------------------------------------------- fewer samples


def curve_section(
    out: Path, measured: Measured, facts: SiloFacts
) -> tuple[dict[str, Any], Section]:
    """Mean gain over silos by the share of their training samples, and the size at which it ends:
    for `worth.json`, and as a table."""
    metric = measured.metric
    shares = (
        _point(
            out,
            share,
            measured,
            facts,
        )
        for share in (*SHARES, 1.0)
    )
    points = [point for point in shares if point is not None]
    ends = {key: _crossing(points, key) for key in ("gain", "low", "high")}
    content = {
        "points": points,
        "pays_up_to": ends["gain"],
        "pays_up_to_low": ends["low"],
        "pays_up_to_high": ends["high"],
    }
    section = Section(
        "With fewer samples",
        "Mean gain over the best alone where each silo trains on a share of its samples "
        f"({measured.method}, one cycle). {_until(ends, points)}",
        ["share", "training samples of a silo", "mean gain", "95 % interval"],
    )
    for point in points:
        gain, low, high = (words.signed(point[key], metric) for key in ("gain", "low", "high"))
        share = f"{100 * point['share']:.0f} %"
        section.rows.append([share, f"{point['samples']:.0f}", gain, f"{low} to {high}"])
    return content, section


def _point(
    out: Path,
    share: float,
    measured: Measured,
    facts: SiloFacts,
) -> dict[str, float] | None:
    """The mean gain of silos with this share of their samples; None where it is not defined."""
    metric = measured.metric
    rows = measured.answers[0].silo.rows
    labels = [label for label in rows if label in ALONE or label == measured.method]
    place, folder = out, folder_of(LOCAL[0])
    if share < 1:
        place, folder = out / "curve" / f"share-{share:g}", folder_of(LOCAL[-1])
    silos = [
        silo
        for silo in read(
            place,
            labels,
            1,
            facts,
        )
        if not words.why_not(silo, metric)
    ]
    if not silos:
        return None
    estimates = []
    for silo, (alone, _) in zip(silos, best_alone(silos, metric), strict=True):
        estimate = statistics.estimate(
            metric,
            alone,
            silo.rows[measured.method],
            silo.samples,
        )
        estimates += [estimate] if estimate is not None else []
    if not estimates:
        return None
    clients = RunResult(place / "runs" / folder / "seed-0").clients
    sizes = clients.groupby("client")["train_samples"].first()
    size = float(sizes[[silo.number for silo in silos]].mean())
    gain, low, high = statistics.mean_gain(estimates)
    return {
        "share": share,
        "samples": size,
        "gain": gain,
        "low": low,
        "high": high,
    }


def _crossing(points: Points, key: str) -> float | None:
    """Samples from which on `key` is 0 or below, on lines through the points over the logarithm of
    samples; None: nowhere, or at all sizes."""
    for fewer, more in reversed(list(itertools.pairwise(points))):
        if more[key] > 0:
            return None
        if fewer[key] > 0:
            part = fewer[key] / (fewer[key] - more[key])
            small, large = math.log(fewer["samples"]), math.log(more["samples"])
            return math.exp(small * (1 - part) + large * part)
    return None


def _until(ends: Mapping[str, float | None], points: Points) -> str:
    """Says up to how many samples federating pays."""
    pays = [point["gain"] > 0 for point in points]
    if pays != sorted(pays, reverse=True):
        shares = [f"{100 * point['share']:.0f} %" for point in points]
        at = ", ".join(itertools.compress(shares, pays))
        not_at = ", ".join(share for share in shares if share not in at.split(", "))
        return f"By the means it pays at {at} of the samples, and not at {not_at}."
    gain, low, high = ends["gain"], ends["low"], ends["high"]
    if gain is None:
        return f"It {'pays at all' if any(pays) else 'does not pay at any'} of these sizes."
    if low is None and high is None:
        return (
            f"By the means it pays up to about {gain:.0f} training samples of a silo; the "
            "intervals do not tell."
        )
    least = "fewer than measured" if low is None else f"{low:.0f}"
    most = "more than measured" if high is None else f"{high:.0f}"
    return f"It pays up to about {gain:.0f} training samples of a silo ({least} to {most})."


# ---------------------------------------------------------------- costs


def cost_section(out: Path, measured: Measured, method: Row) -> tuple[dict[str, Any], Section]:
    """Bytes and seconds that one training of the chosen method takes of each silo, by its first
    run: for `worth.json`, and as a table."""
    run = RunResult(out / method.first)
    rounds = method.rounds
    clients = run.clients[run.clients["round"] <= rounds]
    silos = [answer.silo for answer in measured.answers]
    sums = clients.groupby("client")[["upload_bytes", "download_bytes"]].sum()
    sums = sums.reindex([silo.number for silo in silos], fill_value=0).astype(float)
    # processes train their silos at once: the slowest one's time counts
    at_once = run.summary.get("world_size") or 1
    part = rounds / max(run.rounds_done, 1)
    seconds = (run.total("seconds_client") or 0.0) * part * at_once
    seconds /= max(run.clients["client"].nunique(), 1)
    content = {"rounds": rounds, "seconds_a_silo": seconds} | sums.to_dict("list")
    text = (
        f"One training of {measured.method}: {rounds} rounds, {seconds:.2g} seconds of training "
        "for a silo on this machine, mean over silos. Bytes are those of all rounds."
    )
    section = Section("What it costs a silo", text, ["silo", "sent", "received"])
    for silo, (up, down) in zip(silos, sums.to_numpy(), strict=True):
        section.rows.append([silo.name, in_bytes(up), in_bytes(down)])
    return content, section
