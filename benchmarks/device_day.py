"""Measures what a machine with one GPU tells of this project in some minutes, most telling first.

    uv run python benchmarks/device_day.py --minutes 9 --out DIR
    uv run python benchmarks/device_day.py --only server-100 --out DIR    some, beside what DIR has
    uv run python benchmarks/device_day.py --table DIR                          tables for docs/

The items are the accelerator's tests, seconds a round of every executor against the hand-written
loop, and the server's step. Real data are looked for in
FL_DATA or `shared/data` beside the repository; where they are absent, noise of the same shape takes
their place, and the tables say so.

On a machine with one GPU that has torch, but neither uv nor a network: bring the checkout and
wheels of all else (`pip download --platform ...`), and begin with

    python3 -m pip install --no-index --no-deps --target SITE WHEELS/*.whl; export PYTHONPATH=SITE
    python3 -m pip install --no-index --no-deps --no-build-isolation -e .       (setuptools from 77 on)
    python3 -m pip check
    python3 benchmarks/device_day.py --minutes 9 --out DIR

Each item is a forked process, so that libraries are loaded once, an error of the device ends that
item alone, and no item outlasts its bound. Each number is added to DIR/day.jsonl as it comes;
DIR/log.txt has what the items printed.

Times are wall seconds, read once the device has finished all queued work, after a first run that
does not count; sides take turns. TF32 and the rest are torch's defaults, which the first table
names. torch.profiler counts kernels and launches in a further round. Idle is the share of a round's
seconds (taken without the profiler) for which, in that further round, nothing ran on the device. Of
runs that train together, numbers are those of one.
"""  # noqa: E501

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import platform
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

# Ask the driver's library for devices: the parent must not open CUDA before it forks.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import pytest
import torch
from measure import ONE_THREAD, PeakMemory, compared, device_clock, interleaved, machine, markdown
from server import measured
from speed import HAND, same_weights
from torch.profiler import ProfilerActivity, profile
from workloads import DATA, Rounds, Workload, launched, workloads

from fl_lightning.engine.federation import Federation
from fl_lightning.foundation.device import synchronize
from fl_lightning.foundation.heap import keep_freed
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.models.mlp import MLP
from fl_lightning.training.executors.together import Together

ROOT = Path(__file__).resolve().parents[1]
BOUNDS = {
    "machine": 60,
    "suite": 120,
    "rounds-100-mlps": 75,
    "rounds-10-mnist": 75,
    "rounds-10-resnet18": 75,
    "rounds-100-cifar": 75,
    "rounds-10-resnet18-bf16": 75,
    "server-10": 30,
    "server-100": 60,
    "rounds-100-mnist": 75,
    "rounds-10-cifar": 75,
    "server-30": 40,
    "golden": 300,
}
"""Items in their order, and the seconds after which each is ended. Ours: some twice what each
should take."""
LEAST = 20.0
"""Seconds that must be left for an item to begin."""
RUNS = 4
"""Runs of a workload that train together."""
PAIRS, LIMIT = 7, 15.0
"""Turns of each side at most, and seconds after which no further one begins."""
Line = dict[str, Any]


@dataclass
class Day:
    """Where lines are written, and what is measured how."""

    out: Path
    device: str
    tiny: bool = False
    item: str = ""

    def note(self, **line: Any) -> None:
        """Add a line to the file, for good."""
        with (self.out / "day.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"item": self.item, **line}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def attempt(
        self,
        side: str,
        function: Callable[[], Any],
    ) -> Any:
        """Return what the function returns; an error becomes a line, and None."""
        try:
            return function()
        except Exception as error:  # memory, an error of the device
            traceback.print_exc()
            words = f"{type(error).__name__}: {' '.join(str(error).split())}"
            self.note(side=side, error=words[:300])
            return None


# ---------------------------------------------------------------- items


def about(day: Day) -> None:
    """Write down the machine and its settings, and what a small operation costs the host."""
    device = launched(day.device).device
    clock = device_clock(device)
    x = torch.zeros(1, device=device)
    for _ in range(2):
        start = clock()
        for _ in range(1000):
            x.add_(1)
        microseconds = 1000 * (clock() - start)
    day.note(
        date=time.strftime("%Y-%m-%d"),
        device=day.device,
        gpu=torch.cuda.get_device_name() if day.device == "cuda" else "none",
        host=machine(),
        cpus=os.cpu_count(),
        system=platform.platform(),
        cudnn=torch.backends.cudnn.version(),
        tf32_matmul=torch.backends.cuda.matmul.allow_tf32,
        tf32_cudnn=torch.backends.cudnn.allow_tf32,
        cudnn_benchmark=torch.backends.cudnn.benchmark,
        images="real" if (DATA / "MNIST").exists() else "noise",
        us_a_launch=round(microseconds, 2),
    )


class Noting:
    """A plugin of pytest that writes each test's outcome down as it ends."""

    def __init__(self, day: Day) -> None:
        self.day = day

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            errors = [line[2:] for line in report.longreprtext.splitlines() if line[:2] == "E "]
            error = errors[0].strip()[:300] if errors else report.longreprtext[-200:]
            name = report.nodeid.rpartition("::")[2]
            self.day.note(test=name, outcome=report.outcome, error=error)


