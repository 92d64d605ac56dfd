"""A SLURM job, or an array of jobs, for what `fl-train fit` would run here."""

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
"""Keys of `fit` that the job itself sets."""
UNREACHABLE = ("Unable to contact", "timed out", "Connection refused")
"""What sbatch says when it is not the job's fault."""
NEVER = "node configuration is not available"
"""What `sbatch --test-only` says of a job that no nodes of the cluster can run."""
MOST_RUNS = 1000  # SLURM's own default limit on an array


@dataclass(frozen=True)
class Job:
    """What a SLURM job needs (`fl_lightning.submit`)."""

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
        """Raise `BadInput` for a job that no cluster takes."""
        check(
            "time",
            None,
            self.time is not None,
            "a job needs it: --time HH:MM:SS",
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
        shell = ["/bin/bash", "-nc", self.setup or ""]  # -n: bash reads the lines, and runs nothing
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
        again = "or the job would be queued again for ever"
        requirement = f"it must be shorter than the time limit, {limit} s, {again}"
        check("warning", self.warning, is_shorter, requirement)

    def check_ranks(self, clients: int) -> None:
        """Raise `BadInput` for more processes than `clients`."""
        key = "gpus_per_node" if self.gpus_per_node else "tasks_per_node"
        ranks = self.nodes * getattr(self, key)
        if ranks == self.nodes:  # one on each
            key = "nodes"
        requirement = f"{ranks} processes: at most one for each of {clients} clients"
        check(key, getattr(self, key), ranks <= clients, requirement)

    def check_cluster(self) -> None:
        """Raise `BadInput` without SLURM."""
        is_here = shutil.which("sbatch") is not None
        requirement = "it is not on this machine: --dry_run shows the script"
        check("submit", "sbatch", is_here, requirement)

    def wishes(self) -> str:
        """The nodes, GPUs, partition and time that the job asks for, in words."""
        keys = [key for key in ("gpus_per_node", "partition") if getattr(self, key)]
        return ", ".join(f"{key} {getattr(self, key)}" for key in ("nodes", *keys, "time"))


def submit(
    flags: list[str],
    job: Job,
    array: str | None,
) -> str:
    """Writes the job script of a run, or of a sweep, and hands it to sbatch; returns what was
    submitted, in words, or with `dry_run` the script.

    Args:
        flags: of the run, as on the command line.
        job: what it needs.
        array: the sweep, as `sweep_points` has it; None: one run.
    """
    job.check()
    run_flags = read_flags(flags)[1]
    requirement = (
        "leave it out: a job always resumes, and --nodes and --gpus_per_node (or --tasks_per_node) "
        "set the processes"
    )
    for flag in run_flags:
        check(flag.key, flag.text, flag.key not in FIXED, requirement)
    # Bad input is answered now, not when the job's turn has come.
    resolved = [_resolved_point(run_flags, point, job) for point in sweep_points(array)]
    lines, runs, configs = zip(*resolved, strict=True)
    places = [folder for folder, *_ in runs]
    for folder in places:
        requirement = f"two of its runs would be called {folder.name}: give other values"
        check("array", array, places.count(folder) == 1, requirement)
    from fl_lightning.lab.planning.start import check_starts

    check_starts(configs)
    out = places[0].parent
    name = places[0].name if len(runs) == 1 else f"{_stem(run_flags)}-{len(runs)}-runs"
    text = script(job, lines, out, name)
    if job.dry_run:
        return text.removesuffix("\n")
    job.check_cluster()
    states = queue.states_of(out, places)
    requirement = "SLURM has a job that is to do this run: cancel it, or give another name"
    for folder in places:
        check(
            "name",
            folder.name,
            states.get(folder) not in queue.ALIVE,
            requirement,
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
    """Write the job script `text` into `out`, hand it to sbatch, print what it says, and keep which
    runs the job has.

    Args:
        runs: folder, method and rounds of each.

    Raises:
        BadInput: the folder cannot be written, or sbatch refuses the job.
        RunFailed: SLURM cannot be reached.
    """
    file = out / "jobs" / f"{name}.sbatch"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        requirement = f"{file.parent} cannot be written ({error.strerror})"
        raise BadInput("out", str(out), requirement) from None
    try:
        # sbatch takes a job for more nodes than there are, and lets it wait for ever.
        _sbatch(job, file, "--test-only", refused=NEVER)
        answer = _sbatch(job, file)
    except Exception:
        file.unlink()
        raise
    queue.record_job(file.parent, name, answer, runs)
    print(f"{answer.strip()}; script: {file}")


def _sbatch(job: Job, file: Path, *flags: str, refused: str = "") -> str:
    """What sbatch prints of the script `file`; raises as `send` does where its error contains
    `refused`."""
    line = ["sbatch", *flags, str(file)]
    done = subprocess.run(line, capture_output=True, text=True, errors="replace", check=False)
    error = " ".join(done.stderr.split())
    if done.returncode and refused in error:
        if any(word in error for word in UNREACHABLE):
            raise RunFailed(f"sbatch did not reach SLURM: {error}")
        raise BadInput("submit", job.wishes(), f"sbatch refuses it: {error}")
    return done.stdout


def script(
    job: Job,
    lines: Sequence[Sequence[str]],
    out: Path,
    name: str,
) -> str:
    """The text of the job script: one array task for each of `lines`, the words of a `fit`."""
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
        cpus=f" {cpus}" if cpus else "",  # srun does not take it over from sbatch
        command=shlex.join([sys.executable, "-m", "fl_lightning"]),
    )


def _escaped(value: str) -> str:
    """`value` as it is written between the double quotes of a directive."""
    return re.sub(r'(["\\])', r"\\\1", value)


def _directive(word: str) -> str:
    """A word for sbatch as a directive has it, where blanks end it and # begins a comment."""
    if re.fullmatch(r"[\w@%+=:,./*^-]+", word):
        return word
    key, equals, value = word.partition("=")
    is_option = equals and key.startswith("-")
    return f'{key}="{_escaped(value)}"' if is_option else f'"{_escaped(word)}"'


def sweep_points(text: str | None) -> list[dict[str, str]]:
    """The points of a sweep: `seed=0-4 data.alpha=0.1,0.3` are ten. None: one point that sets
    nothing.

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
        requirement = "it must be KEY=VALUES words, such as 'seed=0-4 data.alpha=0.1,0.3'"
        check("array", text, bool(is_axis), requirement)
        axes[key] = axis
    points = [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]
    check(
        "array",
        text,
        1 <= len(points) <= MOST_RUNS,
        f"it must give 1 to {MOST_RUNS} runs",
    )
    return points


def _seconds(time: str) -> int:
    """The seconds of a time as SLURM writes it: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if not dash and len(parts) < 3:
        parts.insert(0, 0)
    hours, minutes, seconds, *_ = [*parts, 0, 0]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _stem(flags: Sequence[Flag]) -> str:
    """Returns what the runs of a command line are called after: `--name`, else the config."""
    layers, first = layers_of_flags(flags)
    return start_of(layers).name or (Path(first).stem if first else "run")


def _resolved_point(
    flags: Sequence[Flag], point: dict[str, str], job: Job
) -> tuple[list[str], tuple[Path, str, int], Config]:
    """Resolves the run of one point of a sweep.

    Returns:
        The words of its `fit`, with a `--name` of its own (a resumed job must find its folder); its
        folder, method and rounds; its config.
    """
    words = [word for flag in flags for word in flag.words]
    for key, value in point.items():
        words += [f"--{key}", value]
    layers, first = layers_of_flags(read_flags(words)[1])
    start = start_of(layers)
    requirement = "a job resumes its run, which starts with --config only: name one"
    check("config", None, first is not None, requirement)
    config = resolve(layers)
    out = Path(start.out).resolve()
    if start.name is None and not point:
        earlier = queue.submitted_names(out)
        numbered = (f"{_stem(flags)}-{number:03d}" for number in itertools.count(1))
        name = next(n for n in numbered if n not in earlier and not (out / n).exists())
    else:
        unnamed = () if start.name else ("seed", "method", "data.source", "data.root")
        parts = [_shown(key, value) for key, value in point.items() if key not in unnamed]
        stem = start.name or run_name(config, _stem(flags))
        name = "-".join([stem, *(re.sub(r"[^\w.+-]", "_", part) for part in parts)])
    opening.check_name(replace(start, out=str(out), name=name))
    job.check_ranks(config.clients)
    facts = (
        out / name,
        str(config.by_key()["method"]["name"]),
        config.federation.rounds,
    )
    return [*words, "--out", str(out), "--name", name], facts, config


def _shown(key: str, value: str) -> str:
    """One setting of a sweep in a name: `lam0.1`, `judge-after`."""
    hyphen = "" if value[:1].isdigit() else "-"
    return f"{key.rpartition('.')[2]}{hyphen}{value}"
