"""The command `fl-train tune`: the same search for every method on validation data, then a study
with the chosen values and other seeds."""

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
from fl_lightning.lab.study.chosen import UNTUNED, values_text
from fl_lightning.lab.study.folder import (
    PLACE,
    Busy,
    StudyFolder,
    check_new,
    explaining_damage,
    one_line,
)
from fl_lightning.lab.study.grid import MAX_LABEL_BYTES, ListedMethod, Pairs, Study, StudyRun, safe
from fl_lightning.lab.study.listing import WIDTH
from fl_lightning.lab.study.space import Dimension, space
from fl_lightning.results import owncode
from fl_lightning.results.folder import RunFolder
from fl_lightning.results.opening import say_when_stopped
from fl_lightning.results.result import RunResult
from fl_lightning.results.runs import tidy

if TYPE_CHECKING:
    from fl_lightning.lab.study.trials import ClaimedTrial, EndedTrial, Trials
    from fl_lightning.lab.study.tuned import Tuned

DEFAULTS: Layer = {"data": {"validation": 0.2}}
"""Settings that the base overrides. 0.2 is FedFomo's and PFLlib's share: with less, small clients
would have few validation samples."""
ON_VALIDATION: Layer = {"data": {"score_on": "validation"}}
"""Settings of all trials: they are scored on validation data."""
LOOK_SECONDS = 2.0
"""Seconds between looks at the journal for trials that have ended."""


@dataclass(frozen=True)
class Search:
    """The search for one method, which can be sent to a worker."""

    entry: ListedMethod
    folder: Path
    """Folder of the trials of all methods."""
    number: int
    """Number of trials."""
    seed: int
    """Seed of the trials' runs and of the sampler."""
    base: Config
    settings: list[dict[str, Any]]
    """Points of the grid: a trial has a run in each, and its score is their mean."""

    def metric(self) -> Metric:
        """The metric of the trials' scores, recognised by the keys of a finished run's
        `summary.json`; accuracy if no run has finished."""
        ended = next(self.folder.rglob("summary.json"), None)
        summary = {} if ended is None else RunFolder(ended.parent).read_summary()
        # `of_rows` looks at the columns' names only
        return of_rows([{name.removeprefix("final_"): 0.0 for name in summary}])

    @cached_property
    def dimensions(self) -> list[Dimension]:
        """The hyperparameters to search: those of `space` that neither the study's list of methods
        nor its grid sets.

        Raises:
            BadInput: a range differs between settings, in all of which a trial has the same values.
        """
        listed_arguments = set(self.entry.arguments).union(*self.entry.when.values())
        fixed = {f"method.{name}" for name in listed_arguments}
        fixed.update(self.entry.settings, *self.settings)
        first, *others = [space(self.config({}, setting), fixed) for setting in self.settings]
        ranges = {d.key: (d.space, d.start) for d in first}
        for setting, dimensions in zip(self.settings[1:], others, strict=True):
            ranges_here = {d.key: (d.space, d.start) for d in dimensions}
            differing = [
                key for key in ranges | ranges_here if ranges.get(key) != ranges_here.get(key)
            ]
            check(
                "grid",
                values_text(setting),
                not differing,
                f"{self.entry.label} has another range of {', '.join(differing)} there than in the "
                "first setting: set it in the study file, or tune these settings one by one",
            )
        return first

    def fingerprint(self) -> str:
        """The method's name, arguments and ranges as text, which must be the same when a search is
        resumed. Settings that all methods share are not in it."""
        entry = self.entry
        parts = [f"{entry.name} {entry.arguments | entry.settings}"]
        parts += [f"when {dict(entry.when)}"] if entry.when else []
        parts += [f"{d.key}: {d.space} from {d.start!r}" for d in self.dimensions]
        return "; ".join(parts)

    def trials(self) -> Trials:
        """The trials in the journal."""
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
        """The config of a trial's run in one setting; the run does not read test data. Raises
        `BadInput` if the method refuses the values."""
        from fl_lightning.lab.study.tuned import split_values

        arguments, settings = split_values(values)
        entry = dataclasses.replace(
            self.entry,
            arguments=self.entry.arguments | arguments,
            settings=self.entry.settings | settings,
        )
        layers = launch.run_layers(StudyRun(setting, entry, self.seed))
        config = resolve([*layers, ON_VALIDATION], self.base)
        return dataclasses.replace(config, seed=self.seed)

    def configs(self) -> list[Config]:
        """The configs of runs with the base's values, one for each setting."""
        return [self.config({}, setting) for setting in self.settings]


@dataclass(frozen=True)
class TuneOptions(launch.StudyOptions):
    """Options of `fl_lightning.tune`; `out` is the folder of the search."""

    trials: int = 20
    metric: str | None = None
    seed: int = 1000
    untuned: bool = False
    runs_study: bool = True


