"""Submits what `fl-train fit` would run here as a SLURM job or an array of jobs."""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from string import Template

from fl_lightning.configuration.config import Config, check
from fl_lightning.configuration.flags import Flag, layers_of_flags, read_flags
from fl_lightning.configuration.resolve import resolve, start_of
from fl_lightning.foundation.errors import BadInput, RunFailed
from fl_lightning.lab import queue
from fl_lightning.results import opening
from fl_lightning.results.provenance import run_name

FIXED = ("fabric.num_nodes", "fabric.devices", "resume")
"""Keys of `fit` that the job sets itself."""
UNREACHABLE = ("Unable to contact", "timed out", "Connection refused")
"""Phrases in sbatch's errors that mean that SLURM cannot be reached."""
NEVER = "node configuration is not available"
"""Phrase in the errors of `sbatch --test-only` for a job that no nodes of the cluster can run."""
MOST_RUNS = 1000  # SLURM's default limit on an array


@dataclass(frozen=True)
class Job:
    """The resources and options of a SLURM job; the arguments of `fl_lightning.submit` explain
    them."""

    nodes: int = 1
    gpus_per_node: int = 0
    tasks_per_node: int = 1
    time: str | None = None
    partition: str | None = None
    warning: int = 120
    sbatch: str | None = None
    dry_run: bool = False
    cpus_per_task: int | None = None
    mem: str | None = None
    setup: str | None = None

    def check(self) -> None:
        """Raise `BadInput` for a value that SLURM or the shell would not understand, and if the run
        would have to stop itself (`warning` seconds before the time limit) before it begins."""
        check(
            "time",
            None,
            self.time is not None,
            "a job needs a time limit: give --time HH:MM:SS",
        )
        patterns = {
            "time": (
                r"(\d+-)?\d+(:\d\d){0,2}",
                "SLURM's: minutes, HH:MM:SS or D-HH:MM:SS",
            ),
            "partition": (r"[\w.-]+", "a partition's name"),
            "mem": (
                r"\d+[KMGT]?",
                "SLURM's: MiB, or a number and K, M, G or T",
            ),
        }
        for key, (pattern, words) in patterns.items():
            text = getattr(self, key)
            fits = text is None or re.fullmatch(pattern, text) is not None
            check(key, text, fits, f"it must be {words}")
        shell = ["/bin/bash", "-nc", self.setup or ""]  # -n: bash parses the lines and runs nothing
        parsed = subprocess.run(shell, capture_output=True, text=True, check=False)
        error = " ".join(parsed.stderr.split())
        check(
            "setup",
            self.setup,
            not error,
            f"it must be lines of a shell script: {error}",
        )
        limit = _seconds(str(self.time))
        is_shorter = limit == 0 or self.warning < limit  # 0: SLURM sets no limit
        check(
            "warning",
            self.warning,
            is_shorter,
            f"it must be shorter than the time limit, {limit} s, or the job would be queued again "
            "for ever",
        )

    def check_ranks(self, clients: int) -> None:
        """Raise `BadInput` if the job starts more processes than there are `clients`."""
        key = "gpus_per_node" if self.gpus_per_node else "tasks_per_node"
        ranks = self.nodes * getattr(self, key)
        if ranks == self.nodes:  # one process on each node
            key = "nodes"
        check(
            key,
            getattr(self, key),
            ranks <= clients,
            f"it gives {ranks} processes for {clients} clients: give at most one process for each "
            "client",
        )

    def check_cluster(self) -> None:
        """Raise `BadInput` if there is no sbatch on this machine."""
        is_here = shutil.which("sbatch") is not None
        check(
            "submit",
            "sbatch",
            is_here,
            "there is no sbatch on this machine; --dry_run shows the script",
        )

    def resource_words(self) -> str:
        """The nodes, GPUs, partition and time of the job, as text for error messages."""
        keys = [key for key in ("gpus_per_node", "partition") if getattr(self, key)]
        return ", ".join(f"{key} {getattr(self, key)}" for key in ("nodes", *keys, "time"))


