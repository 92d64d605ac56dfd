"""The same search for every method on validation data, then the choices on fresh
seeds."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console

from fl_lightning.configuration.config import Config, check
from fl_lightning.configuration.files import Layer
from fl_lightning.configuration.resolve import resolve, to_settings, to_yaml
from fl_lightning.foundation import command
from fl_lightning.foundation.csvtable import as_csv
from fl_lightning.foundation.errors import BadInput, MachineFailed, RunFailed
from fl_lightning.foundation.extras import require
from fl_lightning.foundation.files import aside_of, write_whole
from fl_lightning.foundation.metric import Metric, of_rows
from fl_lightning.lab.study import launch, samples, studyfile
from fl_lightning.lab.study.chosen import UNTUNED, words
from fl_lightning.lab.study.folder import (
    PLACE,
    Busy,
    StudyFolder,
    check_new,
    one_line,
    reading,
)
from fl_lightning.lab.study.grid import LONGEST, ListedMethod, Pairs, Study, StudyRun, safe
from fl_lightning.lab.study.listing import WIDTH
from fl_lightning.lab.study.space import Dimension, space
from fl_lightning.results import owncode
from fl_lightning.results.folder import RunFolder
from fl_lightning.results.opening import when_stopped
from fl_lightning.results.result import RunResult
from fl_lightning.results.runs import tidy

if TYPE_CHECKING:
    from fl_lightning.lab.study.trials import ClaimedTrial, EndedTrial, Trials
    from fl_lightning.lab.study.tuned import Tuned

BENEATH: Layer = {"data": {"validation": 0.2}}
"""Unless the base says otherwise. 0.2: FedFomo's and PFLlib's share: with less, small clients would
have but a few samples to be judged by."""
ON_VALIDATION: Layer = {"data": {"score_on": "validation"}}
LOOK_SECONDS = 2.0
"""Seconds between looks at the journal for trials that have ended."""


@dataclass(frozen=True)
class Search:
    """The search for one method, as a worker is given it."""

    entry: ListedMethod
    folder: Path
    """Of all searches."""
    number: int
    """Trials."""
    seed: int
    """Of the trials' runs, and of what they try."""
    base: Config
    settings: list[dict[str, Any]]
    """Points of the grid: a trial is a run in each, and its score their mean."""

    def metric(self) -> Metric:
        """The judge's metric, by the keys of the first summary below the folder; accuracy before
        there is one."""
        ended = next(self.folder.rglob("summary.json"), None)
        summary = {} if ended is None else RunFolder(ended.parent).read_summary()
        # names of columns decide, values do not
        return of_rows([{name.removeprefix("final_"): 0.0 for name in summary}])

    @cached_property
    def dimensions(self) -> list[Dimension]:
        """The arguments that neither the list nor the grid sets. `BadInput` where they depend on
        the setting: a trial has the same values in all."""
        listed = set(self.entry.arguments).union(*self.entry.when.values())
        fixed = {f"method.{name}" for name in listed}
        fixed.update(self.entry.settings, *self.settings)
        first, *others = [space(self.config({}, setting), fixed) for setting in self.settings]
        ranges = {d.key: (d.space, d.start) for d in first}
        for setting, dimensions in zip(self.settings[1:], others, strict=True):
            here = {d.key: (d.space, d.start) for d in dimensions}
            differ = [key for key in ranges | here if ranges.get(key) != here.get(key)]
            check(
                "grid",
                words(setting),
                not differ,
                f"{self.entry.label} has another range of {', '.join(differ)} there than in the "
                "first setting: set it in the study file, or tune these settings one by one",
            )
        return first

    def record(self) -> str:
        """Text of all that decides its trials and that searches do not have in common."""
        entry = self.entry
        parts = [f"{entry.name} {entry.arguments | entry.settings}"]
        parts += [f"when {dict(entry.when)}"] if entry.when else []
        parts += [f"{d.key}: {d.space} from {d.start!r}" for d in self.dimensions]
        return "; ".join(parts)

    def trials(self) -> Trials:
        """As the journal has them."""
        from fl_lightning.lab.study.trials import Trials

        return Trials(
            self.folder,
            self.entry.label,
            self.dimensions,
            self.number,
            self.seed,
        )

    def config(
        self,
        values: dict[str, Any],
        setting: dict[str, Any],
    ) -> Config:
        """Of a trial's run in one setting; test data are not read. `BadInput` where the method
        refuses the values."""
        from fl_lightning.lab.study.tuned import split_values

        arguments, settings = split_values(values)
        entry = dataclasses.replace(
            self.entry,
            arguments=self.entry.arguments | arguments,
            settings=self.entry.settings | settings,
        )
        layers = launch.layers_of(StudyRun(setting, entry, self.seed))
        config = resolve([*layers, ON_VALIDATION], self.base)
        return dataclasses.replace(config, seed=self.seed)

    def configs(self) -> list[Config]:
        """Of runs with the base's values, in each setting."""
        return [self.config({}, setting) for setting in self.settings]


