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
from fl_lightning.lab.study.folder import PLACE, Busy, StudyFolder
from fl_lightning.lab.study.grid import LONGEST, Entry, Run, Study, safe
from fl_lightning.lab.study.launch import Options
from fl_lightning.lab.study.listing import WIDTH
from fl_lightning.lab.study.space import Dimension, space
from fl_lightning.results import owncode
from fl_lightning.results.folder import RunFolder
from fl_lightning.results.opening import when_stopped
from fl_lightning.results.result import RunResult
from fl_lightning.results.runs import tidy

if TYPE_CHECKING:
    from fl_lightning.lab.study.trials import Claim, Ended, Trials
    from fl_lightning.lab.study.tuned import Tuned

BENEATH: Layer = {"data": {"validation": 0.2}}
"""Unless the base says otherwise. 0.2: FedFomo's and PFLlib's share: with less, small clients would
have but a few samples to be judged by."""
LOOK_SECONDS = 2.0
"""Seconds between looks at the journal for trials that have ended."""


@dataclass(frozen=True)
class Search:
    """The search for one method, as a worker is given it."""

    entry: Entry
    folder: Path
    """Of all searches."""
    number: int
    """Trials."""
    seed: int
    """Of the trials' runs, and of what they try."""
    base: Config
    settings: list[dict[str, Any]]
    """Points of the grid: a trial is a run in each, and its score their mean."""

    @property
    def metric(self) -> Metric:
        """What runs are judged by, as the first that has ended says."""
        ended = next(self.folder.rglob("summary.json"), None)
        summary = {} if ended is None else RunFolder(ended.parent).read_summary()
        return of_rows([{name.removeprefix("final_"): 0.0 for name in summary}])

    @cached_property
    def dimensions(self) -> list[Dimension]:
        """What is searched: what neither the list nor the grid sets. `BadInput` where it depends on
        the setting: a trial has the same values in all."""
        listed = self.entry.arguments.keys() | {
            name for some in self.entry.when.values() for name in some
        }
        fixed = (
            {f"method.{name}" for name in listed}
            | self.entry.settings.keys()
            | {k for s in self.settings for k in s}
        )
        every = [space(self.config({}, setting), fixed) for setting in self.settings]
        ranges = [{d.key: (d.space, d.start) for d in dimensions} for dimensions in every]
        for setting, here in zip(self.settings, ranges, strict=True):
            differ = ", ".join(
                key for key in ranges[0] | here if ranges[0].get(key) != here.get(key)
            )
            allowed = (
                f"{self.entry.label} has another range of {differ} there than in the first setting"
            )
            allowed = f"{allowed}: set it in the study file, or tune these settings one by one"
            check("grid", words(setting), not differ, allowed)
        return every[0]

    def record(self) -> str:
        """What decides its trials, but for what all searches have in common."""
        tried = [f"{d.key}: {d.space} from {d.start!r}" for d in self.dimensions]
        when = [f"when {dict(self.entry.when)}"] if self.entry.when else []
        return "; ".join(
            [f"{self.entry.name} {self.entry.arguments | self.entry.settings}", *when, *tried]
        )

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

    def config(self, values: dict[str, Any], setting: dict[str, Any]) -> Config:
        """Of a trial's run in one setting; test data are not read. `BadInput` where the method
        refuses the values."""
        from fl_lightning.lab.study.tuned import split_values

        arguments, settings = split_values(values)
        entry = dataclasses.replace(
            self.entry,
            arguments=self.entry.arguments | arguments,
            settings=self.entry.settings | settings,
        )
        layers = [
            *launch.layers_of(Run(setting, entry, self.seed)),
            {"data": {"score_on": "validation"}},
        ]
        return dataclasses.replace(
            resolve(layers, self.base),
            seed=self.seed,
        )


