"""The same search for every method on validation data, then the choices on fresh
seeds."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.configuration.config import Config, check
from fl_lightning.configuration.files import Layer
from fl_lightning.configuration.resolve import to_settings, to_yaml
from fl_lightning.foundation import command
from fl_lightning.foundation.csvtable import as_csv
from fl_lightning.foundation.errors import RunFailed
from fl_lightning.foundation.files import aside_of, write_whole
from fl_lightning.lab.study import launch, samples, studyfile, tuned
from fl_lightning.lab.study.chosen import UNTUNED, words
from fl_lightning.lab.study.comparison import write
from fl_lightning.lab.study.folder import PLACE, Busy, StudyFolder, check_new, reading
from fl_lightning.lab.study.grid import LONGEST, Pairs, Study, safe
from fl_lightning.lab.study.trials import Search, run_trials
from fl_lightning.lab.study.tuned import Tuned
from fl_lightning.results import owncode
from fl_lightning.results.opening import when_stopped

BENEATH: Layer = {"data": {"validation": 0.2}}
"""Unless the base says otherwise. 0.2: FedFomo's and PFLlib's share: with less, small clients would
have but a few samples to be judged by."""


@dataclass(frozen=True)
class Options(launch.Options):
    """How methods are searched (`fl_lightning.tune`); `out` is the search's folder."""

    trials: int = 20
    metric: str | None = None
    seed: int = 1000
    untuned: bool = False
    runs_study: bool = True


