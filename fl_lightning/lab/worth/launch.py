"""Train all rows on all folds, and measure for each silo whether federating pays."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_lightning.configuration import catalogue
from fl_lightning.configuration.config import Config, check
from fl_lightning.configuration.files import Layer
from fl_lightning.configuration.resolve import to_settings, to_yaml
from fl_lightning.foundation.errors import RunFailed
from fl_lightning.foundation.extras import require
from fl_lightning.lab.study import code, samples
from fl_lightning.lab.study.folder import StudyFolder
from fl_lightning.lab.study.grid import Study, StudyRun
from fl_lightning.lab.study.launch import resolved, run_safely, train, worker_count
from fl_lightning.lab.worth import FOLDS, LENGTHS, LOCAL, row_name
from fl_lightning.lab.worth.statistics import Name
from fl_lightning.results.opening import say_when_stopped

if TYPE_CHECKING:
    from fl_lightning.lab.worth.further import Row
    from fl_lightning.lab.worth.page import Section
    from fl_lightning.lab.worth.runs import Task
    from fl_lightning.lab.worth.silos import Measured, SiloFacts

CYCLES, MOST_CYCLES = 2, 10
"""Cycles without --repeats, and at most with --minutes. 2: ten silos of the tutorial then take four
minutes on two cores (docs/hospitals.md); more than 4 hardly narrow an interval, whose width then
depends on the samples (simulated)."""
METHODS = ("fedper", "ditto", "crosskapc", "fedcac", "partialpooling")
"""Methods tried without --methods: the first by mean rank in the atlas (docs/results/crosskapc.md)
and those that the atlas's rule advises; FedPer, the best where labels conflict in many groups (none
is significantly below training alone in any setting there, docs/results/atlas.md); and partial
pooling, the best linear model on six of seven real data sets (docs/results/real-silos.md)."""
CHOICES: Mapping[str, list[dict[str, Any]]] = {"ditto": [{"lam": 0.1}, {"lam": 10.0}]}
"""Arguments with which a method is tried besides its defaults: a decade below and above the middle
of its authors' values."""
SLACK = 1.1
"""Another cycle begins if it is expected to end within this multiple of --minutes."""
ONLY_LAST = 10**6
"""Rounds between evaluations, more than any run has: `ScoreWriter` scores where a length ends."""


@dataclass(frozen=True)
class WorthPlan:
    """Arguments of one call of `fl-train worth`.

    Args:
        layers: layers of the config; later ones win.
        folder: folder for runs and results.
        methods: names of federated methods to try besides FedAvg.
        cycles: number of cycles of `FOLDS` folds.
        minutes: run as many cycles as end within this time instead of `cycles`.
        metric: metric in which gains are measured; None: `evaluation.metric`, or "mae" for a
            regression.
        margin: size of a gain that does not matter, in points (for mae in the target's unit);
            None: `words.default_margin`.
        leave_one_out: whether to train also without each silo in turn.
        curve: whether to train also on shares of each silo's samples.
        workers: number of worker processes; None: one per core, or one with a GPU.
        again: command line that continues the work; printed if the call ends before all is done.
        begin: time at which the call began, on the monotonic clock in seconds; `minutes` count from
            here.
    """

    layers: Sequence[Layer]
    folder: StudyFolder
    methods: Sequence[str]
    cycles: int = CYCLES
    minutes: float | None = None
    metric: Name | None = None
    margin: float | None = None
    leave_one_out: bool = False
    curve: bool = False
    workers: int | None = None
    again: str = ""
    begin: float = 0.0

    @property
    def entries(self) -> list[str | dict[str, Any]]:
        """Entries for a study's `methods`: each method with its default arguments, then again with
        each set of arguments that `CHOICES` has for it."""
        choices = ({"name": name} | more for name in self.methods for more in CHOICES.get(name, []))
        return [*self.methods, *choices]

    @property
    def deadline(self) -> float:
        """End of `minutes` on the monotonic clock, in seconds; infinite without `minutes`."""
        return math.inf if self.minutes is None else self.begin + 60 * SLACK * self.minutes

    def extra_ratio(self, silos: int) -> float:
        """Return the number of trainings for newcomers, leave-one-out and learning curve, as a
        multiple of the trainings of one cycle.

        Args:
            silos: number of silos.
        """
        newcomers = 2 * min(silos, FOLDS)  # 2: the chosen method and training alone
        others = FOLDS * (silos * self.leave_one_out + 6 * self.curve)  # 6: these 2, 3 `SHARES`
        # 2: FedAvg and local
        return (newcomers + others) / (FOLDS * (len(self.entries) + 2))