def tune(
    content: Any,
    overrides: list[Layer],
    options: TuneOptions,
) -> None:
    """Searches each method's hyperparameters, writes the results, and runs the study with the
    chosen values.

    Args:
        content: content of the study file.
        overrides: settings that override the study's base.
        options: the folder of the search, and how runs are trained.
    """
    for extra in ("tune", "study"):
        require(extra, "tune", options.out)
    from fl_lightning.lab.study.tuned import Tuned, few_trials_warning

    launch.check_overrides(overrides)
    if options.metric is not None:
        overrides = [*overrides, {"evaluation": {"metric": options.metric}}]
    study = Study.of(content)
    check(
        "seed",
        options.seed,
        options.seed not in study.seeds,
        "it must not be a seed of the study: give another",
    )
    if options.untuned:
        _check_untuned_labels(study)
    base, pairs = launch.resolved(study, overrides, [DEFAULTS])
    base = _with_one_test_part(study, base, pairs)
    for _, config in pairs:
        share = config.data.validation
        check(
            "data.validation",
            share,
            share > 0,
            "it must be above 0, such as 0.2: tune chooses on validation data",
        )
    out = Path(options.out)
    settings = study.settings()
    # also of the forced baselines: each has another judge, and so a search of its own
    searches = [
        Search(
            entry,
            out / "trials",
            options.trials,
            options.seed,
            base,
            settings,
        )
        for entry in study.entries(full_participation=False)
    ]
    configs = [config for search in searches for config in search.configs()]
    _write_request(out, study, searches, configs, options.accept_changed_code)
    launch.fetch_datasets(configs)
    warning = few_trials_warning(options.trials)
    if warning:  # before hours are spent
        print(f"tune: {warning}", file=sys.stderr)
    line = command.line("tune", "STUDY", "--out", options.out)
    _search(searches, out, launch.worker_count(options.workers, base), line)
    tuned = []
    for search in searches:
        ended = search.trials().ended()
        tuned.append(Tuned(search.entry, ended, search.metric(), search.dimensions))
    missing = sum(options.trials - len(method.ended) for method in tuned)
    if missing:
        print(
            f"tune: {missing} trials are at work in other processes; the last of them goes on, "
            f"or: {line}"
        )
        return
    _choose(out, to_yaml(base), study, tuned, options)
    if options.runs_study:
        _run_study(out, options, line)


# ---------------------------------------------------------------- the definition


def _with_one_test_part(
    study: Study,
    base: Config,
    pairs: Pairs,
) -> Config:
    """Return `base` with `data.test_seed` set to 0 if it is null, the default.

    All seeds then have the same test part, so that no trial trains on samples on which the study
    tests.

    Raises:
        BadInput: the grid sets `data.test_seed` to null.
    """
    if "data.test_seed" in study.varied():
        for _, config in pairs:
            test_seed = config.data.test_seed
            is_number = test_seed is not None
            check(
                "data.test_seed",
                test_seed,
                is_number,
                "it must be a number: with null, trials would train on test samples of the "
                "study's seeds",
            )
    test_seed = base.data.test_seed or 0
    return dataclasses.replace(base, data=dataclasses.replace(base.data, test_seed=test_seed))


def _check_untuned_labels(study: Study) -> None:
    """Raise `BadInput` if the label of a row with untuned values would be too long or another
    method's."""
    entries = study.entries(full_participation=False)
    labels = {entry.label for entry in entries}
    for entry in entries:
        key, label = f"{entry.key}.label", f"{entry.label} {UNTUNED}"
        check(
            key,
            entry.label,
            safe(label) == label,
            f"{label!r} is too long: give a shorter `label` ({MAX_LABEL_BYTES} bytes at most)",
        )
        check(
            key,
            entry.label,
            label not in labels,
            f"another method has the label {label!r}: give one of them another `label`",
        )


def _write_request(
    out: Path,
    study: Study,
    searches: list[Search],
    configs: list[Config],
    accept: bool,
) -> None:
    """Write the definition of the search to `tune.yaml`. Raises `BadInput` unless the folder is new
    or holds this search; methods and seeds of the study may be added."""
    first = searches[0]
    base = to_settings(first.base)
    for key in PLACE:
        group, _, name = key.partition(".")
        del base[group][name]
    code: dict[str, str] = {}
    for config in configs:
        code |= owncode.current_digests(config)
    now: dict[str, Any] = {
        "trials": first.number,
        "seed": first.seed,
        "base": base,
        "grid": study.grid,
        "methods": {search.entry.label: search.fingerprint() for search in searches},
        "code": code,
        "data": sorted(samples.digests(configs).values()),
    }
    file = out / "tune.yaml"
    if file.is_file():
        earlier = _read_request(file)
        for key in ("trials", "seed", "base", "grid"):
            check(
                key,
                ...,
                earlier[key] == now[key],
                f"the search in {out} began with another value: give this search another --out",
            )
        now["methods"] = now["methods"] | earlier["methods"]
        for search in searches:
            label = search.entry.label
            check(
                "methods",
                label,
                now["methods"][label] == search.fingerprint(),
                f"the search in {out} began with other settings of this label: give it another "
                "`label`",
            )
        earlier_code = earlier["code"]
        changed = owncode.changed_files(earlier_code, code)
        check(
            "code",
            ", ".join(changed),
            accept or not changed,
            f"the trials in {out} began with another version: change it back, give this search "
            "another --out, or go on with --accept_changed_code",
        )
        now["code"] = earlier_code | code
        is_same = not now["data"] or earlier.get("data", now["data"]) == now["data"]
        check(
            "data.root",
            first.base.data.root,
            is_same,
            f"the data have changed since trials in {out} trained on them: restore them, or give "
            "this search another --out",
        )
        first.trials().ended()  # raises `BadInput` for a damaged journal before anything is written
    else:
        check_new(out, [file.name, aside_of(file).name], file.name)
    write_whole(file, yaml.safe_dump(now, sort_keys=False, allow_unicode=True))


