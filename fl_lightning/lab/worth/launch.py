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
from fl_lightning.lab.study.grid import Run, Study
from fl_lightning.lab.study.launch import resolved, run_safely, train, worker_count
from fl_lightning.lab.worth import FOLDS, LENGTHS, LOCAL, row
from fl_lightning.lab.worth.statistics import Name
from fl_lightning.results.opening import when_stopped

if TYPE_CHECKING:
    from fl_lightning.lab.worth.further import Row
    from fl_lightning.lab.worth.page import Section
    from fl_lightning.lab.worth.runs import Task
    from fl_lightning.lab.worth.silos import Facts, Measured

CYCLES, MOST_CYCLES = 2, 10
"""Without --repeats; with --minutes at most. 2: ten silos then take ten minutes of two cores; more
than 4 hardly narrow an interval, since samples decide then (simulated)."""
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

    @property
    def entries(self) -> list[str | dict[str, Any]]:
        """The methods as a study lists them."""
        choices = [
            {"name": name, **arguments}
            for name in self.methods
            for arguments in CHOICES.get(name, [])
        ]
        return [*self.methods, *choices]

    @property
    def deadline(self) -> float:
        """On the monotonic clock."""
        return math.inf if self.minutes is None else self.begin + 60 * SLACK * self.minutes

    def more(self, silos: int) -> float:
        """Trainings beyond the cycles, as a share of those of a cycle."""
        further = (
            2 * min(silos, FOLDS) + FOLDS * silos * self.leave_one_out + 6 * FOLDS * self.curve
        )
        return further / (FOLDS * (len(self.entries) + 2))