def tune(
    content: Any,
    over: list[Layer],
    search: tuple[int, str | None, int, bool, bool],
    options: Options,
) -> None:
    """Searches for each method's arguments, writes what was found, and runs the study of the
    choices.

    Args:
        content: of the study's file.
        over: settings over those of its base.
        search: trials of each method, the metric that chooses, their seed, whether the settings
            that the search began from are evaluated, too, and whether the study is run.
        options: the search's folder, and how it is run.
    """
    trials, metric, seed, untuned, runs_study = search
    for extra in ("tune", "study"):
        require(extra, "tune", options.out)
    from fl_lightning.lab.study.tuned import Tuned, few

    launch.check_over(over)
    over = [*over, {"evaluation": {"metric": metric}}] if metric else over
    study = Study.of(content)
    allowed = "the study has it, and is to judge on seeds unseen"
    check("seed", seed, seed not in study.seeds, allowed)
    if untuned:
        _check_labels(study)
    base, _, configs = launch.resolved(study, over=over, beneath=[BENEATH])
    base = _with_one_test_part(study, base, configs)
    for share in (config.data.validation for config in configs):
        check("data.validation", share, share > 0, "tune chooses on validation data: above 0")
    out = Path(options.out)
    # forced rows among them: each has its own judge, and so its own search
    entries = study.entries(everyone=False)
    searches = [
        Search(
            entry,
            out / "trials",
            trials,
            seed,
            base,
            study.settings(),
        )
        for entry in entries
    ]
    _check_same(
        out,
        to_settings(base),
        study,
        searches,
        options.accept_changed_code,
    )
    on_validation = [
        dataclasses.replace(
            c,
            data=dataclasses.replace(c.data, score_on="validation"),
        )
        for c in configs
    ]
    launch.fetch(on_validation)
    if line_of_few := few(trials):  # before the search, whose hours would otherwise be spent
        print(f"tune: {line_of_few}", file=sys.stderr)
    line = command.line("tune", "STUDY", "--out", options.out)
    _search(
        searches,
        out,
        launch.worker_count(options.workers, configs[0]),
        line,
    )
    ended = [(search, search.trials().ended()) for search in searches]
    left = sum(search.number - len(done) for search, done in ended)
    if left:
        print(
            f"tune: {left} trials are at work in other processes; the last of them goes on, or: "
            f"{line}"
        )
        return
    tuned = [Tuned(one.entry, done, one.metric, one.dimensions) for one, done in ended]
    _choose(
        out,
        to_yaml(base),
        study,
        tuned,
        untuned,
        runs_study,
    )
    if runs_study:
        _run_study(out, options, line)


# ---------------------------------------------------------------- what was asked for


def _with_one_test_part(study: Study, base: Config, configs: list[Config]) -> Config:
    """`base` with `data.test_seed: 0` where it has null, as any resolved base has unless it was
    set: with one test part for trials and study, no trial trains on what the study tests.
    `BadInput` for a grid that has null."""
    if "data.test_seed" in study.varied():
        allowed = (
            "it must be a number: with null, trials would train on test samples of the study's "
            "seeds"
        )
        for config in configs:
            check(
                "data.test_seed", config.data.test_seed, config.data.test_seed is not None, allowed
            )
    if base.data.test_seed is not None:
        return base
    return dataclasses.replace(
        base,
        data=dataclasses.replace(base.data, test_seed=0),
    )


def _check_labels(study: Study) -> None:
    """Raise `BadInput` where the study of the choices would refuse the label of a row with untuned
    settings."""
    entries = study.entries(everyone=False)
    labels = {entry.label for entry in entries}
    for entry in entries:
        key, other = f"{entry.key}.label", f"{entry.label} {UNTUNED}"
        check(
            key,
            entry.label,
            safe(other) == other,
            f"{other!r} is too long: {LONGEST} bytes at most",
        )
        check(key, entry.label, other not in labels, f"another method is called {other!r}")


