"""Trains every row on every fold, and answers for each silo whether to federate."""

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
from fl_lightning.lab.worth import FOLDS, LENGTHS, LOCAL, row
from fl_lightning.lab.worth.statistics import Name
from fl_lightning.results.opening import say_when_stopped

if TYPE_CHECKING:
    from fl_lightning.lab.worth.further import Row
    from fl_lightning.lab.worth.page import Section
    from fl_lightning.lab.worth.runs import Task
    from fl_lightning.lab.worth.silos import Measured, SiloFacts

CYCLES, MOST_CYCLES = 2, 10
"""Without --repeats; with --minutes at most. 2: ten silos of the tutorial then take four minutes of
two cores (docs/hospitals.md); more than 4 hardly narrow an interval, since samples decide then
(simulated)."""
METHODS = ("fedper", "ditto", "crosskapc", "fedcac", "partialpooling")
"""Without --methods: the first in mean rank in the atlas (docs/results/crosskapc.md), and what the
atlas's rule advises; FedPer, the best where labels conflict in many groups (none is significantly
below training alone in any setting there, docs/results/atlas.md);
and the statistician's answer, the best linear model of six of seven real sets
(docs/results/real-silos.md)."""
CHOICES: Mapping[str, list[dict[str, Any]]] = {"ditto": [{"lam": 0.1}, {"lam": 10.0}]}
"""Further arguments that a method is tried with: a decade on either side of the authors' middle."""
SLACK = 1.1
"""A further cycle is begun if it ends by so many times --minutes, as far as can be told."""
ONLY_LAST = 10**6
"""Rounds between evaluations: runs are scored where a length ends."""


@dataclass(frozen=True)
class WorthPlan:
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
        begin: when it began, on the monotonic clock.
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

    @property
    def entries(self) -> list[str | dict[str, Any]]:
        """The methods as a study lists them."""
        choices = ({"name": name} | more for name in self.methods for more in CHOICES.get(name, []))
        return [*self.methods, *choices]

    @property
    def deadline(self) -> float:
        """When the time is over, on the monotonic clock; infinite without `minutes`."""
        return math.inf if self.minutes is None else self.begin + 60 * SLACK * self.minutes

    def extra_share(self, silos: int) -> float:
        """Number of trainings that `_further` adds, divided by those of one cycle."""
        newcomers = 2 * min(silos, FOLDS)  # 2: the chosen method, and alone
        others = FOLDS * (silos * self.leave_one_out + 6 * self.curve)  # 6: the two, 3 `SHARES`
        # 2: FedAvg and local
        return (newcomers + others) / (FOLDS * (len(self.entries) + 2))


@dataclass(frozen=True)
class Prepared:
    """A plan that has been checked: its rows by label, and the silos."""

    plan: WorthPlan
    rows: Mapping[str, Row]
    facts: SiloFacts
    metric: Name

    @property
    def labels(self) -> list[str]:
        """Labels of all rows: of methods, and of plain models that silos fit alone."""
        return [*self.rows, *self.facts.plain]