@dataclass(frozen=True)
class Prepared:
    """A plan that has been checked: its rows by label, and the silos."""

    plan: Plan
    rows: Mapping[str, Row]
    facts: Facts
    metric: Name

    @property
    def labels(self) -> list[str]:
        """Of all rows."""
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
        keys: as for `Plan`.

    Raises:
        BadInput: it cannot work, before anything is trained; or `minutes` are too few for two
            folds.
        RunFailed: runs have failed; the others have been run.
    """
    for extra in ("study", "report"):
        require(extra, "worth", str(out))
    both = repeats is not None and keys.get("minutes") is not None
    check("repeats", repeats, not both, "with minutes it must be left out")
    chosen = default_methods(layers) if methods is None else methods
    for name in chosen:
        check("methods", name, bool(name), "method names with commas between: fedper,ditto")
        catalogue.find("methods", "methods", name)
    cycles = CYCLES if repeats is None else math.ceil(repeats / FOLDS)
    if repeats is not None and repeats % FOLDS:
        print(
            f"worth: {cycles * FOLDS} repetitions, whole cycles of {FOLDS} folds", file=sys.stderr
        )
    over = [
        {key: value for key, value in layer.items() if key not in ("loggers", "seed")}
        for layer in layers
    ]
    begin = time.monotonic()
    plan = Plan(
        over,
        StudyFolder(out),
        chosen,
        cycles,
        again=again,
        begin=begin,
        **keys,
    )
    return answer(prepared(plan, optional=methods is None))


def default_methods(layers: Sequence[Layer]) -> list[str]:
    """`METHODS`, and that of the config where it is a federated one by name."""
    configured = [layer["method"] for layer in layers if "method" in layer]
    last = configured[-1] if configured else None
    name = last.get("name", last.get("class_path")) if isinstance(last, dict) else last
    new = isinstance(name, str) and name not in (*METHODS, "local", "fedavg")
    return [*METHODS, *([str(name)] if new else [])]


def answer(ready: Prepared) -> Measured:
    """Train, measure, and write the files."""
    from fl_lightning.lab.worth import output
    from fl_lightning.lab.worth.measure import measure
    from fl_lightning.lab.worth.scores import complete_folds, read

    plan, facts, out = ready.plan, ready.facts, ready.plan.folder.path
    with plan.folder.locked():
        cycles = _train(ready)
        folds = list(range(FOLDS)) if cycles else complete_folds(out, ready.labels)
        allowed = "two folds of all rows have not ended; the same command goes on with more minutes"
        check("minutes", plan.minutes, len(folds) > 1, allowed)
        silos = read(out, ready.labels, max(cycles, 1), facts, folds)
        margin = plan.margin
        if margin is not None and ready.metric != "mae":
            margin /= 100
        measured = measure(silos, ready.metric, margin, cycles)
        sections = _further(ready, measured) if cycles else []
        output.write(out, measured, sections)
    return measured


# ---------------------------------------------------------------- what was asked for


def _resolved(plan: Plan, cycles: int) -> tuple[Study, Config, list[tuple[Run, Config]]]:
    """The study of so many cycles with its base, and all its runs, for the longest length: those
    that the folder has, too."""
    seeds = set(range(cycles * FOLDS))
    if plan.folder:
        seeds |= set(Study.of(plan.folder.definition()).seeds)
    definition = Study.of(
        {
            "base": {},
            "methods": plan.entries,
            "seeds": sorted(seeds),
            "forced": True,
        }
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
    base, pairs = resolved(
        definition, over=[*plan.over, fixed], beneath=[{"data": {"min_samples": 1}}]
    )
    longest = [(run, _times(config, LENGTHS[-1])) for run, config in pairs]
    return definition, _times(base, LENGTHS[-1]), longest


def _times(config: Config, length: int) -> Config:
    rounds = length * config.federation.rounds
    return replace(
        config,
        federation=replace(config.federation, rounds=rounds),
    )


def prepared(plan: Plan, optional: bool = False) -> Prepared:
    """The plan, checked.

    Args:
        plan: as asked for.
        optional: methods that do not suit the data are left out.
    """
    definition, base, runs = _resolved(plan, 1)  # before torch is imported
    from fl_lightning.lab.study.workers import in_a_process
    from fl_lightning.lab.worth.further import Row
    from fl_lightning.lab.worth.runs import look

    metric = _checked(plan, base)
    plan.folder.check(
        definition,
        to_settings(base),
        [run for run, _ in runs],
    )
    changed = ", ".join(code.changes(plan.folder, runs))
    allowed = (
        f"runs in {plan.folder.path} were trained with another version: change it back, or give "
        f"another --out"
    )
    check("code", changed, not changed, allowed)
    samples.check_same(plan.folder, runs, runs)
    facts = in_a_process(look, runs[0][1])
    if optional and "partialpooling" in plan.methods and not facts.pools:
        return prepared(
            replace(
                plan,
                methods=[name for name in plan.methods if name != "partialpooling"],
            )
        )
    rounds = base.federation.rounds // LENGTHS[-1]
    rows = {
        row(str(cell["label"]), length): Row(
            replace(
                config,
                federation=replace(config.federation, rounds=rounds),
            ),
            cell.get("judge"),
            str(cell["label"]),
            length,
            cell["folder"],
        )
        for run, config in runs
        if run.seed == 0
        for cell in run.cells()
        for length in LENGTHS
    }
    if metric is None and facts.rare:
        facts, metric = replace(facts, notes=[facts.rare, *facts.notes]), "auroc"
    return Prepared(plan, rows, facts, metric or "accuracy")


def _checked(plan: Plan, base: Config) -> Name | None:
    """The metric, where one is named; `BadInput` for a base of which no verdicts can be given."""
    regression = base.data.task == "regression"
    allowed = "of a regression it is mae" if regression else "mae is for data.task regression"
    named = base.evaluation.metric
    known = "worth knows accuracy, balanced_accuracy and auroc: --metric"
    check("evaluation.metric", named, plan.metric is not None or named != "f1", known)
    metric: Any = plan.metric or ("mae" if regression else named)
    check("metric", metric, metric is None or (metric == "mae") == regression, allowed)
    share = base.federation.participation
    allowed = "worth trains every silo in every round: it must be 1"
    check("federation.participation", share, share == 1, allowed)
    share = base.data.held_out_clients
    check("data.held_out_clients", share, not share, "worth judges every silo: it must be 0")
    away = base.data.held_out
    check("data.held_out", away, away is None, "worth judges every silo: it must be null")
    return metric


# ---------------------------------------------------------------- training


def _train(ready: Prepared) -> int:
    """Run what is missing, with `minutes` cycle by cycle; the number of cycles that have ended."""
    from fl_lightning.lab.worth import words

    plan, facts = ready.plan, ready.facts
    for note in words.beforehand(facts, plan.cycles, ready.metric):
        print(f"worth: {note}", file=sys.stderr)
    if plan.minutes is None:
        _cycle(ready, plan.cycles)
        return plan.cycles
    last, more = 0.0, plan.more(len(facts.names))
    for cycle in range(1, MOST_CYCLES + 1):
        before = time.monotonic()
        if cycle > 1 and before + last * (1 + more) > plan.deadline:
            return cycle - 1
        try:
            trained = _cycle(ready, cycle)
        except OutOfTime:
            print(f"worth: {plan.minutes:g} minutes are over; what has run counts", file=sys.stderr)
            return cycle - 1
        last = time.monotonic() - before if trained else last
    return MOST_CYCLES


def _cycle(ready: Prepared, cycles: int) -> int:
    """Run what is missing of so many cycles; how many trainings that were."""
    from fl_lightning.lab.worth.runs import Task

    plan, out = ready.plan, ready.plan.folder.path
    definition, base, runs = _resolved(plan, cycles)
    plan.folder.write(
        definition,
        to_yaml(base),
        [run for run, _ in runs],
    )
    tasks = [
        Task(
            config,
            out / run.folder,
            out,
            {str(cell["label"]): cell.get("judge") for cell in run.cells()},
            plain=ready.facts.plain if run.entry.label == LOCAL[0] else (),
        )
        for run, config in runs
        if run.seed < cycles * FOLDS
    ]
    return _run_all(plan, tasks)


def _run_all(plan: Plan, tasks: Sequence[Task]) -> int:
    """Do the tasks that are not done, in workers; how many that were.

    Raises:
        OutOfTime: `minutes` are over.
        RunFailed: runs have failed; the others have been run.
    """
    from fl_lightning.lab.study.workers import run_all
    from fl_lightning.results import provenance

    provenance.look()  # before the workers are forked: they need not import it again
    jobs = [task for task in tasks if not task.done]
    if not jobs:
        return 0
    failures: dict[str, str] = {}
    count = worker_count(plan.workers, jobs[0].config)
    done = 0

    def check_time(numbers: list[int]) -> None:
        if time.monotonic() > plan.deadline:
            raise OutOfTime

    def stopped() -> str:
        progress = f"{done} of {len(jobs)} trainings done"
        return f"worth: stopped with {progress}; it goes on with: {plan.again}"

    work = run_all(
        _safely,
        jobs,
        count,
        plan.folder.path / "logs",
        check_time,
    )
    begin = time.monotonic()
    with when_stopped(stopped), contextlib.closing(work) as all_ended:
        for ended in all_ended:
            done += 1
            if ended.error is not None:
                failures[str(jobs[ended.job].folder)] = ended.error
            _tell(done, len(jobs), begin)
    plan.folder.write_failures(failures)
    if failures:
        name, why = next(iter(failures.items()))
        line = f"{len(failures)} of {len(jobs)} runs failed, the first, {name}: {why}"
        raise RunFailed(f"{line}; the same command tries again")
    return len(jobs)


def _safely(task: Task) -> str | None:
    """Do one task; None, or one line that says why it failed."""
    return run_safely(lambda: task.run(train))


def _tell(done: int, total: int, begin: float) -> None:
    """Say now and then how many trainings are done, and the time left."""
    left = (time.monotonic() - begin) / done * (total - done) / 60
    if done in (1, total) or done % max(1, total // 10) == 0:
        line = f"worth: {done} of {total} trainings, about {left:.1f} minutes left"
        print(line, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- beyond the gain


def _further(ready: Prepared, measured: Measured) -> list[Section]:
    """Train and read what is asked beyond the gain; tables of the page. What they hold is in
    `measured.consortium`."""
    from fl_lightning.lab.worth import further

    plan, facts, out = ready.plan, ready.facts, ready.plan.folder.path
    method, silos = ready.rows[measured.method], len(facts.names)
    alone = ready.rows[row(LOCAL[0], method.length)]
    new = further.newcomers(out, method, alone, silos)
    tasks = [*new]
    if plan.leave_one_out:
        tasks += further.without(out, method, silos)
    if plan.curve:
        tasks += further.curve(
            out,
            method,
            ready.rows[LOCAL[-1]],
            facts.plain,
        )
    parts: dict[str, tuple[Any, Section]] = {"costs": further.costs(out, measured, method)}
    try:
        _run_all(plan, tasks)
    except OutOfTime:
        print("worth: no time was left for what a new silo gets", file=sys.stderr)
    else:
        parts["newcomers"] = further.of_newcomers(new, measured)
        if plan.leave_one_out:
            parts["leave_one_out"] = further.of_without(out, method, measured, facts)
        if plan.curve:
            parts["curve"] = further.of_curve(out, measured, facts)
    measured.consortium |= {name: content for name, (content, _) in parts.items()}
    return [section for _, section in parts.values()]
