"""Runs a study: from its file to its runs, in worker processes here or by SLURM."""

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
"""Settings that a study's base overrides. Nobody looks at pictures of hundreds of runs, and a study
prints its own progress. With one thread, each worker has a core, and results are bit-identical on
every machine. The method is named so that the methods listed have their papers' arguments unless
the base or the list sets others."""
_START = {"config", *(field.name for field in dataclasses.fields(Start))}
"""Keys of a single run's start."""
WHOLE = StudyPart()
"""All runs of a study."""
Selection = tuple[str | None, str | None, str | None]
"""The methods, seeds and settings to run, each as text with commas; None: all."""
Training = tuple[Config, Path]
"""A run's config and its folder."""


@dataclasses.dataclass(frozen=True)
class StudyOptions:
    """Options of `fl_lightning.study`."""

    out: str
    workers: int | None = None
    together: int | str | None = None
    accept_changed_code: bool = False
    slurm: bool = False
    job: Job = dataclasses.field(default_factory=Job)
    """Resources of each run's job, with `slurm`."""

    def check(self) -> None:
        """Raise `BadInput` for options that exclude each other."""
        if self.together is not None:
            check_together(self.together)
        if self.slurm:
            for key in ("workers", "together"):
                value = getattr(self, key)
                check(
                    key,
                    value,
                    value is None,
                    "leave it out: with --slurm every run is a job of its own",
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
                "it is an option of jobs: give --slurm, too",
            )


class Runs:
    """The runs in a study's folder; `str` says how many have ended."""

    def __init__(self, out: str, line: str) -> None:
        self.folder, self.line = Path(out), line

    def __str__(self) -> str:
        return self.line

    @property
    def scores(self) -> DataFrame:
        """All final scores (`results.runs.tidy`): method, setting, seed, client, model, metric,
        value.

        The method is the row's label; for a run that serves several rows, the name of the run's
        label folder.
        """
        from fl_lightning.results.runs import tidy, words

        folder = StudyFolder(self.folder)
        cells = by_key(folder.cells(), itemgetter("folder"))
        results = folder.intact_runs()
        names = []
        for name in results:
            cell, *others = cells[name]
            label = Path(name).parent.name if others else cell["label"]
            names.append((label, words(cell["setting"])))
        return tidy(results.values(), names)


def study(
    content: Any,
    overrides: list[Layer],
    chosen: Selection,
    options: StudyOptions,
) -> Runs:
    """Runs the study of a file: see `run_study`.

    Args:
        content: content of the study file.
        overrides: settings that override the study's base.
        chosen: the methods, seeds and settings to run, as texts of the command line.
        options: the folder, and how runs are trained.
    """
    options.check()
    check_overrides(overrides)
    definition, part = part_of(Study.of(content), *chosen)
    line = command.line("study", "STUDY", "--out", options.out)
    return Runs(options.out, run_study(definition, overrides, options, line, part))


def check_overrides(overrides: Sequence[Layer]) -> None:
    """Raise `BadInput` for settings of the command line that a study's base cannot have: a method,
    or a key of a single run such as `name` or `seed`."""
    for layer in overrides:
        check(
            "method",
            layer.get("method"),
            "method" not in layer,
            "list methods in the study file; only keys such as data.alpha can be set here",
        )
        for key in layer.keys() & _START:
            raise BadInput(key, layer[key], "a study sets it for each run: leave it out")