def suite(day: Day) -> None:
    """Run the accelerator's tests but the golden runs, or these alone."""
    # The work space is for deterministic runs.
    os.environ |= {"FL_TEST_DEVICE": day.device, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    golden = day.item == "golden"
    selected = "numbers_of_the_cpu" if golden else "not numbers_of_the_cpu"
    if day.tiny:
        selected += " and fedavg-32" if golden else " and executors_agree and mlp"
    words = [str(ROOT / "tests/accelerator/test_device.py"), "-m", "", "-k", selected, "-q"]
    # Warnings are errors with the versions that the suite is written for; here may be others.
    words += ["-p", "no:cacheprovider", "-o", "filterwarnings=default"]
    code = pytest.main(
        [*words, "-n", "0"] if day.tiny else words,
        plugins=[Noting(day)],
    )
    if code not in (0, 1):
        raise SystemExit(f"pytest ended with {code}")


def workload_of(day: Day) -> Workload:
    """Return the workload of an item: clients alike, so that noise and data take equal steps."""
    known = workloads()
    mnist, resnet = known["mnist-cnn-b10"], known["resnet18"]
    _, count, kind, *precision = day.item.split("-")
    base, samples, source, words = {
        "mlps": (known["100-mlps-all"], 14, 1437, "MLPs (64-32-10), 14 digits, 5 epochs"),
        "mnist": (mnist, 120, 60_000, "MNIST CNNs, 120 images, batches of 10"),
        "cifar": (
            replace(resnet, model=mnist.model, batch_size=10),
            50,
            5000,
            "CIFAR CNNs, 50 images, batches of 10",
        ),
        "resnet18": (
            replace(resnet, batch_size=64),
            256,
            5000,
            "ResNet-18, 256 images, batches of 64",
        ),
    }[kind]
    name = ", ".join([f"{count} {words}", *precision])
    clients, samples = (2, 14) if day.tiny else (int(count), samples)
    return replace(
        base,
        name=name,
        data=replace(
            base.data,
            partition="iid",
            fraction=clients * samples / source,
        ),
        clients=clients,
        train_samples=clients * samples,
        test_samples=clients * max(1, samples // 6),
        rounds_at_once=1,
        accelerator=day.device,
        precision="bf16-mixed" if precision else "32-true",
    )


def rounds(day: Day) -> None:
    """Write down each side's seconds a round, its peak of memory, and what the device does."""
    workload = workload_of(day)
    device = launched(day.device).device
    data, source = workload.load()
    day.note(workload=workload.name, data=source)

    def federation(name: Any, hub: Together | None = None) -> Federation:
        made = workload.federation(FedAvg(), data, executor=name, together=hub)
        trainer = made.worker.trainers[0]
        if trainer.executor.name != name:
            raise RuntimeError(trainer.made(name)[1])
        return made

    def beside() -> Callable[[], object]:
        hub = Together()
        runs = [Rounds(federation("vmap", hub)) for _ in range(RUNS)]

        def side() -> None:
            works = iter(list(enumerate(runs)))
            for _ in hub.drive(lambda waits: next(works, None)):
                pass

        return side

    makers: dict[str, Callable[[], Callable[[], object]]] = {
        HAND: lambda: Rounds(workload.bare(data, device)),
        "loop": lambda: Rounds(federation("loop")),
        "vmap": lambda: Rounds(federation("vmap")),
        "together": beside,
    }
    clock, memory = device_clock(device), PeakMemory(device)
    sides: dict[str, Callable[[], object]] = {}

    def first_round(name: str) -> None:
        memory.reset()
        start = clock()
        side = makers[name]()
        side()
        first = clock() - start
        day.note(
            side=name,
            first=first,
            peak_mib=round(memory.extra_mib()),
        )
        if first > LIMIT and not day.tiny:
            raise RuntimeError(f"its first round took {first:.0f} s")
        sides[name] = side

    for name in makers:
        day.attempt(name, partial(first_round, name))
    seconds = interleaved(sides, 1 if day.tiny else PAIRS, clock, LIMIT)
    for name in sides:
        share = RUNS if name == "together" else 1
        seconds[name] = [value / share for value in seconds[name]]
        day.note(
            side=name,
            seconds=median(seconds[name]),
            **compared("", name, HAND, seconds),
        )
        counts = day.attempt(name, partial(traced, sides[name], device)) or {}
        day.note(side=name, **{key: value / share for key, value in counts.items()})
    day.note(weights_differ=same_weights(workload, tolerance=math.inf))


def traced(side: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Return what the device does in a call of `side`; nothing for a CPU."""
    activity = getattr(ProfilerActivity, device.type.upper(), None)
    if activity is None or device.type == "cpu":
        return {}
    synchronize(device)
    with profile(activities=[activity]) as profiler:
        side()
        synchronize(device)
    return counted(
        [
            (event.name, event.device_type.name, event.time_range.start, event.time_range.end)
            for event in profiler.events()
        ]
    )


def counted(events: Sequence[tuple[str, str, float, float]]) -> dict[str, float]:
    """Return kernels, launches and waits of the host, and seconds in which the device was busy.

    Args:
        events: name, kind of device, begin and end in microseconds.
    """
    host = [name for name, kind, _, _ in events if kind == "CPU"]
    spans = sorted((begin, end) for _, kind, begin, end in events if kind != "CPU")
    names = [name for name, kind, _, _ in events if kind != "CPU"]
    busy, until = 0.0, -math.inf
    for begin, end in spans:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return {
        "kernels": sum(not name.startswith(("Memcpy", "Memset")) for name in names),
        "launches": sum("Launch" in name for name in host),
        "waits": sum("Synchronize" in name for name in host),
        "busy": busy / 1e6,
    }


def server(day: Day) -> None:
    """Time gram, relation and mix for so many ResNet-18, against the bare products."""
    clients, turns, model = int(day.item.split("-")[1]), 20, None
    if day.tiny:
        clients, turns, model = 3, 1, MLP((1, 8, 8), 10, [16])
    for solver in ("step", "exact"):
        result = measured(clients, solver, turns, day.device, LIMIT / 2, model)
        row = compared("", "step", "products", result["seconds"])
        mib = round(result["extra_mib"])
        day.note(clients=clients, solver=solver, **row, further_mib=mib)


KINDS: dict[str, Callable[[Day], None]] = {
    "machine": about,
    "suite": suite,
    "golden": suite,
    "rounds": rounds,
    "server": server,
}
"""Functions by the first word of an item's name."""


# ---------------------------------------------------------------- the day


def work(day: Day) -> None:
    """Run an item in its own forked process."""
    os.setsid()
    sys.stdout = sys.stderr = (day.out / "log.txt").open(
        "a",
        buffering=1,
        encoding="utf-8",
    )
    for descriptor in (1, 2):
        os.dup2(sys.stdout.fileno(), descriptor)
    os.environ |= ONE_THREAD
    torch.set_num_threads(1)
    keep_freed()  # as in a run
    print(f"---- {day.item}")
    KINDS[day.item.split("-")[0]](day)


def run(day: Day, bound: float) -> str:
    """Run an item for `bound` seconds at most, and return its outcome."""
    start = time.monotonic()
    day.note(begun=time.strftime("%Y-%m-%d %H:%M:%S"))
    process = multiprocessing.get_context("fork").Process(
        target=work,
        args=(day,),
    )
    process.start()
    try:
        process.join(bound)
        outcome = {None: f"stopped after its {bound:.0f} s", 0: "ended"}.get(
            process.exitcode, f"failed (exit {process.exitcode}): see log.txt"
        )
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    day.note(
        outcome=outcome,
        took=round(time.monotonic() - start, 1),
    )
    return outcome


def tables(texts: Sequence[str]) -> str:
    """Return the lines of each item's last run as tables, those of a side in one row."""
    items: dict[str, list[Line]] = {}
    for text in "\n".join(texts).splitlines():
        with contextlib.suppress(ValueError):  # a line that was cut off as it was written
            line: Line = json.loads(text)
            item = line.pop("item")
            if "begun" in line:
                items[item] = []
            items.setdefault(item, []).append(line)
    parts = []
    for item, lines in items.items():
        tests = [line for line in lines if "test" in line]
        rows: dict[tuple[Any, ...], Line] = {}
        for line in [line for line in lines if "test" not in line]:
            key = tuple(line.get(name) for name in ("side", "solver"))
            rows.setdefault(key, {}).update(line)
        for row in rows.values():
            if "busy" in row and "seconds" in row:
                row["idle, %"] = round(100 * (1 - row["busy"] / row["seconds"]))
        parts += [f"## {item}", markdown(rows.values())]
        if tests:
            failed = [line for line in tests if line["outcome"] == "failed"]
            parts += [
                markdown([Counter(line["outcome"] for line in tests)]),
                markdown(failed),
            ]
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what there is time for, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of day.jsonl and log.txt")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all items (default 9)")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(BOUNDS),
        default=list(BOUNDS),
    )
    parser.add_argument("--device", default="cuda", help="as fabric.accelerator (default cuda)")
    parser.add_argument("--tiny", action="store_true", help="sizes that tell nothing")
    parser.add_argument("--table", type=Path, nargs="+", help="print what these folders hold")
    args = parser.parse_args(argv)
    if args.table is None:
        out = args.out or parser.error("--out is needed: the folder of what is measured")
        out.mkdir(parents=True, exist_ok=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the item's `finally` ends it
        start = time.monotonic()
        for item in args.only:
            left = 60 * args.minutes - (time.monotonic() - start)
            outcome = f"not begun: {max(0.0, left):.0f} s left"
            if left >= LEAST:
                day = Day(out.resolve(), args.device, args.tiny, item)
                outcome = run(
                    day,
                    left if args.tiny else min(BOUNDS[item], left),
                )
            print(f"{time.monotonic() - start:5.0f} s  {item}: {outcome}", file=sys.stderr)
    folders = args.table or [args.out]
    print(tables([(folder / "day.jsonl").read_text(encoding="utf-8") for folder in folders]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