def _check_same(
    out: Path, base: dict[str, Any], study: Study, searches: list[Search], accept: bool
) -> None:
    """Raise `BadInput` unless the folder is new, or holds this very search: it may gain methods and
    (fresh) seeds."""
    for group, _, name in (key.partition(".") for key in PLACE):
        base[group].pop(name)
    methods = {s.entry.label: s.record() for s in searches}
    now: dict[str, Any] = {
        "trials": searches[0].number,
        "seed": searches[0].seed,
        "base": base,
        "grid": study.grid,
        "methods": methods,
    }
    now["code"] = {
        k: v for s in searches for k, v in owncode.now(s.config({}, s.settings[0])).items()
    }
    now["data"] = sorted(
        samples.digests(s.config({}, setting) for s in searches for setting in s.settings).values()
    )
    file = out / "tune.yaml"
    if not file.is_file():
        names = {path.name for path in out.iterdir()} if out.is_dir() else set()
        is_new = not out.exists() or (out.is_dir() and names <= {file.name, aside_of(file).name})
        check("out", str(out), is_new, "it is a folder of something else: it holds no tune.yaml")
    else:
        before = _request(file)
        for key in ("trials", "seed", "base", "grid"):
            same = before[key] == now[key]
            check(
                key,
                "another one",
                same,
                f"the search in {out} began otherwise: give this one an --out of its own",
            )
        for label, was in before["methods"].items():
            same = methods.setdefault(label, was) == was
            check(
                "methods",
                label,
                same,
                f"the search in {out} has it otherwise: give this one a `label` of its own",
            )
        changed = owncode.changed(
            code := before.get("code", {}),
            now["code"],
        )
        allowed = (
            f"the trials in {out} began with another version: change it back, give this search "
            f"another --out"
        )
        allowed = f"{allowed}, or go on with --accept_changed_code"
        check("code", ", ".join(changed), accept or not changed, allowed)
        now["code"] = code | now["code"]
        same = not now["data"] or before.get("data", now["data"]) == now["data"]
        root = searches[0].base.data.root
        check(
            "data.root", root, same, f"the data have changed since trials in {out} trained on them"
        )
        searches[0].trials().ended()  # `BadInput` for a damaged journal, before anything is written
    write_whole(
        file,
        yaml.safe_dump(now, sort_keys=False, allow_unicode=True),
    )


def _request(file: Path) -> dict[str, Any]:
    """What an earlier call has written to `tune.yaml`; `BadInput` if it cannot be read."""
    allowed = f"{file} is damaged: restore it, or give this search another --out"
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        raise BadInput("out", str(file.parent), allowed) from None
    groups = ("base", "grid", "code", "methods")
    is_whole = (
        isinstance(content, dict)
        and content.keys() >= {"trials", "seed", "base", "grid", "methods"}
        and all(isinstance(content.get(key, {}), dict) for key in groups)
    )
    check("out", str(file.parent), is_whole, allowed)
    return dict(content)


# ---------------------------------------------------------------- searching


