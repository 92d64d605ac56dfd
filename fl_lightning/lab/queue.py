"""Runs in SLURM's queue: `submit` records the runs of each job, `status` asks squeue for the jobs'
states."""

from __future__ import annotations

import getpass
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fl_lightning.foundation.files import write_whole
from fl_lightning.foundation.log import now

State = Literal["queued", "starting", "submitted", "gone"]
"""`queued`: the job waits; `starting`: the job has begun, its run has not; `submitted`: unknown,
since squeue does not answer; `gone`: the job has left the queue."""
ALIVE = ("queued", "starting")
"""States of a job that is in SLURM's queue."""
WAITS = (
    "PENDING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "RESV_DEL_HOLD",
    "SPECIAL_EXIT",
    "SUSPENDED",
)
"""SLURM's states of a job that waits to run, or to run again."""


@dataclass(frozen=True)
class Queued:
    """A run that a submitted job carries out, and the job's state."""

    folder: Path
    method: str
    rounds: int
    state: State
    why: str = ""
    """SLURM's reason for a job that waits: `Priority`, `Resources` and others."""


def record_job(
    jobs: Path,
    name: str,
    answer: str,
    runs: Iterable[tuple[Path, str, int]],
) -> None:
    """Record which runs a submitted job carries out.

    Args:
        jobs: folder of the records.
        name: name of the job script.
        answer: the output of sbatch, such as `Submitted batch job 17`, whose number is the job's;
            without a number, nothing is recorded.
        runs: folder, method and number of rounds of each run.
    """
    number = re.search(r"\d+", answer)
    if number is None:
        return
    content = {
        "job": number[0],
        "submitted": now(),
        "runs": [(str(folder), *rest) for folder, *rest in runs],
    }
    text = json.dumps(content, indent=1) + "\n"
    write_whole(jobs / f"{name}-{number[0]}.json", text, durable=False)


def queued(out: Path) -> list[Queued]:
    """The runs of all jobs submitted into `out`, with their states. Of a run that several jobs
    carry out, the entry of a job that is still in the queue, else of the last job."""
    jobs = list(_jobs(out))
    states = _squeue() if jobs else None
    latest: dict[Path, tuple[tuple[bool, tuple[str, int]], Queued]] = {}
    for job, when, runs in jobs:
        for k, (name, method, rounds) in enumerate(runs):
            number = f"{job}_{k}" if len(runs) > 1 else job
            state: tuple[State, str] = ("submitted", "")
            if states is not None:
                state = states.get(number, ("gone", ""))
            run = Queued(
                Path(name),
                method,
                rounds,
                *state,
            )
            rank = run.state in ALIVE, when
            if run.folder not in latest or latest[run.folder][0] <= rank:
                latest[run.folder] = rank, run
    return [run for _, run in latest.values()]


def states_of(out: Path, places: Iterable[Path]) -> dict[Path, State]:
    """The states of the runs in `places` that were submitted into `out`.

    Prints a warning if squeue does not answer.
    """
    state_by_folder = {run.folder.resolve(): run.state for run in queued(out)}
    states = {place: state_by_folder[place] for place in places if place in state_by_folder}
    if "submitted" in states.values():
        line = "squeue does not answer: runs that are queued already may be submitted twice"
        print(line, file=sys.stderr)
    return states


def submitted_names(out: Path) -> set[str]:
    """The names of all runs and job scripts that were ever submitted into `out`."""
    runs = {Path(folder).name for _, _, content in _jobs(out) for folder, *_ in content}
    return runs | {file.stem for file in (out / "jobs").glob("*.sbatch")}


def _jobs(out: Path) -> Iterator[tuple[str, tuple[str, int], list[Any]]]:
    """Yield the recorded jobs of `out`: number, a key that orders them by time, and runs (folder,
    method, rounds)."""
    for file in (out / "jobs").glob("*.json"):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            yield (
                content["job"],
                (content["submitted"], int(content["job"])),
                content["runs"],
            )
        except (OSError, ValueError, KeyError, TypeError):
            continue


def _squeue() -> dict[str, tuple[State, str]] | None:
    """The state of each of the user's jobs by number (`4711`, of an array `4711_3`), and SLURM's
    reason for those that wait; None if squeue does not answer."""
    line = [
        "squeue",
        "--noheader",
        "--array",
        f"--user={getpass.getuser()}",
        "--format=%i %T %r",
    ]
    try:
        answer = subprocess.run(
            line,
            capture_output=True,
            text=True,
            errors="replace",
            check=True,
            timeout=15,
        )
    except (OSError, KeyError, subprocess.SubprocessError):
        return None
    states: dict[str, tuple[State, str]] = {}
    for words in map(str.split, answer.stdout.splitlines()):
        if len(words) > 1:
            number, state, *reason = words
            waits = state in WAITS
            states[number] = ("queued", " ".join(reason)) if waits else ("starting", "")
    return states
