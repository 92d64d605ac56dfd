"""From a study to its runs, by worker processes here or by SLURM."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_lightning.configuration.config import Config, Start, check, flat
from fl_lightning.configuration.files import (
    Layer,
    layer_of,
    layers_without_base,
    read_config,
)
from fl_lightning.configuration.resolve import resolve, to_settings, to_yaml
from fl_lightning.configuration.tables import check_first_rows
from fl_lightning.foundation import command, signals
from fl_lightning.foundation.errors import BadInput, RunFailed, redact
from fl_lightning.lab.queue import ALIVE, states_of
from fl_lightning.lab.study import code, samples, together
from fl_lightning.lab.study.folder import StudyFolder, one_line
from fl_lightning.lab.study.grid import (
    Pairs,
    Study,
    StudyRun,
    by_key,
    check_together,
)
from fl_lightning.lab.study.part import StudyPart, part_of, with_seeds
from fl_lightning.lab.submit import MOST_RUNS, Job, script, send
from fl_lightning.results import opening, owncode, provenance

if TYPE_CHECKING:
    from pandas import DataFrame

DEFAULTS: Layer = {
    "method": "kapc",
    "callbacks": {"heatmaps": None, "progress": None},
    "fabric": {"threads": 1},
}
"""Beneath the base: nobody looks at pictures of hundreds of runs, and a study shows its own
progress. One thread: a core for each worker, and equal bits wherever the study is run. The method
is named: what a study lists has its paper's arguments, unless base or list say otherwise."""
_START = {"config", *(field.name for field in dataclasses.fields(Start))}
"""Keys that begin one run."""
WHOLE = StudyPart()
Selection = tuple[str | None, str | None, str | None]
"""Methods, seeds and settings that a command is to run, each as text with commas; None: all."""
Training = tuple[Config, Path]
"""A run's config, and its folder."""


@dataclasses.dataclass(frozen=True)
class StudyOptions:
    """How a study is run (`fl_lightning.study`)."""

    out: str
    workers: int | None = None
    together: int | str | None = None
    accept_changed_code: bool = False
    slurm: bool = False
    job: Job = dataclasses.field(default_factory=Job)
    """What its runs need, with `slurm`."""

    def check(self) -> None:
        """Raise `BadInput` for keys that do not go together."""
        if self.together is not None:
            check_together(self.together)
        if self.slurm:
            for key in ("workers", "together"):
                value = getattr(self, key)
                check(
                    key,
                    value,
                    value is None,
                    "with slurm every run is a job of its own",
                )
            self.job.check()
            return
        for field in dataclasses.fields(Job):
            value = getattr(self.job, field.name)
            is_default = value == field.default
            check(
                field.name,
                value,
                is_default,
                "it describes jobs: it needs slurm",
            )


class Runs:
    """The runs of a study's folder; `str` says how many have ended."""

    def __init__(self, out: str, line: str) -> None:
        self.folder, self.line = Path(out), line

    def __str__(self) -> str:
        return self.line

    @property
    def scores(self) -> DataFrame:
        """All final scores (`results.runs.tidy`): method, setting, seed, client, model, metric,
        value. Methods and settings go by the study's labels; of a run that several rows share, by
        its folder's name."""
        from fl_lightning.results.runs import tidy, words

        folder = StudyFolder(self.folder)
        cells = by_key(folder.cells(), itemgetter("folder"))
        results = folder.results()
        names = []
        for name in results:
            cell, *others = cells[name]
            label = Path(name).parent.name if others else cell["label"]
            names.append((label, words(cell["setting"])))
        return tidy(results.values(), names)


def study(
    content: Any,
    over: list[Layer],
    chosen: Selection,
    options: StudyOptions,
) -> Runs:
    """Runs what is missing of a study, or of a part of it, or hands it to SLURM.

    Args:
        content: of the study's file.
        over: settings over those of its base.
        chosen: methods, seeds and settings, as text with commas; None: all.
        options: its folder, and how it is run.
    """
    options.check()
    check_over(over)
    definition, part = part_of(Study.of(content), *chosen)
    line = command.line("study", "STUDY", "--out", options.out)
    return Runs(options.out, start(definition, over, options, line, part))