def _read_request(file: Path) -> dict[str, Any]:
    """The definition of an earlier search in `tune.yaml`; raises `BadInput` if it cannot be
    read."""
    advice = "restore it, or give this search another --out"
    with explaining_damage("out", str(file.parent), f"{file} is damaged", advice):
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
    """Run the missing trials of all methods in `count` workers.

    A worker keeps to one method until its trials are done, so that trials do not depend on the
    number of workers; if there are more workers than methods, several share one.
    """
    from fl_lightning.lab.study.workers import run_all

    jobs = searches * -(-count // len(searches))
    progress = _TrialProgress(searches)
    failures = {}
    with say_when_stopped(lambda: f"tune: stopped; it goes on with: {line}"):
        all_ended = run_all(
            run_trials, jobs, count, out / "logs", lambda running: progress.print_ended()
        )
        for ended in all_ended:
            if ended.error is not None:
                failures[jobs[ended.job].entry.label] = ended.error
        progress.print_ended(last=True)
    if failures:
        label, reason = next(iter(failures.items()))
        more = f" ({len(failures)} methods failed)" if len(failures) > 1 else ""
        raise RunFailed(f"{label}: {reason}{more}; the same command tries it again")


class _TrialProgress:
    """Prints a line for each trial that ends, in this or another process."""

    def __init__(self, searches: list[Search]) -> None:
        self._searches = [(search, search.trials()) for search in searches]
        self._printed = [len(trials.ended()) for _, trials in self._searches]
        self._last = time.monotonic()

    def print_ended(self, last: bool = False) -> None:
        """Print the trials that have ended since the last look, if `LOOK_SECONDS` have passed or it
        is the last look."""
        if time.monotonic() - self._last < LOOK_SECONDS and not last:
            return
        self._last = time.monotonic()
        for k, (search, trials) in enumerate(self._searches):
            ended = trials.ended()
            for number in range(self._printed[k], len(ended)):
                line = f"[{number + 1}/{search.number}] {_trial_line(search, ended[number])}"
                print(line, file=sys.stderr, flush=True)
            self._printed[k] = len(ended)


def _trial_line(search: Search, trial: EndedTrial) -> str:
    metric = search.metric()
    result = f"refused: {trial.why}"
    if trial.score is not None:
        result = metric.shown(metric.merit(trial.score))
    return f"{search.entry.label}, trial {trial.number} ({values_text(trial.values)}): {result}"


def run_trials(search: Search) -> str | None:
    """Run trials of one method until none is left, as a worker's job; return None, or a line that
    says why it failed."""

    def work() -> None:
        trials = search.trials()
        while (claim := trials.claim()) is not None:
            try:
                _run_trial(search, claim)
            finally:
                claim.release()

    return launch.run_safely(work)


def _run_trial(search: Search, claim: ClaimedTrial) -> None:
    """Train the runs of a trial and record their mean score. Values with which a run fails are
    refused. If the first trial fails, whose values are the base's, or the machine is at fault, the
    error ends the search of the method."""
    scores = []
    try:
        for setting in search.settings:
            name = ",".join(f"{key}={value}" for key, value in setting.items())
            place = claim.folder / safe(name or "run")
            config = search.config(claim.values, setting)
            if not (place / "summary.json").is_file():
                launch.train(config, place, accept=True)  # `_write_request` has checked its code
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
        shutil.rmtree(checkpoints)  # the models of trials are not needed


# ---------------------------------------------------------------- choosing


def _choose(
    out: Path,
    base: str,
    study: Study,
    tuned_methods: list[Tuned],
    options: TuneOptions,
) -> None:
    """Write and print the results. Raises `BadInput` before that if the folder `study` has trained
    rows that the new study file would lack."""
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
    """Runs the study with the chosen values in the folder `study`."""
    chosen = Study.of(studyfile.read(str(out / "tuned.yaml")))
    study_options = dataclasses.replace(options, out=str(out / "study"))
    try:
        print(launch.run_study(chosen, [], study_options, line))
    except Busy:
        print(f"tune: another process runs the study in {study_options.out}")
