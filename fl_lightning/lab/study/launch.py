"""From a study to its runs, by worker processes here or by SLURM."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_lightning.configuration.config import Config, Start, check, flat
from fl_lightning.configuration.files import Layer, layer_of, own_layers, read_config
from fl_lightning.configuration.resolve import resolve, to_settings, to_yaml
from fl_lightning.configuration.tables import check_first_rows
from fl_lightning.foundation import command, signals
from fl_lightning.foundation.errors import BadInput, RunFailed, redact
from fl_lightning.lab.queue import ALIVE, states_of
from fl_lightning.lab.study import code, samples, together
from fl_lightning.lab.study.folder import StudyFolder
from fl_lightning.lab.study.grid import Run, Study, by_key, check_together
from fl_lightning.lab.study.part import Part, part_of, with_seeds
from fl_lightning.lab.submit import MOST_RUNS, Job, script, send
from fl_lightning.results import opening as runs
from fl_lightning.results import owncode, provenance

if TYPE_CHECKING:
    from pandas import DataFrame

QUIET: Layer = {
    "method": "kapc",
    "callbacks": {"heatmaps": None, "progress": None},
    "fabric": {"threads": 1},
}
"""Beneath the base: nobody looks at pictures of hundreds of runs, and a study shows its own
progress. One thread: a core for each worker, and equal bits wherever the study is run. The method
is named: what a study lists has its paper's arguments, unless base or list say otherwise."""
_START = {"config", *(field.name for field in dataclasses.fields(Start))}
"""Keys that begin one run."""
WHOLE = Part()
Chosen = tuple[str | None, str | None, str | None]
"""Methods, seeds and settings that are to be run, each as text with commas; None: all."""
Training = tuple[Config, Path]
"""A run's config, and its folder."""


@dataclasses.dataclass(frozen=True)
class Options:
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
            allowed = "with slurm every run is a job of its own"
            check("workers", self.workers, self.workers is None, allowed)
            check("together", self.together, self.together is None, allowed)
            self.job.check()
            return
        for field in dataclasses.fields(Job):
            value = getattr(self.job, field.name)
            allowed = "it describes jobs: it needs slurm"
            check(field.name, value, value == field.default, allowed)


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
        rows, runs = by_key(folder.cells(), lambda cell: cell["folder"]), folder.results()
        names = []
        for name in runs:
            shared = len(rows[name]) > 1
            label = Path(name).parent.name if shared else rows[name][0]["label"]
            names.append((label, words(rows[name][0]["setting"])))
        return tidy(runs.values(), names)


def study(content: Any, over: list[Layer], chosen: Chosen, options: Options) -> Runs:
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
    allowed = "a study lists its methods; a key of data, federation, ... may be set"
    for layer in over:
        check("method", layer.get("method"), "method" not in layer, allowed)
        for key in layer.keys() & _START:
            raise BadInput(key, layer[key], "a study sets it for each run")


