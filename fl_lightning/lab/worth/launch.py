"""Trains every row on every fold, and answers for each silo whether to federate."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_lightning.configuration import catalogue
from fl_lightning.configuration.config import Config, check
from fl_lightning.configuration.files import Layer
from fl_lightning.configuration.resolve import to_settings, to_yaml
from fl_lightning.foundation.errors import BadInput, RunFailed
from fl_lightning.foundation.extras import require
from fl_lightning.lab.study import code, samples
from fl_lightning.lab.study.folder import StudyFolder
from fl_lightning.lab.study.grid import Run, Study
from fl_lightning.lab.study.launch import resolved, run_safely, train, worker_count
from fl_lightning.lab.worth import FOLDS
from fl_lightning.lab.worth.statistics import Name
from fl_lightning.results.opening import when_stopped

if TYPE_CHECKING:
    from fl_lightning.lab.worth.further import Task
    from fl_lightning.lab.worth.page import Section
    from fl_lightning.lab.worth.silos import Facts, Measured

CYCLES, MOST_CYCLES = 4, 10
"""Without --repeats; with --minutes at most. More than 4 hardly narrow an interval: samples decide
then (simulated)."""
METHODS = ("fedper", "ditto", "selfkapc", "fedcac")
"""Without --methods: what the atlas's rule advises, and FedPer, the best where labels conflict in
many groups; none is significantly below training alone in any setting there
(docs/results/atlas.md)."""
SLACK = 1.1
"""A further cycle is begun if it ends by so many times --minutes, as far as can be told."""
ONLY_LAST = 10**6
"""Rounds between evaluations: the last one is always scored, and no other is needed."""


@dataclass(frozen=True)
class Plan:
    """What is to be trained, and where.

    Args:
        over: settings of the config, later layers winning.
        folder: where everything is kept.
        methods: federated methods beside FedAvg.
        cycles: of 5 folds.
        minutes: in place of `cycles`: as many as end in that time.
        metric: that gains are of; None: accuracy, of a regression mae.
        margin: differences below it do not matter, in points; None: the default.
        leave_one_out: also train without each silo in turn.
        curve: also train on shares of each silo's samples.
        workers: processes; None: as many as cores.
        again: the command that goes on with it.
        begin: on the monotonic clock.
    """

    over: Sequence[Layer]
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

    def more(self, silos: int) -> float:
        """Trainings beyond the cycles, as a share of those of a cycle."""
        further = (
            2 * min(silos, FOLDS) + FOLDS * silos * self.leave_one_out + 6 * FOLDS * self.curve
        )
        return further / (FOLDS * (len(self.methods) + 2))


class TooSlow(Exception):
    """The trainings would take so many seconds, altogether, and may not."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


def worth(
    layers: Sequence[Layer],
    out: Path,
    *,
    methods: Sequence[str] | None = None,
    repeats: int | None = None,
    again: str = "",
    **keys: Any,
) -> Measured:
    """Train what is missing in the folder `out`, measure, and write the answer's files.

    Args:
        layers: of the config, as for `fit`, later ones winning.
        out: the folder.
        methods: to try beside FedAvg; None: `METHODS` and the config's own.
        repeats: trainings of each method, rounded up to whole cycles; None: `CYCLES` of them.
        again: the command that goes on with it.
        keys: as for `Plan`.

    Raises:
        BadInput: it cannot work, before anything is trained; or `minutes` are too few for a cycle.
        RunFailed: runs have failed; the others have been run.
    """
    for extra in ("study", "report"):
        require(extra, "worth", str(out))
    both = repeats is not None and keys.get("minutes") is not None
    check("repeats", repeats, not both, "with minutes it must be left out")
    layers = [{key: value for key, value in layer.items() if key != "loggers"} for layer in layers]
    methods = default_methods(layers) if methods is None else methods
    for name in methods:
        check("methods", name, bool(name), "method names with commas between: fedper,ditto")
        catalogue.find("methods", "methods", name)
    cycles = CYCLES if repeats is None else math.ceil(repeats / FOLDS)
    if repeats is not None and repeats % FOLDS:
        print(
            f"worth: {cycles * FOLDS} repetitions, whole cycles of {FOLDS} folds", file=sys.stderr
        )
    over = [{key: value for key, value in layer.items() if key != "seed"} for layer in layers]
    begin = time.monotonic()
    plan = Plan(over, StudyFolder(out), methods, cycles, again=again, begin=begin, **keys)
    return answer(plan)


def default_methods(layers: Sequence[Layer]) -> list[str]:
    """`METHODS`, and that of the config where it is a federated one by name."""
    configured = [layer["method"] for layer in layers if "method" in layer]
    last = configured[-1] if configured else None
    name = last.get("name", last.get("class_path")) if isinstance(last, dict) else last
    new = isinstance(name, str) and name not in (*METHODS, "local", "fedavg")
    return [*METHODS, *([str(name)] if new else [])]


def answer(plan: Plan) -> Measured:
    """Train, measure, and write the files."""
    plan, first, facts = _prepared(plan)
    from fl_lightning.lab.worth import output

    with plan.folder.locked():
        cycles = _train(plan, facts)
        measured = _measured(plan, first, facts, cycles)
        sections = _further(plan, first, facts, measured)
        output.write(plan.folder.path, measured, sections)
    return measured


