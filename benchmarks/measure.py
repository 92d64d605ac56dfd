"""Times sides of a comparison in turns on a busy machine, and writes the ratios as a table."""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import platform
import resource
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
from scipy.stats import binom

from fl_lightning.callbacks.base import Observer
from fl_lightning.core import RoundRecord, RunContext
from fl_lightning.foundation.device import module_of, peak_bytes, synchronize

HERE = Path(__file__).resolve().parent
ONE_THREAD = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
Row = dict[str, object]
Side = Callable[[], object]
Clock = Callable[[], float]


def interleaved(
    sides: Mapping[str, Side], pairs: int, clock: Clock = time.process_time, limit: float = math.inf
) -> dict[str, list[float]]:
    """Return seconds of each side, taken in the order A B C C B A after a first run of each.

    Args:
        sides: the functions to time, by name.
        pairs: runs of each side that count.
        clock: CPU seconds, or `device_clock`.
        limit: wall seconds after which no further turn begins; the first one always runs.
    """
    end = time.monotonic() + limit
    for side in sides.values():
        side()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(pairs):
        if turn and time.monotonic() > end:
            break
        for name in list(sides)[:: 1 if turn % 2 == 0 else -1]:
            gc.collect()
            start = clock()
            sides[name]()
            seconds[name].append(clock() - start)
    return seconds


def device_clock(device: torch.device) -> Clock:
    """Return a wall clock that waits until the device has finished all queued work."""

    def clock() -> float:
        synchronize(device)
        return time.perf_counter()

    return clock


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the narrowest order statistics that hold the median with 95 %.

    Of five values or fewer: lowest and highest.
    """
    ordered = sorted(values)
    dropped = max(int(binom.ppf(0.025, len(values), 0.5)) - 1, 0)
    return ordered[dropped], ordered[-1 - dropped]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of the paired ratios, and its interval."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return median(ratios), *interval(ratios)


def compared(
    benchmark: str,
    side: str,
    other: str,
    seconds: Mapping[str, Sequence[float]],
    rounds: int = 1,
    goal: str = "",
    note: str = "",
) -> Row:
    """Return a row of the table: `side` against `other`, of which `rounds` were taken at once."""
    middle, low, high = ratio(seconds[side], seconds[other])
    digits = 2 if middle > 0.2 else 4
    return {
        "benchmark": benchmark,
        "what": side,
        "s": f"{median(seconds[side]) / rounds:.3g}",
        "against": other,
        "its s": f"{median(seconds[other]) / rounds:.3g}",
        "ratio [95 %]": f"**{middle:.{digits}f}** [{low:.{digits}f}, {high:.{digits}f}]",
        "goal": goal,
        "notes": note,
        "runs": len(seconds[side]),
    }


def markdown(rows: Iterable[Mapping[str, object]]) -> str:
    """Return a table with a column for each key of the rows."""
    rows = list(rows)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[str(row.get(column, "")) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


class PeakMemory:
    """Peak memory since `reset`, in MiB: of this process (Linux), or of torch on an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def reset(self) -> None:
        gc.collect()
        if self.device.type == "cpu":
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
        else:
            module_of(self.device).empty_cache()
            module_of(self.device).reset_peak_memory_stats()
        self.before = self.peak()

    def peak(self) -> float:
        if self.device.type != "cpu":
            return (peak_bytes(self.device) or 0.0) / 2**20
        status = Path("/proc/self/status").read_text().split()
        return int(status[status.index("VmHWM:") + 1]) / 1024

    def extra_mib(self) -> float:
        return self.peak() - self.before


class Stamps(Observer):
    """Appends to PATH.RANK a line [clock, CPU seconds, peak MiB] at the start and after each round.

    The child process of a benchmark gets it as `--callbacks`.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def on_round_start(
        self,
        run: RunContext,
        round: int,
        cohort: list[int],
    ) -> None:
        if round == 1:
            self.stamp(run)

    def on_round_end(self, run: RunContext, record: RoundRecord) -> None:
        self.stamp(run)

    def stamp(self, run: RunContext) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        with open(f"{self.path}.{run.rank}", "a") as file:
            numbers = [time.time(), time.process_time(), peak]
            file.write(f"{json.dumps(numbers)}\n")


def stamps(path: Path) -> np.ndarray:
    """Return what `Stamps` wrote for one rank: (rounds + 1, 3)."""
    return np.array([json.loads(line) for line in path.read_text().splitlines()])


def command(*words: str) -> float:
    """Run a command on one thread, and return its CPU seconds."""
    environment = os.environ | ONE_THREAD | {"PYTHONPATH": str(HERE)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.run(
        words,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if process.returncode:
        raise SystemExit(f"{' '.join(words)}\n{process.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def machine() -> str:
    """Return the CPU, the threads in use, and versions."""
    info = Path("/proc/cpuinfo")
    cpu = platform.processor() or platform.machine()
    if info.exists():
        lines = info.read_text().partition("\n\n")[0].splitlines()
        fields = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
        family = fields.get("cpu family")
        model = fields.get("model")
        cpu = f"{fields.get('model name', cpu)} (family {family}, model {model})"
    python = platform.python_version()
    return f"{cpu}, {torch.get_num_threads()} thread, torch {torch.__version__}, Python {python}"