def run_study(
    definition: Study,
    overrides: Sequence[Layer],
    options: StudyOptions,
    line: str,
    part: StudyPart = WHOLE,
) -> str:
    """Trains the runs of a study that have not finished, here or by SLURM.

    Args:
        definition: the study.
        overrides: settings that override the study's base.
        options: the folder, and how runs are trained.
        line: the command that continues the study, for messages.
        part: the runs to train; the study's table contains all runs.

    Returns:
        A line on what has been done.

    Raises:
        BadInput: the study is refused before anything is written.
        RunFailed: some runs failed; all others were trained.
    """
    folder = StudyFolder(Path(options.out))
    # resolving configs takes seconds
    with signals.exit_at_signal(lambda: "fl-train: stopped before the study began"):
        definition, base, pairs = resolved_in(folder, definition, overrides)
    chosen = [pair for pair in pairs if pair[0] in part]
    settings = ", ".join(sorted(part.settings))
    check(
        "settings",
        settings,
        len(chosen) > 0,
        "no setting of the study has these values; see its grid",
    )
    most_together = definition.together if options.together is None else options.together
    # jobs train one run each, with the executors that the study has recorded
    at_once = 1 if options.slurm else most_together
    chosen, executors = together.choose_executors(
        folder,
        chosen,
        at_once,
        pairs,
    )
    todo = [(run, config) for run, config in chosen if not folder.finished(run.folder)]
    code.check_code_unchanged(folder, todo, options.accept_changed_code)
    samples.check_data_unchanged(folder, pairs, todo)

    def write() -> None:
        """Write the study's files, after another check: another process may have changed them."""
        runs = [run for run, _ in pairs]
        folder.check(definition, to_settings(base), runs)
        folder.write(definition, to_yaml(base), runs)
        together.write_executors(folder, executors)
        code.accept(folder, todo)

    if options.slurm:
        return _submit_runs(folder, chosen, len(pairs), options.job, write)
    fetch_datasets([config for _, config in todo])
    with folder.locked():
        write()
        return _run_here(
            folder,
            chosen,
            len(pairs),
            options.workers,
            most_together,
            line,
        )


def resolved_in(
    folder: StudyFolder, definition: Study, overrides: Sequence[Layer] = ()
) -> tuple[Study, Config, Pairs]:
    """Resolve a study that is to run in `folder`: add the seeds of the study that is there, if any,
    and call `resolved`.

    Returns:
        The study with all seeds; the base's config; each run with its config.

    Raises:
        BadInput: a config is refused (`resolved`); or the folder holds another study, or has
            trained runs that this study lacks.
    """
    if folder:  # seeds that were asked for earlier stay
        definition = with_seeds(definition, Study.of(folder.definition()).seeds)
    base, pairs = resolved(definition, overrides)
    folder.check(definition, to_settings(base), [run for run, _ in pairs])
    return definition, base, pairs


def resolved(
    definition: Study, overrides: Sequence[Layer] = (), defaults: Sequence[Layer] = ()
) -> tuple[Config, Pairs]:
    """Merge and check the settings of a study: the config of its base, and the config of each run.

    Args:
        definition: the study.
        overrides: settings that override the base.
        defaults: settings that the base overrides, beside `DEFAULTS`.

    Returns:
        The base's config; each run with its config, in the order of `Study.runs`.

    Raises:
        BadInput: a config is refused, two listed methods are the same, or `overrides` sets a key of
            the grid.
    """
    varied = definition.varied()
    for layer in overrides:
        for key, value in flat(layer):
            check(key, value, key not in varied, "the study's grid sets it: leave it out")
    layers = [DEFAULTS, *defaults, *_base_layers(definition.base), *overrides]
    if not any(key.startswith("data.") for key in varied):
        check_first_rows(layers)
    base = resolve(layers)
    opening.check_no_key(base)
    runs = definition.runs(base.federation.participation)
    of_one_seed = runs[: len(runs) // len(definition.seeds)]
    configs = [_resolved_as_listed(run, base) for run in of_one_seed]
    _check_different(of_one_seed, configs)
    # in the order of `runs`
    seeded = [dataclasses.replace(c, seed=seed) for seed in definition.seeds for c in configs]
    return base, list(zip(runs, seeded, strict=True))


def train(
    config: Config,
    folder: Path,
    accept: bool = False,
    put_together: Any = None,
) -> None:
    """Train `config` in `folder`, from the start or from its checkpoint.

    Args:
        config: the run's config.
        folder: run folder, new or begun.
        accept: whether own code may have changed since the run began.
        put_together: builds the federation (`fl_lightning.run.fit`).
    """
    from fl_lightning.run import fit

    print(f"---- {time.strftime('%F %T')} {folder}", file=sys.stderr)
    saved = opening.saved_settings(folder)
    if saved is not None:
        opening.check_resumable(saved, config, folder, accept)
    start = Start(out=str(folder.parent), name=folder.name, resume=True)
    with opening.open_run_folder(start, folder.name, config) as place:
        fit(config, place, resume=True, put_together=put_together)


def run_one(job: Training, put_together: Any = None) -> str | None:
    """Train one job of a worker; changed code is accepted, since the study has checked it. Returns
    None, or a line that says why the run failed."""
    return run_safely(
        lambda: train(
            *job,
            accept=True,
            put_together=put_together,
        )
    )


def run_safely(work: Callable[[], None]) -> str | None:
    """Call `work`; return None, or a line that says why it failed. The traceback of an unexpected
    error goes to the log."""
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


# ---------------------------------------------------------------- the definition


def _base_layers(base: Any) -> Iterator[Layer]:
    """The settings of a base: names or files of configs, mappings of keys, or a list of these,
    later ones winning.

    Loggers of a config file are left out: they suit one run, not a hundred. Loggers in the study
    file itself stay.
    """
    for part in base if isinstance(base, list) else [base]:
        check(
            "base",
            part,
            isinstance(part, str | dict),
            "it must be a config's name or file, a mapping of keys, or a list of these",
        )
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
                    "a study sets it for each run: leave it out",
                )
            layer.pop("seed", None)  # each run has its own
        yield from layers


