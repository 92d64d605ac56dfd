"""`fl-train worth`: trains every row on every fold, and answers for each silo whether to federate."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_lightning import catalogue
from fl_lightning.cli.resolve import to_settings, to_yaml
from fl_lightning.cli.settings import CommandLine, Layer, read_line
from fl_lightning.cli.study import resolve, run_safely
from fl_lightning.cli.trainings import Task, TooSlow, missing, run_all_of
from fl_lightning.config import Config, check
from fl_lightning.errors import BadInput, RunFailed
from fl_lightning.extras import require
from fl_lightning.study.grid import Run, Study

if TYPE_CHECKING:
    from fl_lightning.gains.page import Section
    from fl_lightning.gains.silos import Measured
    from fl_lightning.study.folder import StudyFolder

FOLDS = 5
"""Of a cycle. 5: with 10 intervals are no narrower for the same number of trainings (docs/decisions/0027)."""
CYCLES, MOST_CYCLES = 4, 10
"""Without --repeats; with --minutes at most. More than 4 hardly narrow an interval: samples decide then (simulated)."""
METHODS = ("fedper", "ditto", "selfkapc")
"""Without --methods: a shared body, a proximal term, a relation between clients."""
SLACK = 1.1
"""A further cycle is begun if it ends by so many times --minutes, as far as can be told."""
ONLY_LAST = 10**6
"""Rounds between evaluations: the last one is always scored, and no other is needed."""


@dataclasses.dataclass
class Plan:
    """What is to be trained, and where."""

    out: Path
    over: list[Layer]
    methods: list[str]
    metric: str
    minutes: float | None
    cycles: int
    workers: int | None = None
    leave_one_out: bool = False
    curve: bool = False

    def more(self, silos: int) -> float:
        """Trainings beyond the cycles, as a share of those of a cycle."""
        further = 2 * min(silos, FOLDS) + FOLDS * silos * self.leave_one_out + 6 * FOLDS * self.curve
        return further / (FOLDS * (len(self.methods) + 2))


def worth(argv: list[str]) -> None:
    """Run what is missing in the folder `--out`, and write and print the answer."""
    from fl_lightning.gains import output

    line = read_line(argv, "worth")
    measured = answer(line, ["fl-train", "worth", *argv])
    print(output.table(measured), end="")
    print(f"the page: {Path(line.values.out) / 'worth.html'}")


def answer(line: CommandLine, again: Sequence[str]) -> Measured:
    """Train, measure, and write the files of `--out`.

    Args:
        line: of `worth`.
        again: the command that goes on with it.

    Raises:
        BadInput: it cannot work, before anything is trained; or `--minutes` are too few for a cycle.
        RunFailed: runs have failed; the others have been run.
    """
    from fl_lightning.gains import output

    begin, values = time.monotonic(), line.values
    plan = _plan(line)
    folder, facts = _prepared(plan)
    with folder.locked():
        cycles = _train(plan, folder, facts, shlex.join(again), begin)
        measured = _measured(plan, facts, cycles, values.margin)
        sections = _further(plan, folder, measured, facts, shlex.join(again))
        output.write(plan.out, measured, sections)
    return measured


# ---------------------------------------------------------------- what was asked for


def _plan(line: CommandLine) -> Plan:
    values = line.values
    for extra in ("study", "report"):
        require(extra, "worth", values.out)
    check(
        "repeats", values.repeats, values.repeats is None or values.minutes is None, "with minutes it must be left out"
    )
    given = [layer["method"] for layer in line.layers if "method" in layer]
    layers = [{key: value for key, value in layer.items() if key != "loggers"} for layer in line.layers]
    for layer in layers:
        layer.pop("seed", None)
    if values.methods is None:
        named = given[-1].get("name", given[-1].get("class_path")) if given and isinstance(given[-1], dict) else None
        named = named or (given[-1] if given and isinstance(given[-1], str) else None)
        methods = list(METHODS)
        methods += [named] if named is not None and named not in (*METHODS, "local", "fedavg") else []
    else:
        methods = [word.strip() for word in values.methods.split(",")]
    for name in methods:
        check("methods", name, bool(name), "method names with commas between: fedper,ditto")
        catalogue.find("methods", "methods", name)
    cycles = CYCLES if values.repeats is None else math.ceil(values.repeats / FOLDS)
    if values.repeats is not None and values.repeats % FOLDS:
        print(f"worth: {cycles * FOLDS} repetitions, whole cycles of {FOLDS} folds", file=sys.stderr)
    return Plan(
        Path(values.out),
        layers,
        methods,
        values.metric,
        values.minutes,
        cycles,
        values.workers,
        values.leave_one_out,
        values.curve,
    )


def _resolved(plan: Plan, cycles: int) -> tuple[Study, Config, list[Run], list[Config]]:
    """The study of so many cycles with its base, all its runs and their configs: those that the folder has, too."""
    from fl_lightning.study.folder import StudyFolder

    folder, seeds = StudyFolder(plan.out), set(range(cycles * FOLDS))
    if folder:
        seeds |= set(Study.of(folder.definition()).seeds)
    definition = Study.of({"base": {}, "methods": plan.methods, "seeds": sorted(seeds), "forced": True})
    folds = {"folds": FOLDS, "test_seed": 0, "partition_seed": 0, "client_test": None, "validation": 0.0}
    fixed: Layer = {
        "data": folds | {"score_on": "test"}, "evaluation": {"every": ONLY_LAST},
        "callbacks": {"heatmaps": None, "progress": None},
    }  # fmt: skip
    base, runs, configs = resolve(definition, over=[*plan.over, fixed], beneath=[{"data": {"min_samples": 1}}])
    return definition, base, runs, configs


def _prepared(plan: Plan) -> tuple[StudyFolder, dict[str, Any]]:
    """The folder, checked, and the facts on the silos, looked at in a process of its own."""
    from fl_lightning.study.folder import StudyFolder

    definition, base, runs, configs = _resolved(plan, 1)
    regression = base.data.task == "regression"
    allowed = "of a regression it is mae" if regression else "mae is for data.task regression"
    metric = plan.metric if plan.metric is not None else "mae" if regression else "accuracy"
    check("metric", metric, (metric == "mae") == regression, allowed)
    plan.metric = metric
    share = base.federation.participation
    check("federation.participation", share, share == 1, "worth trains every silo in every round: it must be 1")
    share = base.data.held_out_clients
    check("data.held_out_clients", share, not share, "worth judges every silo: it must be 0")
    folder = StudyFolder(plan.out)
    folder.check(definition, to_settings(base), runs)
    return folder, _in_child(_look, configs[0], plan.out)


def _in_child(work: Any, *given: Any) -> dict[str, Any]:
    """What `work(*given)` returns, done in a process of its own: workers are forked from one without threads."""
    import tempfile

    import fl_lightning.gains.runs  # noqa: F401  before the process is forked
    from fl_lightning.study.workers import in_a_process

    with tempfile.TemporaryDirectory() as aside:
        file = Path(aside) / "answer.json"
        (error,) = in_a_process(_do, [(work, given, file)])
        if error is not None:
            raise RunFailed(error)
        content: dict[str, Any] = json.loads(file.read_text())
    if "error" in content:
        raise BadInput(*content["error"])
    return content


def _do(job: tuple[Any, tuple[Any, ...], Path]) -> str | None:
    work, given, file = job

    def done() -> None:
        try:
            content = work(*given)
        except BadInput as error:
            value = error.value if isinstance(error.value, int | float | str | None) else str(error.value)
            content = {"error": [error.key, value, error.allowed]}
        file.write_text(json.dumps(content))

    return run_safely(done)


def _look(config: Config, out: Path) -> dict[str, Any]:
    from fl_lightning.gains.runs import look

    return look(config)


# ---------------------------------------------------------------- training


def _train(plan: Plan, folder: StudyFolder, facts: dict[str, Any], line: str, begin: float) -> int:
    """Run what is missing, with `minutes` cycle by cycle; the number of cycles that have ended."""
    from fl_lightning.gains import words

    for note in words.beforehand(facts["names"], facts["sizes"], plan.cycles, facts.get("counts", ())):
        print(f"worth: {note}", file=sys.stderr)
    if plan.minutes is None:
        _cycle(plan, folder, plan.cycles, line, math.inf, begin)
        return plan.cycles
    limit, last, more = 60 * SLACK * plan.minutes, 0.0, plan.more(len(facts["names"]))
    for cycle in range(1, MOST_CYCLES + 1):
        before = time.monotonic()
        if cycle > 1 and before - begin + last * (1 + more) > limit:
            return cycle - 1
        try:
            trained = _cycle(plan, folder, cycle, line, math.inf if last else limit / (1 + more), begin)
        except TooSlow as error:
            if cycle > 1:
                return cycle - 1
            need = math.ceil(10 * error.seconds * (1 + more) / 60 / SLACK) / 10
            allowed = (
                f"one cycle of {FOLDS} folds, and what follows it, take about {need:g} minutes; what has run is kept"
            )
            raise BadInput("minutes", plan.minutes, allowed) from None
        last = time.monotonic() - before if trained else last
    return MOST_CYCLES


def _cycle(plan: Plan, folder: StudyFolder, cycles: int, line: str, limit: float, begin: float) -> int:
    """Run what is missing of so many cycles; how many trainings that were."""
    definition, base, runs, configs = _resolved(plan, cycles)
    folder.write(definition, to_yaml(base), runs)
    due = [(run, config) for run, config in zip(runs, configs, strict=True) if run.seed < cycles * FOLDS]
    jobs = _jobs(plan, folder, due)
    run_all_of(plan.workers, folder, jobs, configs[0], line, limit, begin)
    return len(jobs)


def _jobs(plan: Plan, folder: StudyFolder, due: Sequence[tuple[Run, Config]]) -> list[Task]:
    """Of each run that has not ended or not been scored what is to be done, fold by fold."""
    jobs: list[Task] = []
    for run, config in due:
        rows = {str(cell["label"]): cell.get("judge") for cell in run.cells()}
        jobs.append((config, folder.path / run.folder, plan.out, rows))
    return missing(jobs)


def _further(plan: Plan, folder: StudyFolder, measured: Measured, facts: dict[str, Any], line: str) -> list[Section]:
    """Train and read what is asked beyond the gain; tables of the page. What they hold is in `measured.consortium`."""
    from fl_lightning.gains import further

    _, _, runs, configs = _resolved(plan, 1)
    first = [(run, config) for run, config in zip(runs, configs, strict=True) if run.seed == 0]
    cells = [(cell, config) for run, config in first for cell in run.cells()]
    rows = {str(cell["label"]): (config, cell.get("judge")) for cell, config in cells}
    method, silos = measured.method, len(facts["names"])
    new = further.newcomers(plan.out, rows, method, silos, FOLDS)
    tasks = [*new]
    tasks += further.without(plan.out, rows, method, silos, FOLDS) if plan.leave_one_out else []
    tasks += further.curve(plan.out, rows, method, FOLDS) if plan.curve else []
    run_all_of(plan.workers, folder, missing(tasks), configs[0], line, math.inf, 0.0)
    own = next(cell["folder"] for cell, _ in cells if cell["label"] == method)
    parts: dict[str, tuple[Any, Section]] = {"costs": further.costs(plan.out, measured, str(own))}
    parts["newcomers"] = further.of_newcomers(new, method, "mae" if plan.metric == "mae" else "accuracy")
    if plan.leave_one_out:
        parts["leave_one_out"] = further.of_without(plan.out, measured, FOLDS, facts)
    if plan.curve:
        parts["curve"] = further.of_curve(plan.out, measured, FOLDS, facts)
    measured.consortium |= {name: content for name, (content, _) in parts.items()}
    return [section for _, section in parts.values()]


def _measured(plan: Plan, facts: dict[str, Any], cycles: int, margin: float | None) -> Measured:
    from fl_lightning.gains.measure import measure
    from fl_lightning.gains.scores import read

    _, _, runs, _ = _resolved(plan, 1)
    labels = [str(cell["label"]) for run in runs if run.seed == 0 for cell in run.cells()]
    recordings = {int(key): number for key, number in facts["recordings"].items()}
    silos = read(plan.out, labels, cycles, FOLDS, facts["names"], facts["sizes"], recordings)
    points = margin if margin is None or plan.metric == "mae" else margin / 100
    return measure(silos, plan.metric, points)  # type: ignore[arg-type]