def submit(
    flags: list[str],
    job: Job,
    array: str | None,
) -> str:
    """Writes the job script of a run or a sweep and submits it.

    Args:
        flags: flags of the run, as on the command line.
        job: its resources.
        array: the sweep as text for `sweep_points`; None: one run.

    Returns:
        A line on what was submitted, or with `dry_run` the script.
    """
    job.check()
    run_flags = read_flags(flags)[1]
    for flag in run_flags:
        check(
            flag.key,
            flag.text,
            flag.key not in FIXED,
            "leave it out: a job always resumes, and --nodes and --gpus_per_node (or "
            "--tasks_per_node) set the processes",
        )
    # report bad input now, not when the job starts
    resolved = [_resolved_point(run_flags, point, job) for point in sweep_points(array)]
    lines, runs, configs = zip(*resolved, strict=True)
    places = [folder for folder, *_ in runs]
    for folder in places:
        check(
            "array",
            array,
            places.count(folder) == 1,
            f"two runs would be called {folder.name}: give other values",
        )
    from fl_lightning.lab.planning.start import check_starts

    check_starts(configs)
    out = places[0].parent
    name = places[0].name if len(runs) == 1 else f"{_name_stem(run_flags)}-{len(runs)}-runs"
    text = script(job, lines, out, name)
    if job.dry_run:
        return text.removesuffix("\n")
    job.check_cluster()
    states = queue.states_of(out, places)
    for folder in places:
        check(
            "name",
            folder.name,
            states.get(folder) not in queue.ALIVE,
            "a job in SLURM's queue trains this run: cancel the job, or give another name",
        )
    send(job, text, out, name, runs)
    return f"{len(lines)} run{'s' * (len(lines) > 1)} in {out}; see: fl-train status {out}"


def send(
    job: Job,
    text: str,
    out: Path,
    name: str,
    runs: Sequence[tuple[Path, str, int]],
) -> None:
    """Write a job script, submit it, print sbatch's answer, and record which runs the job carries
    out.

    Args:
        job: the job's resources.
        text: the script.
        out: folder of the runs; scripts go to `out/jobs`.
        name: name of the job.
        runs: folder, method and number of rounds of each run.

    Raises:
        BadInput: the folder cannot be written, or sbatch refuses the job.
        RunFailed: SLURM cannot be reached.
    """
    file = out / "jobs" / f"{name}.sbatch"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(
            "out", str(out), f"{file.parent} cannot be written ({error.strerror})"
        ) from None
    try:
        # alone, sbatch accepts a job for more nodes than there are, which then waits for ever
        _sbatch(job, file, "--test-only", refused=NEVER)
        answer = _sbatch(job, file)
    except Exception:
        file.unlink()
        raise
    queue.record_job(file.parent, name, answer, runs)
    print(f"{answer.strip()}; script: {file}")


def _sbatch(job: Job, file: Path, *flags: str, refused: str = "") -> str:
    """Returns what sbatch prints for the script `file`.

    Args:
        job: the job's resources, for the error message.
        file: the script.
        flags: further flags of sbatch.
        refused: an error of sbatch that contains this text is raised, as in `send`; others are
            ignored.
    """
    line = ["sbatch", *flags, str(file)]
    done = subprocess.run(line, capture_output=True, text=True, errors="replace", check=False)
    error = " ".join(done.stderr.split())
    if done.returncode and refused in error:
        if any(word in error for word in UNREACHABLE):
            raise RunFailed(f"sbatch did not reach SLURM ({error}): try again later")
        raise BadInput(
            "submit",
            job.resource_words(),
            f"sbatch refuses the job ({error}): change its resources",
        )
    return done.stdout


def script(
    job: Job,
    lines: Sequence[Sequence[str]],
    out: Path,
    name: str,
) -> str:
    """The text of the job script.

    Args:
        job: its resources.
        lines: arguments of `fl-train fit` for each run; several runs become an array of jobs.
        out: folder of the runs; logs go to `out/jobs`.
        name: name of the job.
    """
    file = resources.files("fl_lightning.slurm").joinpath("job.sbatch")
    gpus, is_array = job.gpus_per_node, len(lines) > 1
    cpus = f"--cpus-per-task={job.cpus_per_task}" if job.cpus_per_task else ""
    options = [
        f"--gres=gpu:{gpus}" if gpus else "",
        f"--partition={job.partition}" if job.partition else "",
        f"--mem={job.mem}" if job.mem else "",
        cpus,
        f"--array=0-{len(lines) - 1}" if is_array else "",
        *map(_directive, shlex.split(job.sbatch or "")),
    ]
    log = out.resolve() / "jobs" / ("%x-%A_%a.out" if is_array else "%x-%j.out")
    return Template(file.read_text(encoding="utf-8")).substitute(
        name=_escaped(name),
        nodes=job.nodes,
        tasks=gpus or job.tasks_per_node,
        time=job.time,
        log=_escaped(str(log)),
        warning=job.warning,
        directives="\n".join(f"#SBATCH {option}" for option in options if option),
        runs="\n".join(f"  {shlex.quote(shlex.join(line))}" for line in lines),
        setup=job.setup or "",
        cpus=f" {cpus}" if cpus else "",  # srun does not inherit it from sbatch
        command=shlex.join([sys.executable, "-m", "fl_lightning"]),
    )