@dataclass(frozen=True)
class Prepared:
    """A checked plan with all that it needs for training.

    Args:
        plan: the plan.
        rows: the rows that are to be trained, by name (plain models are not among them).
        facts: facts on the silos.
        metric: metric in which gains are measured.
    """

    plan: WorthPlan
    rows: Mapping[str, Row]
    facts: SiloFacts
    metric: Name

    @property
    def row_names(self) -> list[str]:
        """Names of all rows: trained ones and plain models."""
        return [*self.rows, *self.facts.plain]


class OutOfTime(Exception):
    """The time of `--minutes` has passed."""


def worth(
    layers: Sequence[Layer],
    out: Path,
    *,
    methods: Sequence[str] | None = None,
    repeats: int | None = None,
    again: str = "",
    **keys: Any,
) -> Measured:
    """Check the arguments, run the trainings that have no scores yet in the folder `out`, measure
    gains, and write the result files.

    Args:
        layers: layers of the config, as for `fit`; later ones win.
        out: folder for runs and results.
        methods: names of methods to try besides FedAvg; None: `default_methods`.
        repeats: trainings of each method, rounded up to whole cycles; None: `CYCLES` cycles.
        again: command line that continues the work; printed if the call ends before all is done.
        keys: `minutes`, `metric`, `margin`, `leave_one_out`, `curve` and `workers` of `WorthPlan`.

    Raises:
        BadInput: before anything is trained, a setting or the folder does not fit; after training,
            fewer than two folds have ended within `minutes`.
        RunFailed: some runs failed; all others have been run.
    """
    for extra in ("study", "report"):
        require(extra, "worth", str(out))
    has_both = repeats is not None and keys.get("minutes") is not None
    check("repeats", repeats, not has_both, "cannot be combined with minutes; leave out one")
    names = default_methods(layers) if methods is None else methods
    for name in names:
        check(
            "methods",
            name,
            bool(name),
            "a name is empty; separate names by single commas, such as fedper,ditto",
        )
        catalogue.find("methods", "methods", name)
    cycles = CYCLES
    if repeats is not None:
        cycles = math.ceil(repeats / FOLDS)
        if repeats % FOLDS:
            line = f"worth: {cycles * FOLDS} repetitions, whole cycles of {FOLDS} folds"
            print(line, file=sys.stderr)
    kept_layers = [
        {key: value for key, value in layer.items() if key not in ("loggers", "seed")}
        for layer in layers
    ]
    plan = WorthPlan(
        kept_layers,
        StudyFolder(out),
        names,
        cycles,
        again=again,
        begin=time.monotonic(),
        **keys,
    )
    return train_and_write(prepare(plan, may_skip_pooling=methods is None))


def default_methods(layers: Sequence[Layer]) -> list[str]:
    """Return the methods that are tried by default: `METHODS`, and the method that the config names
    if it is another one ("local" and "fedavg" are always trained)."""
    configured = [layer["method"] for layer in layers if "method" in layer]
    name = configured[-1] if configured else None
    if isinstance(name, dict):
        name = name.get("name", name.get("class_path"))
    is_new = isinstance(name, str) and name not in (*METHODS, "local", "fedavg")
    return [*METHODS, *([str(name)] if is_new else [])]


def train_and_write(ready: Prepared) -> Measured:
    """Carry out a checked plan: run the trainings that have no scores yet, measure gains, and write
    the result files."""
    from fl_lightning.lab.worth import output
    from fl_lightning.lab.worth.measure import measure
    from fl_lightning.lab.worth.scores import complete_folds, read

    plan, out = ready.plan, ready.plan.folder.path
    with plan.folder.locked():
        cycles = _train(ready)
        folds = list(range(FOLDS)) if cycles else complete_folds(out, ready.row_names)
        check(
            "minutes",
            plan.minutes,
            len(folds) > 1,
            f"too few: not two of {FOLDS} folds have ended for all methods; the same command with "
            "more minutes continues",
        )
        silos = read(
            out,
            ready.row_names,
            max(cycles, 1),
            ready.facts,
            folds,
        )
        points = 1 if ready.metric == "mae" else 100
        margin = None if plan.margin is None else plan.margin / points
        measured = measure(
            silos,
            ready.metric,
            margin,
            cycles,
        )
        sections = _further(ready, measured) if cycles else []
        output.write(out, measured, sections)
    return measured


# ---------------------------------------------------------------- the study of all rows


