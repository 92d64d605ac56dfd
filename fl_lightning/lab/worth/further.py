"""The candidates that `worth` compares (`Row`), and its results besides the gain: silos that join
later, absence of single silos, fewer training samples, costs."""

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
from fl_lightning.lab.worth import ALONE, FOLDS, LENGTHS, LOCAL, row_name, statistics, words
from fl_lightning.lab.worth.measure import best_alone
from fl_lightning.lab.worth.page import Section
from fl_lightning.lab.worth.runs import Task
from fl_lightning.lab.worth.scores import read, read_same_samples
from fl_lightning.lab.worth.silos import Measured, SiloFacts
from fl_lightning.lab.worth.statistics import Array
from fl_lightning.results.result import RunResult

LABELLED = [0, 5, 20]
"""Numbers of labelled samples that a newcomer trains with: of each class, or of a regression in
all."""
SHARES = (0.1, 0.25, 0.5)
"""Shares of each silo's training samples in the learning curve; its end, all samples, comes from
the main runs."""
BESIDE_ACCURACY = ("balanced_accuracy", "auroc")
"""Metrics by which newcomers are always scored, so that a later call may name them."""
SAME = 1e-6
"""Greatest difference between weights of a relation that count as equal: they were stored with 32
bits."""
Points = Sequence[Mapping[str, float]]
"""Points of the learning curve by ascending `share`, with `samples`, `gain`, `low` and `high`."""


@dataclass(frozen=True)
class Row:
    """A method trained for one length: a candidate that the tables compare.

    One run serves the rows of all lengths of a method: its models are scored each time that a
    length ends.

    Args:
        config: config of that run, with the rounds of the longest length.
        kind: kind of model that is scored, such as "finetuned"; None: the kind that judges the run.
        label: name of the method and its arguments.
        length: training length, in multiples of the configured rounds.
        first: folder of the run with seed 0, relative to the folder of all results.
    """

    config: Config
    kind: str | None
    label: str
    length: int = 1
    first: str = ""

    @property
    def name(self) -> str:
        """Name in scores and tables, such as "ditto x3"."""
        return row_name(self.label, self.length)

    @property
    def folder_name(self) -> str:
        """Name of the folder of runs that train only this row: the row's `name` with commas in
        place of spaces."""
        return folder_of(self.name)

    @property
    def rounds(self) -> int:
        """Number of rounds of a run that ends with this row's length."""
        return self.config.federation.rounds // LENGTHS[-1] * self.length

    def config_of(self, seed: int, **data: Any) -> Config:
        """Config of a run that trains only this row: it ends with the row's length.

        Args:
            seed: the run's seed.
            data: keys of `config.data` with other values.
        """
        return replace(
            self.config,
            seed=seed,
            data=replace(self.config.data, **data),
            federation=replace(self.config.federation, rounds=self.rounds),
        )

    def task(
        self,
        out: Path,
        seed: int,
        lengths: Sequence[int] = (),
        plain: Sequence[str] = (),
        **data: Any,
    ) -> Task:
        """Make the task that trains and scores this row.

        Args:
            out: folder below which its run and scores are stored.
            seed: seed of the run; fold f of cycle c has seed c * `FOLDS` + f.
            lengths: training lengths after which models are scored; empty: the row's length.
            plain: names of plain models that are fitted to the same samples.
            data: keys of `config.data` with other values.
        """
        run = out / "runs" / self.folder_name / f"seed-{seed}"
        return Task(
            self.config_of(seed, **data),
            run,
            out,
            {self.label: self.kind},
            lengths or [self.length],
            plain,
        )