def _search(searches: list[Search], out: Path, count: int, line: str) -> None:
    """Run all trials that are missing, in `count` workers.

    A worker has a method to itself until its trials are done, so that what they try does not depend
    on how many workers there are; where there are more workers than methods, several share one.
    """
    from fl_lightning.lab.study.workers import run_all

    jobs = searches * -(-count // len(searches))
    teller, failures = _Teller(searches), {}
    with when_stopped(lambda: f"tune: stopped; it goes on with: {line}"):
        for ended in run_all(
            run_trials,
            jobs,
            count,
            out / "logs",
            lambda running: teller.tell(),
        ):
            if ended.error is not None:
                failures[jobs[ended.job].entry.label] = ended.error
        teller.tell(last=True)
    if failures:
        label, error_line = next(iter(failures.items()))
        more = f" ({len(failures)} methods failed)" if len(failures) > 1 else ""
        raise RunFailed(f"{label}: {error_line}{more}; the same command tries it again")


class _Teller:
    """Says of each trial of this call that it has ended: a line each."""

    def __init__(self, searches: list[Search]) -> None:
        self._searches = [(search, search.trials()) for search in searches]
        self._seen = {search.entry.label: len(trials.ended()) for search, trials in self._searches}
        self._last = time.monotonic()

    def tell(self, last: bool = False) -> None:
        """Look, where the last look is long enough ago."""
        if time.monotonic() - self._last < LOOK_SECONDS and not last:
            return
        self._last = time.monotonic()
        for search, trials in self._searches:
            ended = trials.ended()
            for number, trial in list(enumerate(ended, 1))[self._seen[search.entry.label] :]:
                print(
                    f"[{number}/{search.number}] {_line(search, trial)}",
                    file=sys.stderr,
                    flush=True,
                )
            self._seen[search.entry.label] = len(ended)


def _line(search: Search, trial: Ended) -> str:
    metric = search.metric
    score = (
        f"refused: {trial.why}" if trial.score is None else metric.shown(metric.merit(trial.score))
    )
    return f"{search.entry.label}, trial {trial.number} ({words(trial.values)}): {score}"


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


def _run_trial(search: Search, claim: Claim) -> None:
    """The runs of a trial, and their mean score. Values with which they fail are refused; where the
    first trial's fail, which are the base's own, or the machine is at fault, the method is not
    tuned."""
    scores = []
    try:
        for setting in search.settings:
            place = claim.folder / safe(
                ",".join(f"{key}={value}" for key, value in setting.items()) or "run"
            )
            config = search.config(claim.values, setting)
            if not (place / "summary.json").is_file():
                launch.train(config, place, accept=True)  # `_check_same` has looked at its code
            final = tidy([RunResult(place)])
            mean = final.value[final.metric == search.metric.name].mean()
            scores.append(search.metric.merit(float(mean)))
    except (BadInput, RunFailed) as error:
        if (
            claim.number == 0
            or isinstance(error, MachineFailed)
            or getattr(error, "key", "") in ("out", "name")
        ):
            raise
        claim.refuse(" ".join(str(error).split()))
    else:
        claim.tell(sum(scores) / len(scores))
    for kept in claim.folder.glob("*/checkpoints"):
        shutil.rmtree(kept)  # nobody asks for the models of a trial


# ---------------------------------------------------------------- choosing


def _choose(
    out: Path, base: str, study: Study, tuned_methods: list[Tuned], untuned: bool, runs_study: bool
) -> None:
    """Write and print what was found. `BadInput`, and nothing is written, where the study of the
    choices would refuse the folder `study`: it has trained rows that are no longer listed, whose
    choices the tables would lose."""
    from fl_lightning.lab.study import tuned

    texts = {
        "tuned.csv": as_csv([one.row() for one in tuned_methods]),
        "trials.csv": as_csv(tuned.trial_rows(tuned_methods)),
        "tuned.yaml": tuned.study_file(
            base,
            tuned_methods,
            study.seeds,
            study.grid,
            untuned,
        ),
    }
    folder = StudyFolder(out / "study")
    if folder or runs_study:
        launch.grown(
            folder,
            Study.of(yaml.safe_load(texts["tuned.yaml"])),
        )
    for name, text in texts.items():
        write_whole(out / name, text)
    screen = Console(highlight=False)
    Console(
        highlight=False,
        width=None if screen.is_terminal else WIDTH,
    ).print(tuned.table(tuned_methods))
    for one in tuned_methods:
        print(
            "".join(f"{one.entry.label}: {warning}\n" for warning in one.warnings()),
            end="",
        )


def _run_study(out: Path, options: Options, line: str) -> None:
    """Runs the study of the choices, an ordinary study folder."""
    chosen = Study.of(studyfile.read(str(out / "tuned.yaml")))
    inner = dataclasses.replace(options, out=str(out / "study"))
    try:
        print(launch.start(chosen, [], inner, line))
    except Busy:
        print(f"tune: another process runs the study in {inner.out}")