def _resolved(plan: Plan, cycles: int) -> tuple[Study, Config, list[tuple[Run, Config]]]:
    """The study of so many cycles with its base, and all its runs: those that the folder has,
    too."""
    seeds = set(range(cycles * FOLDS))
    if plan.folder:
        seeds |= set(Study.of(plan.folder.definition()).seeds)
    definition = Study.of(
        {"base": {}, "methods": plan.methods, "seeds": sorted(seeds), "forced": True}
    )
    folds = {
        "folds": FOLDS,
        "test_seed": 0,
        "partition_seed": 0,
        "client_test": None,
        "validation": 0.0,
    }
    fixed: Layer = {
        "data": folds | {"score_on": "test"},
        "evaluation": {"every": ONLY_LAST},
        "callbacks": {"heatmaps": None, "progress": None, "checkpoint": {}},
    }
    base, runs, configs = resolved(
        definition, over=[*plan.over, fixed], beneath=[{"data": {"min_samples": 1}}]
    )
    return definition, base, list(zip(runs, configs, strict=True))


def _prepared(plan: Plan) -> tuple[Plan, dict[str, tuple[Config, dict[str, Any]]], Facts]:
    """Returns the plan with its metric, each row's config and table entry of seed 0, and the
    silos' facts."""
    definition, base, runs = _resolved(plan, 1)
    regression = base.data.task == "regression"
    allowed = "of a regression it is mae" if regression else "mae is for data.task regression"
    metric: Name = plan.metric or ("mae" if regression else "accuracy")
    check("metric", metric, (metric == "mae") == regression, allowed)
    share = base.federation.participation
    check(
        "federation.participation",
        share,
        share == 1,
        "worth trains every silo in every round: it must be 1",
    )
    share = base.data.held_out_clients
    check("data.held_out_clients", share, not share, "worth judges every silo: it must be 0")
    named = base.data.held_out
    check("data.held_out", named, named is None, "worth judges every silo: it must be null")
    plan.folder.check(definition, to_settings(base), [run for run, _ in runs])
    changed = ", ".join(code.changes(plan.folder, runs))
    allowed = (
        f"runs in {plan.folder.path} were trained with another version: change it back, or give "
        f"another --out"
    )
    check("code", changed, not changed, allowed)
    samples.check_same(plan.folder, runs, runs)
    from fl_lightning.lab.study.workers import in_a_process
    from fl_lightning.lab.worth.runs import look

    first = {
        str(cell["label"]): (config, cell)
        for run, config in runs
        if run.seed == 0
        for cell in run.cells()
    }
    return replace(plan, metric=metric), first, in_a_process(look, runs[0][1])


# ---------------------------------------------------------------- training


def _train(plan: Plan, facts: Facts) -> int:
    """Run what is missing, with `minutes` cycle by cycle; the number of cycles that have ended."""
    from fl_lightning.lab.worth import words

    for note in words.beforehand(
        facts.names, facts.sizes, plan.cycles, facts.counts, plan.metric or "accuracy"
    ):
        print(f"worth: {note}", file=sys.stderr)
    minutes = plan.minutes
    if minutes is None:
        _cycle(plan, plan.cycles, math.inf)
        return plan.cycles
    limit, last, more = 60 * SLACK * minutes, 0.0, plan.more(len(facts.names))
    for cycle in range(1, MOST_CYCLES + 1):
        before = time.monotonic()
        if cycle > 1 and before - plan.begin + last * (1 + more) > limit:
            return cycle - 1
        try:
            trained = _cycle(plan, cycle, math.inf if last else limit / (1 + more))
        except TooSlow as error:
            if cycle > 1:
                return cycle - 1
            need = math.ceil(10 * error.seconds * (1 + more) / 60 / SLACK) / 10
            takes = f"one cycle of {FOLDS} folds, and what follows it, take about {need:g} minutes"
            raise BadInput("minutes", minutes, f"{takes}; what has run is kept") from None
        last = time.monotonic() - before if trained else last
    return MOST_CYCLES


def _cycle(plan: Plan, cycles: int, limit: float) -> int:
    """Run what is missing of so many cycles; how many trainings that were."""
    definition, base, runs = _resolved(plan, cycles)
    plan.folder.write(definition, to_yaml(base), [run for run, _ in runs])
    out = plan.folder.path
    tasks: list[Task] = []
    for run, config in runs:
        if run.seed < cycles * FOLDS:
            rows = {str(cell["label"]): cell.get("judge") for cell in run.cells()}
            tasks.append((config, out / run.folder, out, rows))
    return _run_all(plan, tasks, limit)