def newcomer_tasks(
    out: Path,
    method: Row,
    alone: Row,
    silos: int,
) -> list[Task]:
    """List the tasks that hold each silo out once, as a newcomer.

    Args:
        out: folder of all results.
        method: row of the chosen method.
        alone: for comparison, the row of the same length that trains each silo alone; its newcomers
            train alone, too.
        silos: number of silos.
    """
    tasks: list[Task] = []
    for row, label in ((method, method.label), (alone, "alone")):
        for fold in range(FOLDS):
            held_out = list(range(fold, silos, FOLDS))
            if 0 < len(held_out) < silos:
                config = _newcomer_config(row.config_of(fold, held_out=held_out), row is alone)
                name = folder_of(row_name(label, row.length))
                folder = out / "newcomers" / name / f"seed-{fold}"
                tasks.append(Task(config, folder, None, {row.label: row.kind}))
    return tasks


def _newcomer_config(config: Config, alone: bool) -> Config:
    evaluation = replace(config.evaluation, newcomer_samples=LABELLED)
    if alone:
        evaluation = replace(evaluation, newcomer_rounds=config.federation.rounds)
    if config.data.task == "classification":
        metrics = dict.fromkeys([*(evaluation.metrics or ()), *BESIDE_ACCURACY])
        evaluation = replace(evaluation, metrics=list(metrics))
    return replace(config, evaluation=evaluation)


def leave_one_out_tasks(out: Path, method: Row, silos: int) -> list[Task]:
    """List the tasks that train the chosen method without each silo in turn, for one cycle; empty
    if there are only two silos."""
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
    """List the tasks that train with each of `SHARES` of the training samples, for one cycle.

    Args:
        out: folder of all results.
        method: row of the chosen method.
        alone: row of the longest length whose silos train without others.
        plain: names of plain models that are fitted to the same samples.
    """
    tasks: list[Task] = []
    for share, fold in itertools.product(SHARES, range(FOLDS)):
        folder = out / "curve" / f"share-{share:g}"
        train_share = share * method.config.data.train_share
        tasks.append(
            alone.task(
                folder,
                fold,
                LENGTHS,
                plain,
                train_share=train_share,
            )
        )
        tasks.append(method.task(folder, fold, train_share=train_share))
    return tasks


# ---------------------------------------------------------------- newcomers


def newcomer_section(
    tasks: Sequence[Task], measured: Measured
) -> tuple[list[dict[str, Any]], Section]:
    """Tabulate newcomers' mean scores by their number of labelled samples: of the model that the
    federation gives them, and of one that they train alone.

    Returns:
        A list for `worth.json`, and a table for the page.
    """
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
        f"silos ({words.METRICS[metric]}). {_coverage(rows, metric)}"
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
    """Divide the newcomers' training rounds by those of the federation before them; 0 without
    tasks."""
    shares = [
        task.config.evaluation.newcomer_rounds / task.config.federation.rounds for task in tasks
    ]
    return min(shares, default=0.0)