@dataclass(frozen=True)
class TuneOptions(launch.StudyOptions):
    """How methods are searched (`fl_lightning.tune`); `out` is the search's folder."""

    trials: int = 20
    metric: str | None = None
    seed: int = 1000
    untuned: bool = False
    runs_study: bool = True


def tune(
    content: Any,
    over: list[Layer],
    options: TuneOptions,
) -> None:
    """Searches for each method's arguments, writes what was found, and runs the study of the
    choices.

    Args:
        content: of the study's file.
        over: settings over those of its base.
        options: the search's folder, and how it is run.
    """
    for extra in ("tune", "study"):
        require(extra, "tune", options.out)
    from fl_lightning.lab.study.tuned import Tuned, few

    launch.check_over(over)
    if options.metric is not None:
        over = [*over, {"evaluation": {"metric": options.metric}}]
    study = Study.of(content)
    check(
        "seed",
        options.seed,
        options.seed not in study.seeds,
        "the study judges on this seed, which trials must not see: give another",
    )
    if options.untuned:
        _check_labels(study)
    base, pairs = launch.resolved(study, over, [BENEATH])
    base = _with_one_test_part(study, base, pairs)
    for _, config in pairs:
        share = config.data.validation
        check(
            "data.validation",
            share,
            share > 0,
            "tune chooses on validation data: above 0",
        )
    out = Path(options.out)
    settings = study.settings()
    # forced rows among them: each has its own judge, and so its own search
    searches = [
        Search(
            entry,
            out / "trials",
            options.trials,
            options.seed,
            base,
            settings,
        )
        for entry in study.entries(everyone=False)
    ]
    configs = [config for search in searches for config in search.configs()]
    _write_request(out, study, searches, configs, options.accept_changed_code)
    launch.fetch(configs)
    warning = few(options.trials)
    if warning:  # before the search, whose hours would otherwise be spent
        print(f"tune: {warning}", file=sys.stderr)
    line = command.line("tune", "STUDY", "--out", options.out)
    _search(searches, out, launch.worker_count(options.workers, base), line)
    tuned = []
    for search in searches:
        ended = search.trials().ended()
        tuned.append(Tuned(search.entry, ended, search.metric(), search.dimensions))
    missing = sum(options.trials - len(method.ended) for method in tuned)
    if missing:
        others = f"{missing} trials are at work in other processes"
        print(f"tune: {others}; the last of them goes on, or: {line}")
        return
    _choose(out, to_yaml(base), study, tuned, options)
    if options.runs_study:
        _run_study(out, options, line)


# ---------------------------------------------------------------- what was asked for


def _with_one_test_part(
    study: Study,
    base: Config,
    pairs: Pairs,
) -> Config:
    """`base` with `data.test_seed: 0` where it has null, as any resolved base has unless it was
    set: with one test part for trials and study, no trial trains on what the study tests.
    `BadInput` for a grid that has null."""
    if "data.test_seed" in study.varied():
        trained = "with null, trials would train on test samples of the study's seeds"
        for _, config in pairs:
            test_seed = config.data.test_seed
            is_number = test_seed is not None
            check(
                "data.test_seed",
                test_seed,
                is_number,
                f"it must be a number: {trained}",
            )
    test_seed = base.data.test_seed or 0
    return dataclasses.replace(base, data=dataclasses.replace(base.data, test_seed=test_seed))


