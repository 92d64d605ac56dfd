"""`fl-train study`: from a study file to runs, by worker processes here or by SLURM."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shlex
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from fl_lightning.cli import folder as runs
from fl_lightning.cli.parser import fit_parser, hint, keys, study_parser, typed
from fl_lightning.cli.resolve import Start, complete, plan, to_yaml
from fl_lightning.cli.settings import Layer, Settings, layer_of, read_config, read_flags
from fl_lightning.cli.submit import MOST_RUNS, check_cluster, check_job, script, send, split
from fl_lightning.config import Config, check
from fl_lightning.errors import BadInput, RunFailed, redact
from fl_lightning.study.grid import Run, Study

if TYPE_CHECKING:
    from fl_lightning.study.folder import StudyFolder

QUIET: Layer = {"callbacks": {"heatmaps": None, "ledger": None, "progress": None}, "fabric": {"threads": 1}}
"""Beneath the base: nobody looks at pictures of hundreds of runs, and a study shows its own progress. One thread: a
core for each worker, and equal bits wherever the study is run."""
BEGIN = ("config", "print_config", "out", "name", "resume")
"""Keys of `fit` that begin one run."""
Job = tuple[Config, Path]


def study(argv: list[str]) -> None:
    """Run what is missing of a study in the folder `--out`, or hand it to SLURM."""
    parser = study_parser()
    if "-h" in argv or "--help" in argv:
        parser.print_help()
        return
    file, values = _values(argv)
    asked = Study.of(content(file))
    base, found, configs = resolve(asked, file.parent)
    from fl_lightning.study.folder import StudyFolder

    folder = StudyFolder(Path(values.out))
    folder.check(asked, yaml.safe_load(base), found)
    if values.slurm:
        _hand_over(folder, (asked, base, found), configs, values)
        return
    with folder.locked():
        folder.write(asked, base, found)
        _run(folder, found, configs, values.workers, shlex.join(["fl-train", "study", *argv]))


def resolve(asked: Study, beside: Path) -> tuple[str, list[Run], list[Config]]:
    """The base of a study as YAML, all its runs, and the config of each.

    Args:
        asked: the study.
        beside: folder of the study file, where files that it names are looked for first.

    Raises:
        BadInput: a config cannot work, or two methods of the list come to the same.
    """
    layers = [QUIET, *_base(asked.base, beside)]
    base = complete(plan(layers))
    runs.check_no_key(base)
    text = to_yaml(base)
    settled = layer_of("base", yaml.safe_load(text), keys(fit_parser()))
    found = asked.runs(base.federation.participation)
    first = [run for run in found if run.seed == asked.seeds[0]]
    planned = [_spoken(run, plan, _layers(settled, run)) for run in first]
    whole = [_spoken(run, complete, config) for run, config in zip(first, planned, strict=True)]
    _check_different(first, whole)
    by_place = {run.folder.rpartition("/")[0]: config for run, config in zip(first, whole, strict=True)}
    configs = [dataclasses.replace(by_place[run.folder.rpartition("/")[0]], seed=run.seed) for run in found]
    return text, found, configs


def run_one(job: Job) -> str | None:
    """Run one job of a worker, from the start or from its checkpoint; None, or one line that says why it failed."""
    from fl_lightning.run import fit

    config, folder = job
    print(f"---- {time.strftime('%F %T')} {folder}", file=sys.stderr)
    try:
        saved = runs.saved_layer(folder)
        if saved is not None:
            runs.check_goes_on(saved, config, folder)
        with runs.opened(Start(str(folder.parent), folder.name, True, False), folder.name, config) as place:
            fit(config, place, resume=True)
    except (BadInput, RunFailed) as error:
        print(said := redact(" ".join(str(error).split())), file=sys.stderr)
        return said
    except Exception as error:
        print(redact(traceback.format_exc()), end="", file=sys.stderr)
        said = redact(" ".join(f"{type(error).__name__}: {error}".split()))
        return f"{said} (traceback in the study's logs/)"
    return None


# ---------------------------------------------------------------- what was asked for


def _values(argv: list[str]) -> tuple[Path, Any]:
    """The study file, and the values of all keys."""
    known = keys(study_parser())
    words: list[str] = []
    flags: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        (flags if word.startswith("--") else words).append(word)
        action = known.get(word[2:].replace("-", "_"))
        switch = action is not None and hint(action) is bool  # true when it stands alone
        if word.startswith("--") and "=" not in word and rest and not switch:
            flags.append(rest.pop(0))
    if len(words) != 1:
        raise BadInput("study", " ".join(words) or None, "one file: fl-train study FILE.yaml --out DIR")
    flags = [spoken for part in split(flags, list(known)) for spoken in part]  # with hyphens or underscores
    layers = read_flags(flags, known)
    values = typed(study_parser(), Settings.merged(layers).plain)
    check("workers", values.workers, values.workers is None or values.workers >= 1, "it must be at least 1")
    if values.slurm:
        check("time", None, values.time is not None, "a job needs it: --time HH:MM:SS")
        check("workers", values.workers, values.workers is None, "with slurm every run is a job of its own")
        return Path(words[0]), values
    for key in {key for layer in layers for key in layer} - {"out", "workers", "slurm"}:
        raise BadInput(key, getattr(values, key), "it is for jobs: it needs slurm")
    return Path(words[0]), values


def content(file: Path) -> Any:
    """What a study file holds. Raises `BadInput` where it cannot be read."""
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadInput("study", str(file), f"it cannot be read: {reason}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise BadInput("study", str(file), f"{place}{getattr(error, 'problem', None) or error}") from None


def _base(given: Any, beside: Path) -> Iterator[Layer]:
    """The layers of a base: configs by name or file, mappings of keys, or a list of these, later ones winning.

    Loggers of a named config are left out: what it wants of one run is not wanted of a hundred. Those that the study
    file itself names stay.
    """
    known = keys(fit_parser())
    for part in given if isinstance(given, list) else [given]:
        if isinstance(part, str):
            file = beside / part
            layer = read_config(str(file) if file.is_file() else part, known)
            layer.pop("loggers", None)
        elif isinstance(part, dict):
            layer = layer_of("base", part, known)
        else:
            raise BadInput("base", part, "it must be a config's name or file, a mapping of keys, or a list of these")
        for key in BEGIN:
            if key in layer:
                raise BadInput(f"base.{key}", layer[key], "a study sets it for each run")
        layer.pop("seed", None)  # each run has its own
        yield layer


def _layers(settled: Layer, run: Run) -> list[Layer]:
    """All that decides a run but its seed."""
    known = keys(fit_parser())
    method = {"method": {"name": run.entry.name, "init_args": run.entry.arguments}}
    return [settled, method, layer_of("grid", run.setting, known), layer_of("methods", run.entry.settings, known)]


def _spoken(run: Run, resolved: Any, given: Any) -> Config:
    """`resolved(given)`; what is wrong with a method or its arguments is said in the study file's words."""
    try:
        config: Config = resolved(given)
    except BadInput as error:
        head, dot, rest = error.key.partition(".")
        if head != "method":
            raise
        raise BadInput(f"{run.entry.key}{dot}{rest}", error.value, error.allowed) from None
    return config