def _escaped(value: str) -> str:
    """`value` as text between the double quotes of an #SBATCH directive."""
    return re.sub(r'(["\\])', r"\\\1", value)


def _directive(word: str) -> str:
    """A word for sbatch, quoted if needed: in an #SBATCH directive blanks end a word and # begins a
    comment."""
    if re.fullmatch(r"[\w@%+=:,./*^-]+", word):
        return word
    key, equals, value = word.partition("=")
    is_option = equals and key.startswith("-")
    return f'{key}="{_escaped(value)}"' if is_option else f'"{_escaped(word)}"'


def sweep_points(text: str | None) -> list[dict[str, str]]:
    """The points of a sweep: `seed=0-4 data.alpha=0.1,0.3` gives ten. None gives one point without
    keys.

    Raises:
        BadInput: a word is not KEY=VALUES, a key is given twice, or there are too many points.
    """
    axes: dict[str, list[str]] = {}
    for word in (text or "").split():
        key, equals, values = word.partition("=")
        axis: list[str] = []
        for part in values.split(","):
            span = re.fullmatch(r"(\d+)-(\d+)", part)
            axis += map(str, range(int(span[1]), int(span[2]) + 1)) if span else [part]
        is_axis = equals and key and key not in axes and all(axis)
        check(
            "array",
            text,
            bool(is_axis),
            "it must be KEY=VALUES words, such as 'seed=0-4 data.alpha=0.1,0.3'",
        )
        axes[key] = axis
    points = [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]
    check(
        "array",
        text,
        1 <= len(points) <= MOST_RUNS,
        f"it must have 1 to {MOST_RUNS} points",
    )
    return points


def _seconds(time: str) -> int:
    """The seconds of a time in SLURM's notation: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if not dash and len(parts) < 3:
        parts.insert(0, 0)
    hours, minutes, seconds, *_ = [*parts, 0, 0]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _name_stem(flags: Sequence[Flag]) -> str:
    """Returns the stem of the run folders' names: `--name`, else the config file's."""
    layers, first = layers_of_flags(flags)
    return start_of(layers).name or (Path(first).stem if first else "run")


def _resolved_point(
    flags: Sequence[Flag], point: dict[str, str], job: Job
) -> tuple[list[str], tuple[Path, str, int], Config]:
    """Resolves the run of one point of a sweep.

    Returns:
        The arguments of its `fit`, including a `--name` (a resumed job must find its folder); its
        folder, method and number of rounds; its config.
    """
    words = [word for flag in flags for word in flag.words]
    for key, value in point.items():
        words += [f"--{key}", value]
    layers, first = layers_of_flags(read_flags(words)[1])
    start = start_of(layers)
    check(
        "config",
        None,
        first is not None,
        "a job needs a config file: give --config",
    )
    config = resolve(layers)
    out = Path(start.out).resolve()
    if start.name is None and not point:
        earlier = queue.submitted_names(out)
        numbered = (f"{_name_stem(flags)}-{number:03d}" for number in itertools.count(1))
        name = next(n for n in numbered if n not in earlier and not (out / n).exists())
    else:
        unnamed = () if start.name else ("seed", "method", "data.source", "data.root")
        parts = [_name_part(key, value) for key, value in point.items() if key not in unnamed]
        stem = start.name or run_name(config, _name_stem(flags))
        name = "-".join([stem, *(re.sub(r"[^\w.+-]", "_", part) for part in parts)])
    opening.check_name(replace(start, out=str(out), name=name))
    job.check_ranks(config.clients)
    facts = (
        out / name,
        str(config.by_key()["method"]["name"]),
        config.federation.rounds,
    )
    return [*words, "--out", str(out), "--name", name], facts, config


def _name_part(key: str, value: str) -> str:
    """A value of a sweep as part of a run's name: `lam0.1`, `judge-after`."""
    hyphen = "" if value[:1].isdigit() else "-"
    return f"{key.rpartition('.')[2]}{hyphen}{value}"