def _check_labels(study: Study) -> None:
    """Raise `BadInput` where the study of the choices would refuse the label of a row with untuned
    settings."""
    entries = study.entries(everyone=False)
    labels = {entry.label for entry in entries}
    for entry in entries:
        key, label = f"{entry.key}.label", f"{entry.label} {UNTUNED}"
        check(
            key,
            entry.label,
            safe(label) == label,
            f"{label!r} is too long: {LONGEST} bytes at most",
        )
        check(
            key,
            entry.label,
            label not in labels,
            f"another method is called {label!r}",
        )


def _write_request(
    out: Path,
    study: Study,
    searches: list[Search],
    configs: list[Config],
    accept: bool,
) -> None:
    """Write what is asked for to `tune.yaml`. `BadInput` unless the folder is new, or holds this
    very search: it may gain methods and (fresh) seeds."""
    first = searches[0]
    base = to_settings(first.base)
    for key in PLACE:
        group, _, name = key.partition(".")
        del base[group][name]
    code: dict[str, str] = {}
    for config in configs:
        code |= owncode.now(config)
    now: dict[str, Any] = {
        "trials": first.number,
        "seed": first.seed,
        "base": base,
        "grid": study.grid,
        "methods": {search.entry.label: search.record() for search in searches},
        "code": code,
        "data": sorted(samples.digests(configs).values()),
    }
    file = out / "tune.yaml"
    if file.is_file():
        before = _request(file)
        for key in ("trials", "seed", "base", "grid"):
            check(
                key,
                ...,
                before[key] == now[key],
                f"the search in {out} began otherwise: give this one an --out of its own",
            )
        now["methods"] = now["methods"] | before["methods"]
        for search in searches:
            label = search.entry.label
            check(
                "methods",
                label,
                now["methods"][label] == search.record(),
                f"the search in {out} has it otherwise: give this one a `label` of its own",
            )
        earlier_code = before["code"]
        changed = owncode.changed(earlier_code, code)
        check(
            "code",
            ", ".join(changed),
            accept or not changed,
            f"the trials in {out} began with another version: change it back, give this search "
            "another --out, or go on with --accept_changed_code",
        )
        now["code"] = earlier_code | code
        is_same = not now["data"] or before.get("data", now["data"]) == now["data"]
        check(
            "data.root",
            first.base.data.root,
            is_same,
            f"the data have changed since trials in {out} trained on them: restore them, or give "
            "this search another --out",
        )
        first.trials().ended()  # `BadInput` for a damaged journal, before anything is written
    else:
        check_new(out, [file.name, aside_of(file).name], file.name)
    write_whole(file, yaml.safe_dump(now, sort_keys=False, allow_unicode=True))


def _request(file: Path) -> dict[str, Any]:
    """What an earlier call has written to `tune.yaml`; `BadInput` if it cannot be read."""
    advice = "restore it, or give this search another --out"
    with reading("out", str(file.parent), f"{file} is damaged", advice):
        content = {
            "code": {},
            **yaml.safe_load(file.read_text(encoding="utf-8")),
        }
        kinds = {
            "trials": int,
            "seed": int,
            "base": dict,
            "grid": dict,
            "methods": dict,
            "code": dict,
        }
        for key, kind in kinds.items():
            if not isinstance(content[key], kind):
                raise TypeError(f"{key} is no {kind.__name__}")
    return content


# ---------------------------------------------------------------- searching