def check_over(over: Sequence[Layer]) -> None:
    """Raise `BadInput` for settings that are not those of a study's base."""
    requirement = "a study lists its methods; a key of data, federation, ... may be set"
    for layer in over:
        check(
            "method",
            layer.get("method"),
            "method" not in layer,
            requirement,
        )
        for key in layer.keys() & _START:
            raise BadInput(key, layer[key], "a study sets it for each run")


def start(
    definition: Study,
    over: Sequence[Layer],
    options: StudyOptions,
    line: str,
    part: StudyPart = WHOLE,
) -> str:
    """Runs what is missing of a study, or of a part of it, or hands it to SLURM; returns what has
    been done, in words.

    Args:
        definition: the study.
        over: settings over those of the study's base.
        options: its folder, and how it is run.
        line: the command that goes on with it.
        part: which of its runs; the folder's table names them all.

    Raises:
        BadInput: it cannot work, before anything is written.
        RunFailed: runs have failed; the others have been run.
    """
    folder = StudyFolder(Path(options.out))
    # to resolve configs takes seconds
    with signals.exit_at_signal(lambda: "fl-train: stopped before the study began"):
        definition, base, pairs = resolved_in(folder, definition, over)
    chosen = [pair for pair in pairs if pair[0] in part]
    settings = ", ".join(sorted(part.settings))
    check(
        "settings",
        settings,
        len(chosen) > 0,
        "no setting of the study has these values",
    )
    most_together = definition.together if options.together is None else options.together
    # Jobs train one run each: nothing is measured for them, and they keep what the study has.
    at_once = 1 if options.slurm else most_together
    chosen, executors = together.with_executors(
        folder,
        chosen,
        at_once,
        pairs,
    )
    todo = [(run, config) for run, config in chosen if not folder.finished(run.folder)]
    code.check_same(folder, todo, options.accept_changed_code)
    samples.check_same(folder, pairs, todo)

    def write() -> None:
        """Keep what the study is; another process may have been in the folder meanwhile."""
        runs = [run for run, _ in pairs]
        folder.check(definition, to_settings(base), runs)
        folder.write(definition, to_yaml(base), runs)
        together.keep(folder, executors)
        code.accept(folder, todo)

    if options.slurm:
        return _hand_over(folder, chosen, len(pairs), options.job, write)
    fetch([config for _, config in todo])
    with folder.locked():
        write()
        return _run(
            folder,
            chosen,
            len(pairs),
            options.workers,
            most_together,
            line,
        )


def resolved_in(
    folder: StudyFolder, definition: Study, over: Sequence[Layer] = ()
) -> tuple[Study, Config, Pairs]:
    """The study with the seeds that its folder has beside its own, and what `resolved` makes of it.

    Raises:
        BadInput: as `resolved`, or the folder is of another study or has trained runs that this one
            lacks.
    """
    if folder:  # seeds that were asked for earlier stay
        definition = with_seeds(definition, Study.of(folder.definition()).seeds)
    base, pairs = resolved(definition, over)
    folder.check(definition, to_settings(base), [run for run, _ in pairs])
    return definition, base, pairs