def _resolved(plan: WorthPlan, cycles: int) -> tuple[Study, Config, list[tuple[StudyRun, Config]]]:
    """Resolve the study of this many cycles: its definition, base config and runs, with the rounds
    of the longest length. Seeds that the folder has already stay in it."""
    seeds = set(range(cycles * FOLDS))
    if plan.folder:
        seeds |= set(Study.of(plan.folder.definition()).seeds)
    study = {
        "base": {},
        "methods": plan.entries,
        "seeds": sorted(seeds),
        "forced": True,
    }
    definition = Study.of(study)
    data = {
        "folds": FOLDS,
        "test_seed": 0,
        "partition_seed": 0,
        "client_test": None,
        "validation": 0.0,
        "score_on": "test",
    }
    fixed: Layer = {
        "data": data,
        "evaluation": {"every": ONLY_LAST},
        "callbacks": {
            "heatmaps": None,
            "progress": None,
            "checkpoint": {},
        },
    }
    beneath: Layer = {"data": {"min_samples": 1}}
    base, pairs = resolved(definition, overrides=[*plan.layers, fixed], defaults=[beneath])
    return definition, _longest(base), [(run, _longest(config)) for run, config in pairs]


def _longest(config: Config) -> Config:
    rounds = LENGTHS[-1] * config.federation.rounds
    return replace(config, federation=replace(config.federation, rounds=rounds))


def prepare(plan: WorthPlan, may_skip_pooling: bool = False) -> Prepared:
    """Check a plan, and load facts on its silos.

    Args:
        plan: the plan.
        may_skip_pooling: whether to leave out the method `partialpooling` if it cannot model these
            data (no table, or one with too many features). If false, its runs will fail.
    """
    definition, base, runs = _resolved(plan, 1)  # before torch is imported
    from fl_lightning.lab.study.workers import in_a_process
    from fl_lightning.lab.worth.runs import facts_of

    metric = _named_metric(plan, base)
    folder = plan.folder
    folder.check(definition, to_settings(base), [run for run, _ in runs])
    changed = ", ".join(code.changed_files(folder, runs))
    check(
        "code",
        changed,
        not changed,
        f"runs in {folder.path} were trained with another version of these files; change them "
        "back, or give another --out",
    )
    samples.check_data_unchanged(folder, runs, runs)
    # in another process: this one forks workers and must not start torch's threads
    facts = in_a_process(facts_of, runs[0][1])
    if may_skip_pooling and "partialpooling" in plan.methods and not facts.pools:
        methods = [name for name in plan.methods if name != "partialpooling"]
        return prepare(replace(plan, methods=methods))
    if metric is None and facts.rare:
        facts, metric = replace(facts, notes=[facts.rare, *facts.notes]), "auroc"
    return Prepared(
        plan,
        _rows(runs),
        facts,
        metric or "accuracy",
    )


def _rows(runs: Sequence[tuple[StudyRun, Config]]) -> dict[str, Row]:
    """Make the rows of the first fold's runs, by name."""
    from fl_lightning.lab.worth.further import Row

    rows = {}
    for run, config in runs:
        if run.seed != 0:
            continue
        for cell in run.cells():
            for length in LENGTHS:
                row = Row(
                    config,
                    cell.get("judge"),
                    str(cell["label"]),
                    length,
                    cell["folder"],
                )
                rows[row.name] = row
    return rows


def _named_metric(plan: WorthPlan, base: Config) -> Name | None:
    """Return the metric that flags or config name, if any; refuse a config without verdicts."""
    data, configured = base.data, base.evaluation.metric
    is_regression = data.task == "regression"
    check(
        "evaluation.metric",
        configured,
        plan.metric is not None or configured != "f1",
        "worth measures no gain in it; choose accuracy, balanced_accuracy or auroc by --metric",
    )
    metric: Any = plan.metric or ("mae" if is_regression else configured)
    check(
        "metric",
        metric,
        is_regression or metric != "mae",
        "it is for data.task regression only; choose another --metric",
    )
    check(
        "metric",
        metric,
        not is_regression or metric == "mae",
        "worth measures a regression by mae only; leave out --metric",
    )
    share = base.federation.participation
    check(
        "federation.participation",
        share,
        share == 1,
        "worth trains every silo in every round; set it to 1",
    )
    share = data.held_out_clients
    check("data.held_out_clients", share, not share, "worth judges every silo; set it to 0")
    held_out = data.held_out
    check("data.held_out", held_out, held_out is None, "worth judges every silo; set it to null")
    return metric


# ---------------------------------------------------------------- training


def _train(ready: Prepared) -> int:
    """Run the trainings that have no scores yet; with `minutes`, cycle by cycle. Returns the number
    of complete cycles."""
    from fl_lightning.lab.worth import words

    plan, facts = ready.plan, ready.facts
    for note in words.visible_gains(facts, plan.cycles, ready.metric):
        print(f"worth: {note}", file=sys.stderr)
    if plan.minutes is None:
        _train_up_to(ready, plan.cycles)
        return plan.cycles
    duration, extra = 0.0, plan.extra_ratio(len(facts.names))
    for done in range(MOST_CYCLES):
        start = time.monotonic()
        if done and start + duration * (1 + extra) > plan.deadline:
            return done
        try:
            trained = _train_up_to(ready, done + 1)
        except OutOfTime:
            print(f"worth: {plan.minutes:g} minutes are over; what has run counts", file=sys.stderr)
            return done
        if trained:
            duration = time.monotonic() - start
    return MOST_CYCLES