def _coverage(rows: Sequence[Mapping[str, Any]], metric: statistics.Name) -> str:
    """Say for how many newcomers the metric is defined; empty if for all of them."""
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
    """Tabulate how much each silo's score falls where another silo is absent.

    Returns:
        A dict for `worth.json`, and a table for the page. The dict's `missed` is a matrix: row i,
            column j is by how much silo i's score falls without silo j.
    """
    names, metric = list(facts.names), measured.metric
    count = len(names)
    effect = np.full((count, count), math.nan)
    half = effect.copy()
    p_values: dict[tuple[int, int], float] = {}
    for j in range(count if count > 2 else 0):
        for i, answer in enumerate(measured.answers):
            if i == j:
                continue
            missed = _gain_by_presence(
                out,
                i,
                j,
                method,
                measured,
                facts,
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
    pairs_in_words = "; ".join(f"{silo} would miss {missed}" for silo, missed in surely)
    worse = "error of the silo of a row rises"
    if metric != "mae":
        worse = "score of the silo of a row falls"
    text = (
        f"How much the {worse} where the silo of a column does not take part "
        f"({measured.method}, one cycle; {words.METRICS[metric]}), with half of its 95 % interval. "
        f"A positive number: it would be missed. "
        f"All pairs considered together (Holm, 5 %): {pairs_in_words or 'of no pair is it sure'}."
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


def _gain_by_presence(
    out: Path, i: int, j: int, method: Row, measured: Measured, facts: SiloFacts
) -> statistics.Estimate | None:
    """Estimate how much silo i gains where silo j takes part, on samples that only silo i has; None
    if the metric is undefined."""
    silo, name = measured.answers[i].silo, method.name
    if not len(silo.samples):
        return None
    with_j = read_same_samples(
        out,
        silo,
        [name],
        facts,
    )
    without_j = read_same_samples(
        out / "without" / f"silo-{j}",
        silo,
        [name],
        facts,
    )
    return statistics.estimate(
        measured.metric,
        without_j.rows[name],
        with_j.rows[name],
        with_j.samples,
    )


def _relation(out: Path, count: int, folder: str) -> Array | None:
    """Last relation, (silos, silos): the mean over layers and the first cycle's runs. None if no
    run has stored a relation, or if all rows are equal."""
    relations = []
    for run_folder in sorted((out / "runs" / folder).glob("seed-[0-4]")):  # the first cycle
        run = RunResult(run_folder)
        if run.relation_rounds and len(cube := run.cube()) == count:
            relations.append(np.nanmean(cube, axis=1))
    if not relations:
        return None
    mean: Array = np.mean(relations, axis=0)
    return mean if np.ptp(mean, axis=0).max() > SAME else None


def _rank_correlation(effect: Array, relation: Array) -> float:
    """Spearman's coefficient over pairs of different silos with a finite effect; NaN for fewer than
    four pairs."""
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
    """Tabulate the mean gain by share of the training samples, and estimate the number of samples
    at which it falls to 0.

    Returns:
        A dict for `worth.json` with the points of the curve and this number, and a table for the
            page.
    """
    metric = measured.metric
    candidates = (
        _point(
            out,
            share,
            measured,
            facts,
        )
        for share in (*SHARES, 1.0)
    )
    points = [point for point in candidates if point is not None]
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
    """Measure the mean gain with this share of each silo's training samples; None if the metric is
    undefined."""
    metric = measured.metric
    rows = measured.answers[0].silo.rows
    names = [name for name in rows if name in ALONE or name == measured.method]
    source, local = out, LOCAL[0]
    if share < 1:
        source, local = out / "curve" / f"share-{share:g}", LOCAL[-1]
    silos = [
        silo
        for silo in read(
            source,
            names,
            1,
            facts,
        )
        if not words.why_no_verdict(silo, metric)
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
    clients = RunResult(source / "runs" / folder_of(local) / "seed-0").clients
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
    """Number of training samples at which the curve of `key` falls to 0, by linear interpolation
    over the logarithm of the number; None if it is above 0 at the largest number, or nowhere."""
    for fewer, more in reversed(list(itertools.pairwise(points))):
        if more[key] > 0:
            return None
        if fewer[key] > 0:
            fraction = fewer[key] / (fewer[key] - more[key])
            small, large = math.log(fewer["samples"]), math.log(more["samples"])
            return math.exp(small * (1 - fraction) + large * fraction)
    return None


def _until(ends: Mapping[str, float | None], points: Points) -> str:
    """Say up to how many samples federating pays."""
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
    """Tabulate traffic and time of one training of the chosen method for each silo, as measured in
    its first run; returns numbers for `worth.json` and a table for the page."""
    run = RunResult(out / method.first)
    rounds = method.rounds
    clients = run.clients[run.clients["round"] <= rounds]
    silos = [answer.silo for answer in measured.answers]
    sums = clients.groupby("client")[["upload_bytes", "download_bytes"]].sum()
    sums = sums.reindex([silo.number for silo in silos], fill_value=0).astype(float)
    # ranks train in parallel, and a round's seconds are those of the slowest
    ranks = run.summary.get("world_size") or 1
    share = rounds / max(run.rounds_done, 1)
    seconds = (run.total("seconds_client") or 0.0) * share * ranks
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