def _check_different(found: list[Run], configs: list[Config]) -> None:
    """Raise `BadInput` for a listed method that comes to the same as another of its setting."""
    for _, pairs in itertools.groupby(zip(found, configs, strict=True), key=lambda pair: pair[0].setting):
        before: list[tuple[Run, Config]] = []
        for run, config in pairs:
            same = next((other for other, has in before if has == config and not run.entry.forced), run)
            check(run.entry.key, run.entry.label, same is run, f"it comes to the same as {same.entry.key}")
            before.append((run, config))


# ---------------------------------------------------------------- running


def _run(folder: StudyFolder, found: list[Run], configs: list[Config], asked: int | None, line: str) -> None:
    import fl_lightning.run  # noqa: F401  before the workers are forked: they need not import it again
    from fl_lightning.study.runner import Runner

    jobs: list[Job] = [(config, folder.path / run.folder) for run, config in zip(found, configs, strict=True)]
    runner = Runner(folder, found, run_one, jobs)
    before, start = len(found) - len(runner.todo), time.monotonic()
    try:
        runner.run(_workers(asked, configs[0]))
    except BaseException as error:
        if not isinstance(error, Exception):  # Ctrl-C, SIGTERM
            print(f"study: stopped with {runner.standing()}; it goes on with: {line}", file=sys.stderr)
        raise
    stood = f" ({before} stood before)" if before else ""
    took = time.monotonic() - start
    print(f"study: {runner.standing()}{stood}, {took:.1f} s; the table: fl-train compare {folder.path}")


def _workers(asked: int | None, config: Config) -> int:
    """How many processes: as many as cores, but for runs of several processes, and for GPUs, which runs would share."""
    if asked is not None:
        return asked
    import torch

    if config.fabric.accelerator != "cpu" and torch.cuda.device_count():  # asks the driver, and opens no GPU
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    devices = 1 if config.fabric.devices == "auto" else int(config.fabric.devices)
    return max(1, cores // (devices * (config.fabric.threads or 1)))


def _hand_over(folder: StudyFolder, asked: tuple[Study, str, list[Run]], configs: list[Config], values: Any) -> None:
    """Write the config of each missing run into its folder, and submit arrays of jobs that resume them."""
    check_job(values)
    ranks = values.nodes * (values.gpus_per_node or values.tasks_per_node)
    fewest = min(config.federation.clients for config in configs)
    check("nodes", values.nodes, ranks <= fewest, f"{ranks} processes: at most one for each of {fewest} clients")
    todo = [(r, c) for r, c in zip(asked[2], configs, strict=True) if not folder.finished(r.folder)]
    places = [(folder.path / run.folder).resolve() for run, _ in todo]
    lines = [["--out", str(place.parent), "--name", place.name] for place in places]
    parts = [lines[k : k + MOST_RUNS] for k in range(0, len(lines), MOST_RUNS)]
    names = [folder.path.resolve().name + (f"-{k + 1}" if len(parts) > 1 else "") for k in range(len(parts))]
    texts = [script(values, part, folder.path, name) for part, name in zip(parts, names, strict=True)]
    if values.dry_run:
        print("".join(texts), end="")
        return
    check_cluster(values)
    with folder.locked():
        folder.write(*asked)
        for place, (_, config) in zip(places, todo, strict=True):
            if not (place / runs.CONFIG).exists():
                runs.write_config(place, config)
    for text, name in zip(texts, names, strict=True):
        send(values, text, folder.path, name)
    print(f"{len(todo)} of {len(configs)} runs in {folder.path}; see: fl-train status {folder.path}")
