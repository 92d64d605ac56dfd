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
from fl_lightning.results.provenance import name_of

FIXED = ("fabric.num_nodes", "fabric.devices", "resume")
"""Keys of `fit` that the job itself sets."""
UNREACHABLE = ("Unable to contact", "timed out", "Connection refused")
"""What sbatch says when it is not the job's fault."""
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
        check("time", None, self.time is not None, "a job needs it: --time HH:MM:SS")
        fine = re.fullmatch(r"(\d+-)?\d+(:\d\d){0,2}", self.time or "") is not None
        check("time", self.time, fine, "it must be SLURM's: minutes, HH:MM:SS or D-HH:MM:SS")
        name = re.fullmatch(r"[\w.-]+", self.partition or "x") is not None
        check("partition", self.partition, name, "it must be a partition's name")
        memory = re.fullmatch(r"\d+[KMGT]?", self.mem or "1") is not None
        check("mem", self.mem, memory, "it must be SLURM's: MiB, or a number and K, M, G or T")
        line = ["/bin/bash", "-nc", self.setup or ""]
        read = subprocess.run(line, capture_output=True, text=True, check=False)
        error = " ".join(read.stderr.split())
        check("setup", self.setup, not error, f"it must be lines of a shell script: {error}")
        limit = _seconds(str(self.time))
        fine = limit == 0 or self.warning < limit  # 0: SLURM sets no limit
        allowed = (
            f"it must be shorter than the time limit, {limit} s, or the job would be queued "
            f"again for ever"
        )
        check("warning", self.warning, fine, allowed)

    def check_ranks(self, clients: int) -> None:
        """Raise `BadInput` for more processes than `clients`."""
        key = (
            "gpus_per_node"
            if self.gpus_per_node
            else "tasks_per_node"
            if self.tasks_per_node > 1
            else "nodes"
        )
        ranks = self.nodes * (self.gpus_per_node or self.tasks_per_node)
        check(
            key,
            getattr(self, key),
            ranks <= clients,
            f"{ranks} processes: at most one for each of {clients} clients",
        )

    def check_cluster(self) -> None:
        """Raise `BadInput` without SLURM, and for nodes or GPUs that it has not: such a job may
        wait for ever."""
        here = shutil.which("sbatch") is not None
        check("submit", "sbatch", here, "it is not on this machine: --dry_run shows the script")
        if shutil.which("sinfo") is None:
            return
        partition = [f"--partition={self.partition}"] if self.partition else []
        line = ["sinfo", "--noheader", "--Node", "--format=%N %G", *partition]
        try:
            answer = subprocess.run(
                line, capture_output=True, text=True, errors="replace", check=False, timeout=30
            )
        except subprocess.TimeoutExpired:
            return  # sbatch will say what is the matter
        nodes = dict(words.split(" ", 1) for words in answer.stdout.splitlines() if " " in words)
        if answer.returncode or not nodes:
            return
        gpus = [
            sum(map(int, re.findall(r"gpu(?::[^:,()]+)?:(\d+)", has))) for has in nodes.values()
        ]
        gpus_per_node, most = self.gpus_per_node, max(gpus)
        check(
            "gpus_per_node", gpus_per_node, gpus_per_node <= most, f"no node has more than {most}"
        )
        enough = sum(has >= gpus_per_node for has in gpus)
        whose = f" with {gpus_per_node} GPUs" if gpus_per_node else ""
        check(
            "nodes", self.nodes, self.nodes <= enough, f"at most the {enough} that there are{whose}"
        )

    def wishes(self) -> str:
        """What the job wants of the cluster, in words."""
        words = [
            f"nodes {self.nodes}",
            *([f"gpus_per_node {self.gpus_per_node}"] if self.gpus_per_node else []),
        ]
        words += [f"partition {self.partition}"] if self.partition else []
        return ", ".join([*words, f"time {self.time}"])


def submit(flags: list[str], job: Job, array: str | None) -> str:
    """Writes the job script of a run, or of a sweep, and hands it to sbatch; returns what was
    submitted, in words, or with `dry_run` the script.

    Args:
        flags: of the run, as on the command line.
        job: what it needs.
        array: the sweep, as `grid` has it; None: one run.
    """
    job.check()
    given = read_flags(flags)[1]
    allowed = "the job sets it: nodes and gpus_per_node (or tasks_per_node) say how many"
    for key in FIXED:
        check(key, "given", all(flag.key != key for flag in given), allowed)
    # Bad input is answered now, not when the job's turn has come.
    points = grid(array)
    lines, runs, configs = zip(*(_tried_out(given, point, job) for point in points), strict=True)
    places = [folder for folder, *_ in runs]
    twice = next((folder.name for k, folder in enumerate(places) if folder in places[:k]), None)
    allowed = f"two of its runs would be called {twice}: give other values"
    check("array", array, twice is None, allowed)
    from fl_lightning.lab.planning.start import check_starts

    check_starts(configs)
    out = places[0].parent
    name = places[0].name if len(runs) == 1 else f"{_stem(given)}-{len(runs)}-runs"
    text = script(job, lines, out, name)
    if job.dry_run:
        return text.removesuffix("\n")
    job.check_cluster()
    states = queue.states_of(out, places)
    again = next((folder.name for folder in places if states.get(folder) in queue.ALIVE), None)
    allowed = "SLURM has a job that is to do this run: cancel it, or give another name"
    check("name", again, again is None, allowed)
    send(job, text, out, name, runs)
    return f"{len(lines)} run{'s' * (len(lines) > 1)} in {out}; see: fl-train status {out}"