def _train_up_to(ready: Prepared, cycles: int) -> int:
    """Run the trainings of the first `cycles` cycles that have no scores yet; returns their
    number."""
    from fl_lightning.lab.worth.runs import Task

    plan, out = ready.plan, ready.plan.folder.path
    definition, base, runs = _resolved(plan, cycles)
    plan.folder.write(definition, to_yaml(base), [run for run, _ in runs])
    tasks = []
    for run, config in runs:
        if run.seed < cycles * FOLDS:
            rows = {str(cell["label"]): cell.get("judge") for cell in run.cells()}
            plain = ready.facts.plain if run.entry.label == LOCAL[0] else ()
            tasks.append(
                Task(
                    config,
                    out / run.folder,
                    out,
                    rows,
                    plain=plain,
                )
            )
    return _run_all(plan, tasks)


def _run_all(plan: WorthPlan, tasks: Sequence[Task]) -> int:
    """Run the tasks that are not done, in worker processes; returns their number.

    Raises:
        OutOfTime: the plan's time has passed.
        RunFailed: some runs failed; all others have been run.
    """
    from fl_lightning.lab.study.workers import run_all
    from fl_lightning.results import provenance

    provenance.collect_environment()  # here, so that forked workers need not import it again
    jobs = [task for task in tasks if not task.done]
    if not jobs:
        return 0
    failures: dict[str, str] = {}
    workers = worker_count(plan.workers, jobs[0].config)
    done, total = 0, len(jobs)

    def check_time(numbers: list[int]) -> None:
        if time.monotonic() > plan.deadline:
            raise OutOfTime

    def stopped() -> str:
        progress = f"{done} of {total} trainings done"
        return f"worth: stopped with {progress}; it goes on with: {plan.again}"

    work = run_all(
        _safely,
        jobs,
        workers,
        plan.folder.path / "logs",
        check_time,
    )
    start = time.monotonic()
    with say_when_stopped(stopped), contextlib.closing(work) as all_ended:
        for ended in all_ended:
            done += 1
            if ended.error is not None:
                failures[str(jobs[ended.job].folder)] = ended.error
            _print_progress(done, total, start)
    plan.folder.write_failures(failures)
    if failures:
        name, reason = next(iter(failures.items()))
        raise RunFailed(
            f"{len(failures)} of {total} runs failed, the first, {name}: {reason}; run the same "
            "command to try them again"
        )
    return total


def _safely(task: Task) -> str | None:
    """Run a task; returns one line on why it failed, or None."""
    return run_safely(lambda: task.run(train))


def _print_progress(done: int, total: int, start: float) -> None:
    """Print the number of trainings done and the time left, at about every tenth of the way."""
    minutes = (time.monotonic() - start) / done * (total - done) / 60
    if done in (1, total) or done % max(1, total // 10) == 0:
        line = f"worth: {done} of {total} trainings, about {minutes:.1f} minutes left"
        print(line, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- beyond the gain


def _further(ready: Prepared, measured: Measured) -> list[Section]:
    """Train and measure newcomers, leave-one-out, curve and costs; returns tables for the page and
    adds numbers to `measured.consortium`."""
    from fl_lightning.lab.worth import further

    plan, facts, out = ready.plan, ready.facts, ready.plan.folder.path
    method, silos = ready.rows[measured.method], len(facts.names)
    alone = ready.rows[row_name(LOCAL[0], method.length)]
    newcomer_tasks = further.newcomer_tasks(
        out,
        method,
        alone,
        silos,
    )
    tasks = [*newcomer_tasks]
    if plan.leave_one_out:
        tasks += further.leave_one_out_tasks(out, method, silos)
    if plan.curve:
        tasks += further.curve_tasks(
            out,
            method,
            ready.rows[LOCAL[-1]],
            facts.plain,
        )
    results: dict[str, tuple[Any, Section]] = {"costs": further.cost_section(out, measured, method)}
    try:
        _run_all(plan, tasks)
    except OutOfTime:
        print("worth: no time was left for newcomers, leave-one-out and curve", file=sys.stderr)
    else:
        results["newcomers"] = further.newcomer_section(newcomer_tasks, measured)
        if plan.leave_one_out:
            results["leave_one_out"] = further.leave_one_out_section(
                out,
                method,
                measured,
                facts,
            )
        if plan.curve:
            results["curve"] = further.curve_section(out, measured, facts)
    measured.consortium |= {name: content for name, (content, _) in results.items()}
    return [section for _, section in results.values()]