class OutOfTime(Exception):
    """`--minutes` are over."""


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
        keys: `minutes`, `metric`, `margin`, `leave_one_out`, `curve` and `workers` of `WorthPlan`.

    Raises:
        BadInput: it cannot work, before anything is trained; or `minutes` are too few for two
            folds.
        RunFailed: runs have failed; the others have been run.
    """
    for extra in ("study", "report"):
        require(extra, "worth", str(out))
    has_both = repeats is not None and keys.get("minutes") is not None
    check("repeats", repeats, not has_both, "with minutes it must be left out")
    names = default_methods(layers) if methods is None else methods
    for name in names:
        check("methods", name, bool(name), "method names with commas between: fedper,ditto")
        catalogue.find("methods", "methods", name)
    cycles = CYCLES
    if repeats is not None:
        cycles = math.ceil(repeats / FOLDS)
        if repeats % FOLDS:
            line = f"worth: {cycles * FOLDS} repetitions, whole cycles of {FOLDS} folds"
            print(line, file=sys.stderr)
    over = [
        {key: value for key, value in layer.items() if key not in ("loggers", "seed")}
        for layer in layers
    ]
    begin = time.monotonic()
    plan = WorthPlan(
        over,
        StudyFolder(out),
        names,
        cycles,
        again=again,
        begin=begin,
        **keys,
    )
    return train_and_write(prepared(plan, optional=methods is None))


def default_methods(layers: Sequence[Layer]) -> list[str]:
    """`METHODS`, and that of the config where it is a federated one by name."""
    configured = [layer["method"] for layer in layers if "method" in layer]
    name = configured[-1] if configured else None
    if isinstance(name, dict):
        name = name.get("name", name.get("class_path"))
    is_new = isinstance(name, str) and name not in (*METHODS, "local", "fedavg")
    return [*METHODS, *([str(name)] if is_new else [])]


def train_and_write(ready: Prepared) -> Measured:
    """Train what is missing, measure, and write the files of the answer."""
    from fl_lightning.lab.worth import output
    from fl_lightning.lab.worth.measure import measure
    from fl_lightning.lab.worth.scores import complete_folds, read

    plan, out = ready.plan, ready.plan.folder.path
    with plan.folder.locked():
        cycles = _train(ready)
        folds = list(range(FOLDS)) if cycles else complete_folds(out, ready.labels)
        ended = f"fewer than two of {FOLDS} folds have ended in all rows"
        requirement = f"{ended}: the same command with more minutes goes on from there"
        check("minutes", plan.minutes, len(folds) > 1, requirement)
        silos = read(
            out,
            ready.labels,
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
    """The study of so many cycles with its base, and all its runs, for the longest length: those
    that the folder has, too."""
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
    base, pairs = resolved(definition, [*plan.over, fixed], [beneath])
    return definition, _longest(base), [(run, _longest(config)) for run, config in pairs]


def _longest(config: Config) -> Config:
    rounds = LENGTHS[-1] * config.federation.rounds
    return replace(config, federation=replace(config.federation, rounds=rounds))


def prepared(plan: WorthPlan, optional: bool = False) -> Prepared:
    """The plan, checked.

    Args:
        plan: of the command.
        optional: leave out `partialpooling` where samples have too many numbers for it, rather than
            let its runs fail.
    """
    definition, base, runs = _resolved(plan, 1)  # before torch is imported
    from fl_lightning.lab.study.workers import in_a_process
    from fl_lightning.lab.worth.runs import facts_of

    metric = _checked(plan, base)
    folder = plan.folder
    folder.check(definition, to_settings(base), [run for run, _ in runs])
    changed = ", ".join(code.changed_files(folder, runs))
    way = "change it back, or give another --out"
    requirement = f"runs in {folder.path} were trained with another version: {way}"
    check("code", changed, not changed, requirement)
    samples.check_data_unchanged(folder, runs, runs)
    # in a process of its own: workers are forked from this one, which must not run torch's threads
    facts = in_a_process(facts_of, runs[0][1])
    if optional and "partialpooling" in plan.methods and not facts.pools:
        methods = [name for name in plan.methods if name != "partialpooling"]
        return prepared(replace(plan, methods=methods))
    if metric is None and facts.rare:
        facts, metric = replace(facts, notes=[facts.rare, *facts.notes]), "auroc"
    return Prepared(
        plan,
        _rows(runs),
        facts,
        metric or "accuracy",
    )


def _rows(runs: Sequence[tuple[StudyRun, Config]]) -> dict[str, Row]:
    """The rows that the runs of the first fold train, by name."""
    from fl_lightning.lab.worth.further import Row

    rows = {}
    for run, config in runs:
        for cell in run.cells() if run.seed == 0 else []:
            for length in LENGTHS:
                label, first = str(cell["label"]), cell["folder"]
                line = Row(
                    config,
                    cell.get("judge"),
                    label,
                    length,
                    first,
                )
                rows[line.name] = line
    return rows


def _checked(plan: WorthPlan, base: Config) -> Name | None:
    """The metric, where one is named; `BadInput` for a base of which no verdicts can be given."""
    data, named = base.data, base.evaluation.metric
    is_regression = data.task == "regression"
    requirement = "choose accuracy, balanced_accuracy or auroc by --metric"
    check("evaluation.metric", named, plan.metric is not None or named != "f1", requirement)
    metric: Any = plan.metric or ("mae" if is_regression else named)
    requirement = (
        "of a regression it is mae" if is_regression else "mae is for data.task regression"
    )
    check("metric", metric, metric is None or (metric == "mae") == is_regression, requirement)
    share = base.federation.participation
    requirement = "worth trains every silo in every round: it must be 1"
    check("federation.participation", share, share == 1, requirement)
    requirement = "worth judges every silo: it must be"
    share = data.held_out_clients
    check("data.held_out_clients", share, not share, f"{requirement} 0")
    check("data.held_out", data.held_out, data.held_out is None, f"{requirement} null")
    return metric


# ---------------------------------------------------------------- training


def _train(ready: Prepared) -> int:
    """Run what is missing, with `minutes` cycle by cycle; the number of cycles that have ended."""
    from fl_lightning.lab.worth import words

    plan, facts = ready.plan, ready.facts
    for note in words.beforehand(facts, plan.cycles, ready.metric):
        print(f"worth: {note}", file=sys.stderr)
    if plan.minutes is None:
        _train_up_to(ready, plan.cycles)
        return plan.cycles
    duration, extra = 0.0, plan.extra_share(len(facts.names))
    for done in range(MOST_CYCLES):
        begin = time.monotonic()
        if done and begin + duration * (1 + extra) > plan.deadline:
            return done
        try:
            trained = _train_up_to(ready, done + 1)
        except OutOfTime:
            print(f"worth: {plan.minutes:g} minutes are over; what has run counts", file=sys.stderr)
            return done
        if trained:
            duration = time.monotonic() - begin
    return MOST_CYCLES


def _train_up_to(ready: Prepared, cycles: int) -> int:
    """Run what is missing of the cycles up to this number; how many trainings that were."""
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
    """Do the tasks that are not done, in workers; how many that were.

    Raises:
        OutOfTime: `minutes` are over.
        RunFailed: runs have failed; the others have been run.
    """
    from fl_lightning.lab.study.workers import run_all
    from fl_lightning.results import provenance

    provenance.collect_environment()  # before the workers are forked: they need not import it again
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
    begin = time.monotonic()
    with say_when_stopped(stopped), contextlib.closing(work) as all_ended:
        for ended in all_ended:
            done += 1
            if ended.error is not None:
                failures[str(jobs[ended.job].folder)] = ended.error
            _tell(done, total, begin)
    plan.folder.write_failures(failures)
    if failures:
        name, reason = next(iter(failures.items()))
        line = f"{len(failures)} of {total} runs failed, the first, {name}: {reason}"
        raise RunFailed(f"{line}; the same command tries again")
    return total


def _safely(task: Task) -> str | None:
    """Do one task; None, or one line that says why it failed."""
    return run_safely(lambda: task.run(train))


def _tell(done: int, total: int, begin: float) -> None:
    """Say now and then how many trainings are done, and the time left."""
    minutes = (time.monotonic() - begin) / done * (total - done) / 60
    if done in (1, total) or done % max(1, total // 10) == 0:
        line = f"worth: {done} of {total} trainings, about {minutes:.1f} minutes left"
        print(line, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- beyond the gain


def _further(ready: Prepared, measured: Measured) -> list[Section]:
    """Train and measure beyond the gain; tables of the page. Their numbers are added to
    `measured.consortium`."""
    from fl_lightning.lab.worth import further

    plan, facts, out = ready.plan, ready.facts, ready.plan.folder.path
    method, silos = ready.rows[measured.method], len(facts.names)
    alone = ready.rows[row(LOCAL[0], method.length)]
    new = further.newcomer_tasks(
        out,
        method,
        alone,
        silos,
    )
    tasks = [*new]
    if plan.leave_one_out:
        tasks += further.leave_one_out_tasks(out, method, silos)
    if plan.curve:
        tasks += further.curve_tasks(
            out,
            method,
            ready.rows[LOCAL[-1]],
            facts.plain,
        )
    parts: dict[str, tuple[Any, Section]] = {"costs": further.cost_section(out, measured, method)}
    try:
        _run_all(plan, tasks)
    except OutOfTime:
        print("worth: no time was left for what a new silo gets", file=sys.stderr)
    else:
        parts["newcomers"] = further.newcomer_section(new, measured)
        if plan.leave_one_out:
            parts["leave_one_out"] = further.leave_one_out_section(
                out,
                method,
                measured,
                facts,
            )
        if plan.curve:
            parts["curve"] = further.curve_section(out, measured, facts)
    measured.consortium |= {name: content for name, (content, _) in parts.items()}
    return [section for _, section in parts.values()]