def send(job: Job, text: str, out: Path, name: str, runs: Sequence[tuple[Path, str, int]]) -> None:
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
        raise BadInput(
            "out", str(out), f"{file.parent} cannot be written ({error.strerror})"
        ) from None
    done = subprocess.run(
        ["sbatch", str(file)], capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        file.unlink()
        answer = " ".join(done.stderr.split())
        if any(word in answer for word in UNREACHABLE):
            raise RunFailed(f"sbatch did not reach SLURM: {answer}")
        raise BadInput("submit", job.wishes(), f"sbatch refuses it: {answer}")
    queue.write(file.parent, name, done.stdout, runs)
    print(f"{done.stdout.strip()}; script: {file}")


def script(job: Job, lines: Sequence[Sequence[str]], out: Path, name: str) -> str:
    """The text of the job script: one array task for each of `lines`, the words of a `fit`."""
    template = Template(
        resources.files("fl_lightning.slurm").joinpath("job.sbatch").read_text(encoding="utf-8")
    )
    gpus = job.gpus_per_node
    directives = [f"#SBATCH --gres=gpu:{gpus}"] if gpus else []
    directives += [f"#SBATCH --partition={job.partition}"] if job.partition else []
    directives += [f"#SBATCH --mem={job.mem}"] if job.mem else []
    cpus = f"--cpus-per-task={job.cpus_per_task}" if job.cpus_per_task else ""
    directives += [f"#SBATCH {cpus}"] if cpus else []
    directives += [f"#SBATCH --array=0-{len(lines) - 1}"] if len(lines) > 1 else []
    directives += [f"#SBATCH {_directive(word)}" for word in shlex.split(job.sbatch or "")]
    return template.substitute(
        name=_escaped(name),
        nodes=job.nodes,
        tasks=gpus or job.tasks_per_node,
        time=job.time,
        log=_escaped(
            str(out.resolve() / "jobs" / ("%x-%A_%a.out" if len(lines) > 1 else "%x-%j.out"))
        ),
        warning=job.warning,
        directives="\n".join(directives),
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
    return f'{key}="{_escaped(value)}"' if equals and key.startswith("-") else f'"{_escaped(word)}"'


def grid(text: str | None) -> list[dict[str, str]]:
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
            axis += [str(k) for k in range(int(span[1]), int(span[2]) + 1)] if span else [part]
        fine = equals and key and key not in axes and all(axis)
        check(
            "array",
            text,
            bool(fine),
            "it must be KEY=VALUES words, such as 'seed=0-4 data.alpha=0.1,0.3'",
        )
        axes[key] = axis
    points = [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]
    check("array", text, 1 <= len(points) <= MOST_RUNS, f"it must give 1 to {MOST_RUNS} runs")
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


def _tried_out(
    flags: Sequence[Flag], point: dict[str, str], job: Job
) -> tuple[list[str], tuple[Path, str, int], Config]:
    """Resolves the run of one point of a sweep.

    Returns:
        The words of its `fit`, with a `--name` of its own (a resumed job must find its folder); its
        folder, method and rounds; its config.
    """
    words = [word for flag in flags for word in flag.words]
    words += [word for key, value in point.items() for word in (f"--{key}", value)]
    layers, first = layers_of_flags(read_flags(words)[1])
    start = start_of(layers)
    check(
        "config",
        None,
        first is not None,
        "a job resumes its run, which starts with --config only: name one",
    )
    config = resolve(layers)
    if start.name is None and not point:
        taken = queue.names(Path(start.out))
        numbered = (f"{_stem(flags)}-{k:03d}" for k in itertools.count(1))
        name = next(n for n in numbered if n not in taken and not (Path(start.out) / n).exists())
    else:
        unnamed = () if start.name else ("seed", "method", "data.source", "data.root")
        parts = [_shown(key, value) for key, value in point.items() if key not in unnamed]
        stem = start.name or name_of(config, _stem(flags))
        name = "-".join([stem, *(re.sub(r"[^\w.+-]", "_", part) for part in parts)])
    out = Path(start.out).resolve()
    opening.check_name(replace(start, out=str(out), name=name))
    job.check_ranks(config.clients)
    facts = out / name, str(config.by_key()["method"]["name"]), config.federation.rounds
    return [*words, "--out", str(out), "--name", name], facts, config


def _shown(key: str, value: str) -> str:
    """One setting of a sweep in a name: `lam0.1`, `judge-after`."""
    return f"{key.rpartition('.')[2]}{'' if value[:1].isdigit() else '-'}{value}"
