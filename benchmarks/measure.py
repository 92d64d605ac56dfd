"""Fair timing on a busy machine: CPU seconds of one thread, sides interleaved, medians with their
intervals, tables."""

from __future__ import annotations

import ctypes
import gc
import math
import multiprocessing
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
from scipy.stats import binom

from fl_lightning.foundation.device import module_of, peak_bytes, synchronize


def interleaved(
    sides: Mapping[str, Callable[[], object]],
    pairs: int,
    clock: Callable[[], float] = time.process_time,
    limit: float = math.inf,
) -> dict[str, list[float]]:
    """Seconds of each side, `pairs` times, in the order A B C C B A ..., after one run each that
    does not count.

    Args:
        sides: what is measured, by name.
        pairs: how often each side counts; less often, but at least once, where `limit` seconds have
            passed.
        clock: gives seconds: of the CPU, or `device_clock`.
        limit: wall seconds after which no further turn begins.
    """
    names, end = list(sides), time.monotonic() + limit
    for run in sides.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for k in range(pairs):
        if k and time.monotonic() > end:
            break
        for name in names if k % 2 == 0 else reversed(names):
            gc.collect()
            start = clock()
            sides[name]()
            seconds[name].append(clock() - start)
    return seconds


Answer = TypeVar("Answer")


def alone(work: Callable[..., Answer], *args: object) -> Answer:
    """What `work` gives in a new process with one thread."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return pool.submit(work, *args).result()


def command(*words: str) -> str:
    """What a command prints that runs to its end, on one thread and with this folder's callbacks.
    Errors are shown."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | own, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stderr}")
    return done.stdout


def device_clock(device: torch.device) -> Callable[[], float]:
    """Wall seconds, read once the device has finished all queued work."""

    def clock() -> float:
        synchronize(device)
        return time.perf_counter()

    return clock


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The narrowest order-statistic interval with 95 % for the median; lowest to highest where
    there are 5 or fewer."""
    ordered = sorted(values)
    drop = max(int(binom.ppf(0.025, len(values), 0.5)) - 1, 0)  # of how many the median lies below
    return ordered[drop], ordered[-1 - drop]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Median of the paired ratios, and its interval."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return median(ratios), *interval(ratios)


@dataclass
class Row:
    """One line of the table."""

    name: str
    what: str
    seconds: float | None = None
    against: str = ""
    against_seconds: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    goal: str = ""
    note: str = ""
    pairs: int = 0
    date: str = ""


def compared(
    name: str,
    what: str,
    ours: Sequence[float],
    against: str,
    theirs: Sequence[float],
    scale: int,
    goal: str = "",
    note: str = "",
) -> Row:
    """A row from paired seconds, of which `scale` rounds were taken at once."""
    middle, low, high = ratio(ours, theirs)
    return Row(
        name,
        what,
        median(ours) / scale,
        against,
        median(theirs) / scale,
        middle,
        low,
        high,
        goal,
        note,
    )


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    head = [
        "benchmark",
        "what",
        "CPU s",
        "against",
        "CPU s",
        "ratio [95 % interval]",
        "goal",
        "notes",
        "runs",
        "date",
    ]
    lines = []
    for r in rows:
        digits = ".2f" if r.ratio is None or r.ratio > 0.2 else ".4f"
        number = (
            ""
            if r.ratio is None
            else f"**{r.ratio:{digits}}** [{r.low:{digits}}, {r.high:{digits}}]"
        )
        ours, theirs = ("" if s is None else f"{s:.3g}" for s in (r.seconds, r.against_seconds))
        lines.append(
            [r.name, r.what, ours, r.against, theirs, number, r.goal, r.note, str(r.pairs), r.date]
        )
    return "\n".join(markdown(head, lines))


class PeakMemory:
    """Peak memory of this process since `reset`, beyond what it held then, in MiB (Linux)."""

    def reset(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is free already must not hide what is taken
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status("VmRSS")

    def extra_mib(self) -> float:
        return _status("VmHWM") - self._before

    def kept_mib(self) -> float:
        """What it still holds beyond that, once what is free has been given back."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        return _status("VmRSS") - self._before


class DeviceMemory:
    """Peak memory that torch has taken on a device since `reset`, beyond what it held then, in
    MiB."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def reset(self) -> None:
        gc.collect()
        module = module_of(self.device)
        module.empty_cache()
        module.reset_peak_memory_stats()
        self._before = peak_bytes(self.device) or 0.0

    def extra_mib(self) -> float:
        return ((peak_bytes(self.device) or 0.0) - self._before) / 2**20


def peak_memory(device: torch.device) -> PeakMemory | DeviceMemory:
    """Of the process, or of the accelerator that it computes on."""
    return PeakMemory() if device.type == "cpu" else DeviceMemory(device)


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def machine() -> str:
    """CPU, threads in use, versions."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = dict(line.split(":", 1) for line in info.read_text().split("\n\n")[0].splitlines())
        fields = {key.strip(): value.strip() for key, value in lines.items()}
        cpu = (
            f"{fields['model name']} (family {fields.get('cpu family')}, model "
            f"{fields.get('model')})"
        )
    return (
        f"{cpu}, {torch.get_num_threads()} thread, torch {torch.__version__}, Python "
        f"{platform.python_version()}"
    )