def resolved(
    definition: Study, over: Sequence[Layer] = (), beneath: Sequence[Layer] = ()
) -> tuple[Config, Pairs]:
    """The resolved base of a study, and all its runs, each with its config.

    Args:
        definition: the study.
        over: settings over the base's.
        beneath: settings that hold unless the base has others.

    Raises:
        BadInput: a config cannot work, two methods of the list come to the same, or `over` sets
            what the grid sets.
    """
    varied = definition.varied()
    for layer in over:
        for key, value in flat(layer):
            check(key, value, key not in varied, "the study's grid sets it")
    layers = [DEFAULTS, *beneath, *_base(definition.base), *over]
    if not any(key.startswith("data.") for key in varied):
        check_first_rows(layers)
    base = resolve(layers)
    opening.check_no_key(base)
    runs = definition.runs(base.federation.participation)
    of_one_seed = runs[: len(runs) // len(definition.seeds)]
    configs = [_resolved_as_listed(run, base) for run in of_one_seed]
    _check_different(of_one_seed, configs)
    # seed by seed, as `runs`
    seeded = [dataclasses.replace(c, seed=seed) for seed in definition.seeds for c in configs]
    return base, list(zip(runs, seeded, strict=True))


def train(
    config: Config,
    folder: Path,
    accept: bool = False,
    put_together: Any = None,
) -> None:
    """Run `config` in `folder`, from the start or from its checkpoint. `accept`: own code may have
    changed. `put_together`: as for `fl_lightning.run.fit`."""
    from fl_lightning.run import fit

    print(f"---- {time.strftime('%F %T')} {folder}", file=sys.stderr)
    saved = opening.saved_layer(folder)
    if saved is not None:
        opening.check_goes_on(saved, config, folder, accept)
    start = Start(out=str(folder.parent), name=folder.name, resume=True)
    with opening.opened(start, folder.name, config) as place:
        fit(config, place, resume=True, put_together=put_together)


def run_one(job: Training, put_together: Any = None) -> str | None:
    """Run one job of a worker, its code checked before; None, or one line that says why it
    failed."""
    return run_safely(
        lambda: train(
            *job,
            accept=True,
            put_together=put_together,
        )
    )


def run_safely(work: Callable[[], None]) -> str | None:
    """Do `work`; None, or one line that says why it failed, with a traceback in the log where that
    may help."""
    try:
        work()
    except (BadInput, RunFailed) as error:
        line = one_line(error)
        print(line, file=sys.stderr)
        return line
    except Exception as error:
        print(redact(traceback.format_exc()), end="", file=sys.stderr)
        line = one_line(f"{type(error).__name__}: {error}")
        return f"{line} (traceback in the study's logs/)"
    return None


# ---------------------------------------------------------------- what was asked for


def _base(base: Any) -> Iterator[Layer]:
    """The layers of a base: configs by name or file, mappings of keys, or a list of these, later
    ones winning.

    Loggers of a named config are left out: they suit one run, not a hundred. Those in the study
    file itself stay.
    """
    requirement = "it must be a config's name or file, a mapping of keys, or a list of these"
    for part in base if isinstance(base, list) else [base]:
        check("base", part, isinstance(part, str | dict), requirement)
        if isinstance(part, str):
            layers = read_config(part)
            for layer in layers:
                layer.pop("loggers", None)
        else:
            layers = layers_without_base("base", part)
        for layer in layers:
            for key in layer.keys() & (_START - {"seed", "smoke"}):
                raise BadInput(
                    f"base.{key}",
                    layer[key],
                    "a study sets it for each run",
                )
            layer.pop("seed", None)  # each run has its own
        yield from layers


def layers_of(run: StudyRun) -> list[Layer]:
    """What a run changes of the base, its seed aside."""
    entry = run.entry
    method = {"name": entry.name, "init_args": entry.arguments_in(run.setting)}
    return [
        {"method": method},
        layer_of("grid", run.setting),
        layer_of("methods", entry.settings),
    ]


def _resolved_as_listed(run: StudyRun, base: Config) -> Config:
    """Returns the config of a run; an error of a method or its arguments names the key as the study
    file does."""
    try:
        return resolve(layers_of(run), base)
    except BadInput as error:
        head, dot, rest = error.key.partition(".")
        if head != "method":
            raise
        raise BadInput(
            f"{run.entry.key}{dot}{rest}",
            error.value,
            error.requirement,
        ) from None


def _check_different(runs: list[StudyRun], configs: list[Config]) -> None:
    """Raise `BadInput` for a listed method that comes to the same as another of its setting."""
    every = zip(runs, configs, strict=True)
    for pairs in by_key(every, lambda pair: str(pair[0].setting)).values():
        for number, (run, config) in enumerate(pairs):
            earlier = [pair[0] for pair in pairs[:number] if pair[1] == config]
            if earlier and not run.entry.forced:
                requirement = f"it comes to the same as {earlier[0].entry.key}"
                raise BadInput(run.entry.key, run.entry.label, requirement)


# ---------------------------------------------------------------- running


def _run(
    folder: StudyFolder,
    chosen: Pairs,
    total: int,
    workers: int | None,
    at_once: int | str,
    line: str,
) -> str:
    """Runs what is missing of the chosen runs; returns how many there are, in words.

    `total`: runs of the whole study; `at_once`: at most so many in each process at once, or "auto".
    """
    import fl_lightning.run  # noqa: F401  before the workers are forked: they need not import it again
    from fl_lightning.lab.study.runner import follow
    from fl_lightning.lab.study.workers import one_by_one, serve_all

    provenance.look()  # likewise
    configs = [config for _, config in chosen]
    processes = worker_count(workers, configs[0])
    runs_each = -(-len(chosen) // processes)
    together_each = min(runs_each, together.most_at_once(at_once, configs))
    together_each = together.within_memory(together_each, processes, configs)
    if together_each > 1:
        chosen = together.by_method(chosen)
    missing = [pair for pair in chosen if not folder.finished(pair[0].folder)]
    jobs: list[Training] = [(config, folder.path / run.folder) for run, config in missing]
    worker = one_by_one(run_one) if together_each == 1 else partial(together.drive, run_one)
    logs, count, begin = folder.path / "logs", len(chosen), time.monotonic()

    def progress() -> str:
        ended = sum(folder.finished(run.folder) for run, _ in chosen)
        return f"{ended} of {count} runs finished"

    with opening.when_stopped(lambda: f"study: stopped with {progress()}; it goes on with: {line}"):
        all_ended = serve_all(
            worker, jobs, processes, logs, lambda numbers: signals.raise_swallowed(), together_each
        )
        follow(folder, [run for run, _ in missing], all_ended, count)
    done = f" ({count - len(missing)} were there)" if len(missing) < count else ""
    done += f", of the {total} of the whole study" if count < total else ""
    took = time.monotonic() - begin
    is_regression = configs[0].data.task == "regression"
    shown = "page: fl-train report" if is_regression else "table: fl-train compare"
    return f"study: {progress()}{done}, {took:.1f} s; the {shown} {folder.path}"


def fetch(configs: list[Config]) -> None:
    """Have each of torchvision's data sets loaded once, so that what must be downloaded is, before
    all workers try it.

    It is done in a process of its own: this one must run no threads when it forks the workers.

    Raises:
        BadInput: none of them is there, nor can be had.
    """
    from fl_lightning.data.load import SOURCE_BY_SUFFIX
    from fl_lightning.data.vision import RECIPES
    from fl_lightning.lab.study.workers import in_a_process

    by_place = {(config.data.source, config.data.root): config for config in configs}
    reasons = []
    for (source, root), config in by_place.items():
        is_own = Path(root or "").suffix.lower() in SOURCE_BY_SUFFIX
        if source not in RECIPES or is_own or config.smoke:
            continue
        try:
            in_a_process(_load, config)
        except (BadInput, RunFailed) as error:
            reasons.append(getattr(error, "requirement", str(error)))
    if reasons and len(reasons) == len(by_place):
        raise BadInput("data.root", configs[0].data.root, reasons[0])


def _load(config: Config) -> None:
    from fl_lightning.data.load import load

    load(config.data, config.federation.clients, config.smoke)


def worker_count(number: int | None, config: Config) -> int:
    """How many processes: as many as cores, but for runs of several processes, and for GPUs, which
    runs would share."""
    if number is not None:
        return number
    from fl_lightning.foundation import device

    if config.fabric.accelerator != "cpu" and device.count():
        return 1
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    devices = 1 if config.fabric.devices == "auto" else int(config.fabric.devices)
    return max(1, cores // (devices * (config.fabric.threads or 1)))


def _hand_over(
    folder: StudyFolder,
    chosen: Pairs,
    total: int,
    job: Job,
    write: Callable[[], None],
) -> str:
    """Writes the config of each missing run that is not at work into its folder, and submits arrays
    of jobs that resume those that are in no queue either; returns what was submitted, in words.

    Args:
        folder: the study's.
        chosen: its runs that are to be.
        total: how many runs it has.
        job: what a run needs.
        write: keeps what the study is.
    """
    job.check_ranks(min(config.clients for _, config in chosen))
    if not job.dry_run:
        job.check_cluster()
    with contextlib.nullcontext() if job.dry_run else folder.locked():
        unfinished = [pair for pair in chosen if not folder.finished(pair[0].folder)]
        missing = {(folder.path / pair[0].folder).resolve(): pair for pair in unfinished}
        busy = _in_hand(folder.path, list(missing))
        # a queued run takes what its folder has when its turn comes
        free = {place: config for place, (_, config) in missing.items() if not busy.get(place)}
        new = {place: config for place, config in free.items() if _changed(place, config)}
        places = [place for place in missing if place not in busy]
        arrays = [
            places[k : k + MOST_RUNS]
            for k in range(
                0,
                len(places),
                MOST_RUNS,
            )
        ]
        scripts: dict[str, tuple[str, list[Any]]] = {}
        for number, array in enumerate(arrays, 1):
            name = folder.path.resolve().name
            name += f"-{number}" if len(arrays) > 1 else ""
            lines, facts = [], []
            for place in array:
                run, config = missing[place]
                words = ["--out", str(place.parent), "--name", place.name]
                lines.append(words + code.flag(place, config))
                facts.append((place, run.entry.name, config.federation.rounds))
            scripts[name] = script(job, lines, folder.path, name), facts
        if job.dry_run and places:
            return "".join(text for text, _ in scripts.values()).removesuffix("\n")
        if not job.dry_run:
            write()
            for place, config in new.items():
                opening.write_config(place, config)
            for place, config in free.items():  # what its job is to execute
                owncode.keep_planned(config, place)
        for name, (text, facts) in scripts.items():
            send(job, text, folder.path, name, facts)
    in_hand = f"{len(busy)} of {len(chosen)} runs are queued or running already"
    if places:
        also = f", {in_hand}" if busy else ""
        line = f"{len(places)} of {total} runs in {folder.path}{also}"
    else:
        ended = f"{len(chosen)} of {len(chosen)} runs have ended"
        line = f"nothing to submit: {in_hand if busy else ended}"
    return f"{line}; see: fl-train status {folder.path}"


def _in_hand(
    out: Path,
    places: list[Path],
) -> dict[Path, bool]:
    """The runs that a job in the queue is to do or a process is at work in, and whether it may be
    at work now."""
    from fl_lightning.lab.status import locked

    jobs = states_of(out, places)
    queued = {place: state != "queued" for place, state in jobs.items() if state in ALIVE}
    return queued | {place: True for place in places if locked(place)}


def _changed(place: Path, config: Config) -> bool:
    """Whether the config.yaml of a run is not `config`, or not there; `BadInput` unless the run may
    go on with it."""
    file = place / opening.CONFIG
    if file.is_file() and file.read_text(encoding="utf-8") == to_yaml(config):
        return False
    saved = opening.saved_layer(place)
    if saved is not None:
        opening.check_goes_on(saved, config, place, accept=True)
    return True