def _search(
    searches: list[Search],
    out: Path,
    count: int,
    line: str,
) -> None:
    """Run all trials that are missing, in `count` workers.

    A worker has a method to itself until its trials are done, so that what they try does not depend
    on how many workers there are; where there are more workers than methods, several share one.
    """
    from fl_lightning.lab.study.workers import run_all

    jobs = searches * -(-count // len(searches))
    teller = _Teller(searches)
    failures = {}
    with when_stopped(lambda: f"tune: stopped; it goes on with: {line}"):
        all_ended = run_all(run_trials, jobs, count, out / "logs", lambda running: teller.tell())
        for ended in all_ended:
            if ended.error is not None:
                failures[jobs[ended.job].entry.label] = ended.error
        teller.tell(last=True)
    if failures:
        label, reason = next(iter(failures.items()))
        more = f" ({len(failures)} methods failed)" if len(failures) > 1 else ""
        raise RunFailed(f"{label}: {reason}{more}; the same command tries it again")


class _Teller:
    """Says of each trial of this call that it has ended: a line each."""

    def __init__(self, searches: list[Search]) -> None:
        self._searches = [(search, search.trials()) for search in searches]
        self._told = [len(trials.ended()) for _, trials in self._searches]
        self._last = time.monotonic()

    def tell(self, last: bool = False) -> None:
        """Look, where the last look is long enough ago."""
        if time.monotonic() - self._last < LOOK_SECONDS and not last:
            return
        self._last = time.monotonic()
        for k, (search, trials) in enumerate(self._searches):
            ended = trials.ended()
            for number in range(self._told[k], len(ended)):
                line = f"[{number + 1}/{search.number}] {_line(search, ended[number])}"
                print(line, file=sys.stderr, flush=True)
            self._told[k] = len(ended)


def _line(search: Search, trial: EndedTrial) -> str:
    metric = search.metric()
    result = f"refused: {trial.why}"
    if trial.score is not None:
        result = metric.shown(metric.merit(trial.score))
    return f"{search.entry.label}, trial {trial.number} ({words(trial.values)}): {result}"


def run_trials(search: Search) -> str | None:
    """A worker's job: trials of one method until none is left; None, or one line that says why it
    failed."""

    def work() -> None:
        trials = search.trials()
        while (claim := trials.claim()) is not None:
            try:
                _run_trial(search, claim)
            finally:
                claim.let_go()

    return launch.run_safely(work)


def _run_trial(search: Search, claim: ClaimedTrial) -> None:
    """The runs of a trial, and their mean score. Values with which they fail are refused; where the
    first trial's fail, which are the base's own, or the machine is at fault, the method is not
    tuned."""
    scores = []
    try:
        for setting in search.settings:
            name = ",".join(f"{key}={value}" for key, value in setting.items())
            place = claim.folder / safe(name or "run")
            config = search.config(claim.values, setting)
            if not (place / "summary.json").is_file():
                launch.train(config, place, accept=True)  # `_write_request` has looked at its code
            final = tidy([RunResult(place)])
            metric = search.metric()
            mean = final.value[final.metric == metric.name].mean()
            scores.append(metric.merit(float(mean)))
    except (BadInput, RunFailed) as error:
        is_of_machine = isinstance(error, MachineFailed)
        if claim.number == 0 or is_of_machine or getattr(error, "key", "") in ("out", "name"):
            raise
        claim.refuse(one_line(error))
    else:
        claim.tell(sum(scores) / len(scores))
    for checkpoints in claim.folder.glob("*/checkpoints"):
        shutil.rmtree(checkpoints)  # nobody asks for the models of a trial


# ---------------------------------------------------------------- choosing


def _choose(
    out: Path,
    base: str,
    study: Study,
    tuned_methods: list[Tuned],
    options: TuneOptions,
) -> None:
    """Write and print what was found. `BadInput`, and nothing is written, where the study of the
    choices would refuse the folder `study`: it has trained rows that are no longer listed, whose
    choices the tables would lose."""
    from fl_lightning.lab.study import tuned

    content = tuned.study_file(base, tuned_methods, study.seeds, study.grid, options.untuned)
    folder = StudyFolder(out / "study")
    if folder or options.runs_study:
        launch.resolved_in(folder, Study.of(yaml.safe_load(content)))
    write_whole(out / "tuned.csv", as_csv([method.row() for method in tuned_methods]))
    write_whole(out / "trials.csv", as_csv(tuned.trial_rows(tuned_methods)))
    write_whole(out / "tuned.yaml", content)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    console.print(tuned.table(tuned_methods))
    for method in tuned_methods:
        for warning in method.warnings():
            print(f"{method.entry.label}: {warning}")


def _run_study(
    out: Path,
    options: TuneOptions,
    line: str,
) -> None:
    """Runs the study of the choices, an ordinary study folder."""
    chosen = Study.of(studyfile.read(str(out / "tuned.yaml")))
    inner = dataclasses.replace(options, out=str(out / "study"))
    try:
        print(launch.start(chosen, [], inner, line))
    except Busy:
        print(f"tune: another process runs the study in {inner.out}")