def _run_all(plan: Plan, tasks: Sequence[Task], limit: float = math.inf) -> int:
    """Do the tasks that have not ended or not been scored, in workers, with a bar; how many that
    were.

    Args:
        plan: whose they are.
        tasks: all of them.
        limit: seconds since the beginning that they may take altogether, as far as two fifths of
            them can tell.

    Raises:
        TooSlow: they would take longer.
        RunFailed: runs have failed; the others have been run.
    """
    import fl_lightning.lab.worth.runs  # noqa: F401  before the workers are forked: they need not import it again
    from fl_lightning.lab.study.workers import run_all
    from fl_lightning.results import provenance

    provenance.look()  # likewise
    jobs = [task for task in tasks if not _done(task)]
    if not jobs:
        return 0
    failures: dict[str, str] = {}
    first, done, few = time.monotonic(), 0, max(1, 2 * len(jobs) // 5)
    count = worker_count(plan.workers, jobs[0][0])
    work = run_all(_train_and_score, jobs, count, plan.folder.path / "logs", lambda numbers: None)

    def stopped() -> str:
        return (
            f"worth: stopped with {done} of {len(jobs)} trainings done; it goes on with: "
            f"{plan.again}"
        )

    with when_stopped(stopped), _bar(len(jobs)) as step, contextlib.closing(work) as all_ended:
        for ended in all_ended:
            done += 1
            if ended.error is not None:
                failures[str(jobs[ended.job][1])] = ended.error
            step(done)
            whole = (time.monotonic() - first) / done * len(jobs) + first - plan.begin
            if done >= few and whole > limit:
                raise TooSlow(whole)
    plan.folder.write_failures(failures)
    if failures:
        name, why = next(iter(failures.items()))
        line = f"{len(failures)} of {len(jobs)} runs failed, the first, {name}: {why}"
        raise RunFailed(f"{line}; the same command tries again")
    return len(jobs)


def _done(task: Task) -> bool:
    from fl_lightning.lab.worth.scores import place

    config, folder, out, rows = task
    scored = out is None or all(place(out, label, config.seed).is_file() for label in rows)
    return scored and (folder / "summary.json").is_file()


def _train_and_score(task: Task) -> str | None:
    """Do one task; None, or one line that says why it failed."""
    from fl_lightning.lab.worth.runs import score

    config, folder, out, rows = task

    def work() -> None:
        if not (folder / "summary.json").is_file():
            train(config, folder, accept=True)
        if out is not None:
            score(config, folder, out, rows)

    return run_safely(work)


@contextlib.contextmanager
def _bar(total: int) -> Iterator[Any]:
    """What shows how many of `total` are done, and the time left: a bar, or without a terminal a
    line now and then."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    start, console = time.monotonic(), Console(stderr=True)

    def printed(done: int) -> None:
        left = (time.monotonic() - start) / done * (total - done) / 60
        if done in (1, total) or done % max(1, total // 10) == 0:
            line = f"worth: {done} of {total} trainings, about {left:.1f} minutes left"
            print(line, file=sys.stderr, flush=True)

    if not (console.is_terminal and total):
        yield printed
        return
    columns = (TextColumn("trainings"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task("", total=total)
        progress.refresh()
        yield lambda done: progress.update(task, completed=done, refresh=True)


# ---------------------------------------------------------------- the answer


def _measured(
    plan: Plan, first: dict[str, tuple[Config, dict[str, Any]]], facts: Facts, cycles: int
) -> Measured:
    from fl_lightning.lab.worth.measure import measure
    from fl_lightning.lab.worth.scores import read
    from fl_lightning.lab.worth.training import training
    from fl_lightning.training.schedule import Length

    out = plan.folder.path
    silos, metric, margin = read(out, [*first], cycles, facts), plan.metric, plan.margin
    assert metric is not None
    measured = measure(silos, metric, margin if margin is None or metric == "mae" else margin / 100)
    config, cell = first[measured.method]
    finetuning = None
    if cell.get("judge") == "finetuned":
        epochs = config.evaluation.finetune_epochs
        finetuning = Length(epochs) if epochs else Length.of(config.federation)
    measured.training = training(out, cell["folder"], config.federation, facts.names, finetuning)
    return measured


def _further(
    plan: Plan, first: dict[str, tuple[Config, dict[str, Any]]], facts: Facts, measured: Measured
) -> list[Section]:
    """Train and read what is asked beyond the gain; tables of the page. What they hold is in
    `measured.consortium`."""
    from fl_lightning.lab.worth import further

    out, method, silos = plan.folder.path, measured.method, len(facts.names)
    rows = {label: (config, cell.get("judge")) for label, (config, cell) in first.items()}
    new = further.newcomers(out, rows, method, silos)
    tasks = [*new]
    tasks += further.without(out, rows, method, silos) if plan.leave_one_out else []
    tasks += further.curve(out, rows, method) if plan.curve else []
    _run_all(plan, tasks)
    parts: dict[str, tuple[Any, Section]] = {
        "costs": further.costs(out, measured, first[method][1]["folder"])
    }
    parts |= {"newcomers": further.of_newcomers(new, measured)}
    parts |= (
        {"leave_one_out": further.of_without(out, measured, facts)} if plan.leave_one_out else {}
    )
    parts |= {"curve": further.of_curve(out, measured, facts)} if plan.curve else {}
    measured.consortium |= {name: content for name, (content, _) in parts.items()}
    return [section for _, section in parts.values()]