def start(
    definition: Study, over: Sequence[Layer], options: Options, line: str, part: Part = WHOLE
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
    with signals.leaving(lambda: "fl-train: stopped before the study began"):
        definition, base, all_runs, configs = grown(folder, definition, over)
    chosen = [(run, config) for run, config in zip(all_runs, configs, strict=True) if run in part]
    check(
        "settings",
        ", ".join(sorted(part.settings)),
        len(chosen) > 0,
        "no setting of the study has these values",
    )
    most_together = definition.together if options.together is None else options.together
    # Jobs train one run each: nothing is measured for them, and they keep what the study has.
    chosen, executors = together.with_executors(
        folder, chosen, 1 if options.slurm else most_together, configs
    )
    todo = [(run, config) for run, config in chosen if not folder.finished(run.folder)]
    code.check_same(folder, todo, options.accept_changed_code)
    samples.check_same(folder, list(zip(all_runs, configs, strict=True)), todo)
    if options.slurm:
        return _hand_over(folder, (definition, base, all_runs), chosen, executors, options.job)
    fetch([config for _, config in todo])
    with folder.locked():
        # another process may have been in it meanwhile
        folder.check(definition, to_settings(base), all_runs)
        folder.write(definition, to_yaml(base), all_runs)
        together.keep(folder, executors)
        code.accept(folder, todo)
        return _run(folder, chosen, len(all_runs), options.workers, most_together, line)


def grown(
    folder: StudyFolder, definition: Study, over: Sequence[Layer] = ()
) -> tuple[Study, Config, list[Run], list[Config]]:
    """The study with the seeds that its folder has beside its own, and what `resolved` makes of it.

    Raises:
        BadInput: as `resolved`, or the folder is of another study or has trained runs that this one
            lacks.
    """
    if folder:  # seeds that were asked for earlier stay
        definition = with_seeds(definition, Study.of(folder.definition()).seeds)
    base, all_runs, configs = resolved(definition, over=over)
    folder.check(definition, to_settings(base), all_runs)
    return definition, base, all_runs, configs


def resolved(
    definition: Study, over: Sequence[Layer] = (), beneath: Sequence[Layer] = ()
) -> tuple[Config, list[Run], list[Config]]:
    """The resolved base of a study, all its runs, and the config of each.

    Args:
        definition: the study.
        over: settings over the base's.
        beneath: settings that hold unless the base has others.

    Raises:
        BadInput: a config cannot work, two methods of the list come to the same, or `over` sets
            what the grid sets.
    """
    for key, value in (pair for layer in over for pair in flat(layer)):
        check(key, value, key not in definition.varied(), "the study's grid sets it")
    layers = [QUIET, *beneath, *_base(definition.base), *over]
    if not any(key.startswith("data.") for key in definition.varied()):
        check_first_rows(layers)
    base = resolve(layers)
    runs.check_no_key(base)
    all_runs = definition.runs(base.federation.participation)
    first = [run for run in all_runs if run.seed == definition.seeds[0]]
    whole = [_resolved_as_listed(run, base) for run in first]
    _check_different(first, whole)
    by_place = {
        run.folder.rpartition("/")[0]: config for run, config in zip(first, whole, strict=True)
    }
    configs = [
        dataclasses.replace(by_place[run.folder.rpartition("/")[0]], seed=run.seed)
        for run in all_runs
    ]
    return base, all_runs, configs


def train(config: Config, folder: Path, accept: bool = False, put_together: Any = None) -> None:
    """Run `config` in `folder`, from the start or from its checkpoint. `accept`: own code may have
    changed. `put_together`: as for `fl_lightning.run.fit`."""
    from fl_lightning.run import fit

    print(f"---- {time.strftime('%F %T')} {folder}", file=sys.stderr)
    saved = runs.saved_layer(folder)
    if saved is not None:
        runs.check_goes_on(saved, config, folder, accept)
    with runs.opened(
        Start(out=str(folder.parent), name=folder.name, resume=True), folder.name, config
    ) as place:
        fit(config, place, resume=True, put_together=put_together)


def run_one(job: Training, put_together: Any = None) -> str | None:
    """Run one job of a worker, its code checked before; None, or one line that says why it
    failed."""
    return run_safely(lambda: train(*job, accept=True, put_together=put_together))


def run_safely(work: Callable[[], None]) -> str | None:
    """Do `work`; None, or one line that says why it failed, with a traceback in the log where that
    may help."""
    try:
        work()
    except (BadInput, RunFailed) as error:
        print(message := redact(" ".join(str(error).split())), file=sys.stderr)
        return message
    except Exception as error:
        print(redact(traceback.format_exc()), end="", file=sys.stderr)
        message = redact(" ".join(f"{type(error).__name__}: {error}".split()))
        return f"{message} (traceback in the study's logs/)"
    return None


# ---------------------------------------------------------------- what was asked for


def _base(given: Any) -> Iterator[Layer]:
    """The layers of a base: configs by name or file, mappings of keys, or a list of these, later
    ones winning.

    Loggers of a named config are left out: they suit one run, not a hundred. Those in the study
    file itself stay.
    """
    for part in given if isinstance(given, list) else [given]:
        if isinstance(part, str):
            layers = read_config(part)
            for layer in layers:
                layer.pop("loggers", None)
        elif isinstance(part, dict):
            layers = own_layers("base", part)
        else:
            raise BadInput(
                "base",
                part,
                "it must be a config's name or file, a mapping of keys, or a list of these",
            )
        for layer in layers:
            for key in layer.keys() & (_START - {"seed", "smoke"}):
                raise BadInput(f"base.{key}", layer[key], "a study sets it for each run")
            layer.pop("seed", None)  # each run has its own
        yield from layers


def layers_of(run: Run) -> list[Layer]:
    """What a run changes of the base, its seed aside."""
    method = {"method": {"name": run.entry.name, "init_args": run.entry.arguments_in(run.setting)}}
    return [method, layer_of("grid", run.setting), layer_of("methods", run.entry.settings)]


def _resolved_as_listed(run: Run, base: Config) -> Config:
    """Returns the config of a run; an error of a method or its arguments names the key as the study
    file does."""
    try:
        return resolve(layers_of(run), base)
    except BadInput as error:
        head, dot, rest = error.key.partition(".")
        if head != "method":
            raise
        raise BadInput(f"{run.entry.key}{dot}{rest}", error.value, error.requirement) from None


def _check_different(listed: list[Run], configs: list[Config]) -> None:
    """Raise `BadInput` for a listed method that comes to the same as another of its setting."""
    for _, pairs in itertools.groupby(
        zip(listed, configs, strict=True), key=lambda pair: pair[0].setting
    ):
        before: list[tuple[Run, Config]] = []
        for run, config in pairs:
            same = next(
                (other for other, has in before if has == config and not run.entry.forced), run
            )
            check(
                run.entry.key,
                run.entry.label,
                same is run,
                f"it comes to the same as {same.entry.key}",
            )
            before.append((run, config))


# ---------------------------------------------------------------- running


def _run(
    folder: StudyFolder,
    chosen: list[tuple[Run, Config]],
    whole: int,
    workers: int | None,
    at_once: int | str,
    line: str,
) -> str:
    """Runs what is missing of the chosen runs; returns how many there are, in words.

    `whole`: how many the study has.
    """
    import fl_lightning.run  # noqa: F401  before the workers are forked: they need not import it again
    from fl_lightning.lab.study.runner import Runner
    from fl_lightning.lab.study.workers import one_by_one

    provenance.look()  # likewise
    count = worker_count(workers, chosen[0][1])
    most = together.most_at_once(at_once, [config for _, config in chosen])
    most = together.within_memory(
        min(most, -(-len(chosen) // count)), count, [config for _, config in chosen]
    )
    if most > 1:
        chosen = together.by_method(chosen)
    jobs: list[Training] = [(config, folder.path / run.folder) for run, config in chosen]
    beside = partial(
        together.drive, lambda config, place, put_together: run_one((config, place), put_together)
    )
    worker = one_by_one(run_one) if most == 1 else beside
    runner = Runner(folder, [run for run, _ in chosen], worker, jobs)
    before, start = len(chosen) - len(runner.todo), time.monotonic()
    with runs.when_stopped(
        lambda: f"study: stopped with {runner.progress()}; it goes on with: {line}"
    ):
        runner.run(count, most)
    done = f" ({before} were there)" if before else ""
    done += f", of the {whole} of the whole study" if len(chosen) < whole else ""
    took = time.monotonic() - start
    shown = (
        "page: fl-train report"
        if chosen[0][1].data.task == "regression"
        else "table: fl-train compare"
    )
    return f"study: {runner.progress()}{done}, {took:.1f} s; the {shown} {folder.path}"


def fetch(configs: list[Config]) -> None:
    """Have each of torchvision's data sets loaded once, so that what must be downloaded is, before
    all workers try it.

    It is done in a process of its own: this one must run no threads when it forks the workers.

    Raises:
        BadInput: none of them is there, nor can be had.
    """
    from fl_lightning.data.load import OVERRIDES
    from fl_lightning.data.vision import RECIPES

    sets = {
        (config.data.source, config.data.root): config
        for config in configs
        if config.data.source in RECIPES
        and Path(config.data.root or "").suffix.lower() not in OVERRIDES
        and not config.smoke
    }
    absent = [error for config in sets.values() if (error := _absent(config)) is not None]
    if absent and len(absent) == len(sets) == len({(c.data.source, c.data.root) for c in configs}):
        raise BadInput("data.root", configs[0].data.root, absent[0])


def _absent(config: Config) -> str | None:
    """None, or what is wrong with the data."""
    from fl_lightning.lab.study.workers import in_a_process

    try:
        in_a_process(_load, config)
    except BadInput as error:
        return error.requirement
    except RunFailed as error:
        return str(error)
    return None


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
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    devices = 1 if config.fabric.devices == "auto" else int(config.fabric.devices)
    return max(1, cores // (devices * (config.fabric.threads or 1)))


def _hand_over(
    folder: StudyFolder,
    whole_study: tuple[Study, Config, list[Run]],
    chosen: list[tuple[Run, Config]],
    executors: dict[str, str],
    job: Job,
) -> str:
    """Writes the config of each missing run that is not at work into its folder, and submits arrays
    of jobs that resume those that are in no queue either; returns what was submitted, in words."""
    job.check_ranks(min(config.clients for _, config in chosen))
    if not job.dry_run:
        job.check_cluster()
    with contextlib.nullcontext() if job.dry_run else folder.locked():
        unfinished = [pair for pair in chosen if not folder.finished(pair[0].folder)]
        missing = {
            (folder.path / run.folder).resolve(): (run, config) for run, config in unfinished
        }
        busy = _in_hand(folder.path, list(missing))
        free = {place: config for place, (_, config) in missing.items() if not busy.get(place)}
        new = {place: config for place, config in free.items() if _changed(place, config)}
        places = [place for place in missing if place not in busy]
        lines = [
            ["--out", str(p.parent), "--name", p.name, *code.flag(p, missing[p][1])] for p in places
        ]
        parts = [lines[k : k + MOST_RUNS] for k in range(0, len(lines), MOST_RUNS)]
        names = [
            folder.path.resolve().name + (f"-{k + 1}" if len(parts) > 1 else "")
            for k in range(len(parts))
        ]
        texts = [
            script(job, part, folder.path, name) for part, name in zip(parts, names, strict=True)
        ]
        if job.dry_run and places:
            return "".join(texts).removesuffix("\n")
        if not job.dry_run:
            definition, base, all_runs = whole_study
            folder.check(definition, to_settings(base), all_runs)  # as in `start`
            folder.write(definition, to_yaml(base), all_runs)
            together.keep(folder, executors)
            code.accept(folder, missing.values())
            for place, config in new.items():
                runs.write_config(place, config)
            for place, config in free.items():  # what its job is to execute
                owncode.keep_planned(config, place)
        facts = [
            (place, missing[place][0].entry.name, missing[place][1].federation.rounds)
            for place in places
        ]
        for k, (text, name) in enumerate(zip(texts, names, strict=True)):
            send(job, text, folder.path, name, facts[k * MOST_RUNS : (k + 1) * MOST_RUNS])
    taken = f"{len(busy)} of {len(chosen)} runs are queued or running already"
    summary = f"{len(places)} of {len(whole_study[2])} runs in {folder.path}" + (
        f", {taken}" if busy else ""
    )
    done = (
        f"nothing to submit: {taken if busy else f'{len(chosen)} of {len(chosen)} runs have ended'}"
    )
    return f"{summary if places else done}; see: fl-train status {folder.path}"


def _in_hand(out: Path, places: list[Path]) -> dict[Path, bool]:
    """Which of these runs a job in the queue is to do, or a process is at work in, and whether it
    may be at work."""
    from fl_lightning.lab.status import locked

    jobs = states_of(out, places)
    busy = {place: jobs[place] != "queued" for place in places if jobs.get(place) in ALIVE}
    return busy | {place: True for place in places if locked(place)}


def _changed(place: Path, config: Config) -> bool:
    """Whether the config.yaml of a run is not `config`, or not there; `BadInput` unless the run may
    go on with it."""
    file = place / runs.CONFIG
    if file.is_file() and file.read_text(encoding="utf-8") == to_yaml(config):
        return False
    saved = runs.saved_layer(place)
    if saved is not None:
        runs.check_goes_on(saved, config, place, accept=True)
    return True