def tune(
    content: Any,
    over: list[Layer],
    options: Options,
) -> None:
    """Searches for each method's arguments, writes what was found, and runs the study of the
    choices.

    Args:
        content: of the study's file.
        over: settings over those of its base.
        options: the search's folder, and how it is run.
    """
    launch.check_over(over)
    if options.metric is not None:
        over = [*over, {"evaluation": {"metric": options.metric}}]
    study = Study.of(content)
    requirement = "the study judges on this seed, which trials must not see: give another"
    check(
        "seed",
        options.seed,
        options.seed not in study.seeds,
        requirement,
    )
    if options.untuned:
        _check_labels(study)
    base, pairs = launch.resolved(study, over, [BENEATH])
    base = _with_one_test_part(study, base, pairs)
    requirement = "tune chooses on validation data: above 0"
    for _, config in pairs:
        check(
            "data.validation",
            config.data.validation,
            config.data.validation > 0,
            requirement,
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
    configs = [search.config({}, setting) for search in searches for setting in settings]
    _write_request(
        out,
        study,
        searches,
        configs,
        options.accept_changed_code,
    )
    launch.fetch(configs)
    warning = tuned.few(options.trials)
    if warning:  # before the search, whose hours would otherwise be spent
        print(f"tune: {warning}", file=sys.stderr)
    line = command.line("tune", "STUDY", "--out", options.out)
    _search(searches, out, launch.worker_count(options.workers, base), line)
    methods = [Tuned(search.entry, search.ended(), search.dimensions) for search in searches]
    missing = sum(options.trials - len(method.trials) for method in methods)
    if missing:
        others = f"{missing} trials are at work in other processes"
        print(f"tune: {others}; the last of them goes on, or: {line}")
        return
    _choose(out, to_yaml(base), study, methods, options)
    if options.runs_study:
        _run_study(out, options, line)


# ---------------------------------------------------------------- what was asked for


def _with_one_test_part(study: Study, base: Config, pairs: Pairs) -> Config:
    """`base` with `data.test_seed: 0` where it has null, as any resolved base has unless it was
    set: with one test part for trials and study, no trial trains on what the study tests.
    `BadInput` for a grid that has null."""
    requirement = "it must be a number: trials would train on test samples of the study's seeds"
    for _, config in pairs if "data.test_seed" in study.varied() else ():
        test_seed = config.data.test_seed
        check(
            "data.test_seed",
            test_seed,
            test_seed is not None,
            requirement,
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
        requirement = f"{label!r} is too long: {LONGEST} bytes at most"
        check(key, entry.label, safe(label) == label, requirement)
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
            requirement = f"the search in {out} began otherwise: give this one an --out of its own"
            check(key, ..., before[key] == now[key], requirement)
        requirement = "its trials were drawn by an earlier version: give this one another --out"
        check(
            "out",
            str(out),
            not (out / "trials/journal.log").exists(),
            requirement,
        )
        requirement = f"the search in {out} has it otherwise: give this one a `label` of its own"
        for label, record in now["methods"].items():
            check(
                "methods",
                label,
                before["methods"].get(label, record) == record,
                requirement,
            )
        now["methods"] = now["methods"] | before["methods"]
        earlier_code = before["code"]
        changed = owncode.changed(earlier_code, code)
        requirement = (
            f"the trials in {out} began with another version: change it back, give this search "
            "another --out, or go on with --accept_changed_code"
        )
        check(
            "code",
            ", ".join(changed),
            accept or not changed,
            requirement,
        )
        now["code"] = earlier_code | code
        is_same = not now["data"] or before.get("data", now["data"]) == now["data"]
        requirement = (
            f"the data have changed since trials in {out} trained on them: restore them, or give "
            "this search another --out"
        )
        check("data.root", first.base.data.root, is_same, requirement)
        for search in searches:
            search.ended()  # `BadInput` for a damaged trial, before anything is written
    else:
        check_new(out, [file.name, aside_of(file).name], file.name)
    write_whole(
        file,
        yaml.safe_dump(
            now,
            sort_keys=False,
            allow_unicode=True,
        ),
    )


def _request(file: Path) -> dict[str, Any]:
    """What an earlier call has written to `tune.yaml`; `BadInput` if it cannot be read."""
    advice = "restore it, or give this search another --out"
    with reading("out", str(file.parent), f"{file} is damaged", advice):
        content = {"code": {}, **yaml.safe_load(file.read_text(encoding="utf-8"))}
        content |= {key: dict(content[key]) for key in ("base", "grid", "methods", "code")}
    return content


# ---------------------------------------------------------------- searching


def _search(searches: list[Search], out: Path, count: int, line: str) -> None:
    """Run all trials that are missing, in `count` workers; say of each that it has ended: a line
    each.

    A worker goes through the trials of a method; where there are more workers than methods, several
    share one.
    """
    from fl_lightning.lab.study.workers import run_all

    jobs = searches * -(-count // len(searches))
    files = {search.file(k): (search, k) for search in searches for k in range(search.number)}
    missing = {file for file in files if not file.is_file()}

    def tell(_: object = None) -> None:
        for file in sorted(filter(Path.is_file, missing)):
            missing.remove(file)
            print(_line(*files[file]), file=sys.stderr, flush=True)

    failures = {}
    with when_stopped(lambda: f"tune: stopped; it goes on with: {line}"):
        for ended in run_all(run_trials, jobs, count, out / "logs", tell):
            if ended.error is not None:
                failures[jobs[ended.job].entry.label] = ended.error
        tell()
    if failures:
        label, reason = next(iter(failures.items()))
        more = f" ({len(failures)} methods failed)" if len(failures) > 1 else ""
        raise RunFailed(f"{label}: {reason}{more}; the same command tries it again")


def _line(search: Search, number: int) -> str:
    """What a trial that has ended came to."""
    trial = search.trial(number)
    result = f"refused: {trial.why}"
    if trial.score is not None:
        result = Tuned(search.entry, [trial]).metric.shown(trial.score)
    begin = f"[{number + 1}/{search.number}] {search.entry.label}, trial {number}"
    return f"{begin} ({words(trial.values)}): {result}"


# ---------------------------------------------------------------- choosing


def _choose(out: Path, base: str, study: Study, methods: list[Tuned], options: Options) -> None:
    """Write and print what was found. `BadInput`, and nothing is written, where the study of the
    choices would refuse the folder `study`: it has trained rows that are no longer listed, whose
    choices the tables would lose."""
    content = tuned.study_file(
        base,
        methods,
        study.seeds,
        study.grid,
        options.untuned,
    )
    folder = StudyFolder(out / "study")
    if folder or options.runs_study:
        launch.resolved_in(folder, Study.of(yaml.safe_load(content)))
    write_whole(out / "tuned.csv", as_csv([method.row() for method in methods]))
    write_whole(out / "trials.csv", as_csv(tuned.trial_rows(methods)))
    write_whole(out / "tuned.yaml", content)
    print(write(tuned.listing_of(methods), "table"))


def _run_study(
    out: Path,
    options: Options,
    line: str,
) -> None:
    """Runs the study of the choices, an ordinary study folder."""
    chosen = Study.of(studyfile.read(str(out / "tuned.yaml")))
    inner = dataclasses.replace(options, out=str(out / "study"))
    try:
        print(launch.start(chosen, [], inner, line))
    except Busy:
        print(f"tune: another process runs the study in {inner.out}")