def run_layers(run: StudyRun) -> list[Layer]:
    """The settings by which a run differs from the base, except for its seed."""
    entry = run.entry
    method = {"name": entry.name, "init_args": entry.arguments_in(run.setting)}
    return [
        {"method": method},
        layer_of("grid", run.setting),
        layer_of("methods", entry.settings),
    ]


def _resolved_as_listed(run: StudyRun, base: Config) -> Config:
    """Returns the config of a run. An error in a method or its arguments names the key as in the
    study file."""
    try:
        return resolve(run_layers(run), base)
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
    """Raise `BadInput` for a listed method whose config equals that of another in the same
    setting."""
    runs_and_configs = zip(runs, configs, strict=True)
    for pairs in by_key(runs_and_configs, lambda pair: str(pair[0].setting)).values():
        for number, (run, config) in enumerate(pairs):
            earlier = [pair[0] for pair in pairs[:number] if pair[1] == config]
            if earlier and not run.entry.forced:
                raise BadInput(
                    run.entry.key,
                    run.entry.label,
                    f"it has the same config as {earlier[0].entry.key}: remove one of them",
                )


# ---------------------------------------------------------------- running


def _run_here(
    folder: StudyFolder,
    chosen: Pairs,
    total: int,
    workers: int | None,
    at_once: int | str,
    line: str,
) -> str:
    """Trains the chosen runs that have not finished, in worker processes.

    Args:
        folder: the study's folder.
        chosen: the runs to train.
        total: number of runs of the whole study.
        workers: number of processes; None: `worker_count` decides.
        at_once: most runs that train together in a process, or `auto`.
        line: the command that continues the study.

    Returns:
        A line on how many runs have finished.
    """
    import fl_lightning.run  # noqa: F401  once, before the workers are forked
    from fl_lightning.lab.study.runner import follow
    from fl_lightning.lab.study.workers import one_by_one, serve_all

    provenance.collect_environment()  # likewise once
    configs = [config for _, config in chosen]
    processes = worker_count(workers, configs[0])
    runs_each = -(-len(chosen) // processes)
    together_each = min(runs_each, together.most_at_once(at_once, configs))
    together_each = together.within_memory(together_each, processes, configs)
    if together_each > 1:
        chosen = together.order_by_method(chosen)
    missing = [pair for pair in chosen if not folder.finished(pair[0].folder)]
    jobs: list[Training] = [(config, folder.path / run.folder) for run, config in missing]
    worker = (
        one_by_one(run_one) if together_each == 1 else partial(together.serve_together, run_one)
    )
    logs, count, begin = folder.path / "logs", len(chosen), time.monotonic()

    def progress() -> str:
        ended = sum(folder.finished(run.folder) for run, _ in chosen)
        return f"{ended} of {count} runs finished"

    with opening.say_when_stopped(
        lambda: f"study: stopped with {progress()}; it goes on with: {line}"
    ):
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


def fetch_datasets(configs: list[Config]) -> None:
    """Load each of torchvision's data sets once, so that workers do not download the same files at
    once.

    Data are loaded in a process of their own, since this process must have no threads when it forks
    the workers.

    Raises:
        BadInput: every run needs such a data set, and none can be loaded.
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
    """The number of worker processes.

    Args:
        number: the user's; None: 1 if runs use GPUs, which they would share, else as many as the
            cores suffice for, given the processes and threads of each run.
        config: the config of a run.
    """
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


def _submit_runs(
    folder: StudyFolder,
    chosen: Pairs,
    total: int,
    job: Job,
    write: Callable[[], None],
) -> str:
    """Writes the configs of unfinished runs to their folders, and submits arrays of jobs that
    resume the runs.

    Runs that are queued or running already are not submitted again.

    Args:
        folder: the study's folder.
        chosen: the runs to train.
        total: number of runs of the whole study.
        job: resources of each job.
        write: writes the study's files.

    Returns:
        A line on what was submitted; with `dry_run` the job scripts.
    """
    job.check_ranks(min(config.clients for _, config in chosen))
    if not job.dry_run:
        job.check_cluster()
    with contextlib.nullcontext() if job.dry_run else folder.locked():
        unfinished = [pair for pair in chosen if not folder.finished(pair[0].folder)]
        missing = {(folder.path / pair[0].folder).resolve(): pair for pair in unfinished}
        busy = _busy_runs(folder.path, list(missing))
        # a queued run reads its folder's config when it begins
        free = {place: config for place, (_, config) in missing.items() if not busy.get(place)}
        new = {place: config for place, config in free.items() if _config_changed(place, config)}
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
                lines.append(words + code.resume_flags(place, config))
                facts.append((place, run.entry.name, config.federation.rounds))
            scripts[name] = script(job, lines, folder.path, name), facts
        if job.dry_run and places:
            return "".join(text for text, _ in scripts.values()).removesuffix("\n")
        if not job.dry_run:
            write()
            for place, config in new.items():
                opening.write_config(place, config)
            for place, config in free.items():  # record the code that the job will execute
                owncode.store_planned(config, place)
        for name, (text, facts) in scripts.items():
            send(job, text, folder.path, name, facts)
    in_hand = f"{len(busy)} of {len(chosen)} runs are queued or running already"
    if places:
        busy_text = f", {in_hand}" if busy else ""
        line = f"{len(places)} of {total} runs in {folder.path}{busy_text}"
    else:
        ended = f"{len(chosen)} of {len(chosen)} runs have ended"
        line = f"nothing to submit: {in_hand if busy else ended}"
    return f"{line}; see: fl-train status {folder.path}"


def _busy_runs(
    out: Path,
    places: list[Path],
) -> dict[Path, bool]:
    """The runs of `places` that are queued or running, each with whether it may be running now."""
    from fl_lightning.lab.status import locked

    jobs = states_of(out, places)
    queued = {place: state != "queued" for place, state in jobs.items() if state in ALIVE}
    return queued | {place: True for place in places if locked(place)}


def _config_changed(place: Path, config: Config) -> bool:
    """Whether a run's config.yaml is absent or differs from `config`. Raises `BadInput` if the run
    cannot be resumed with `config`."""
    file = place / opening.CONFIG
    if file.is_file() and file.read_text(encoding="utf-8") == to_yaml(config):
        return False
    saved = opening.saved_settings(place)
    if saved is not None:
        opening.check_resumable(saved, config, place, accept_changed_code=True)
    return True
