"""The items of device_day.py, one in a process, which begins when it reads `go`."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from bare import STEPPERS, BareFedAvg
from device_day import ROOT, Day
from measure import device_clock, interleaved, machine, peak_memory, ratio
from server import measured
from speed import same_weights
from together import config_of, one_by_one, seconds, together
from torch.profiler import ProfilerActivity, profile
from workloads import Rounds, Workload, data_root, launched, workloads

from fl_lightning.configuration.config import Config
from fl_lightning.data import prepare
from fl_lightning.engine.federation import Federation
from fl_lightning.foundation.device import synchronize
from fl_lightning.foundation.heap import keep_freed
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.models import build
from fl_lightning.models.mlp import MLP
from fl_lightning.training.executors.together import Together

RUNS = 4
"""Runs of a workload that train together."""
PAIRS, LIMIT = 7, 15.0
"""Turns of each side at most, and seconds after which no further one begins."""
SHORT = (
    "fit --config kapc_exact_digits --fabric.threads 1 --loggers null --callbacks null "
    "--federation.clients 3 "
    "--federation.rounds 1 --federation.local_epochs 1 --data.fraction 0.2 --evaluation.every 1"
)
SANITIZED = {
    "loop": "--fabric.executor loop --fabric.bank host --model cnn --model.padding 2",
    "vmap": "--fabric.executor vmap",
}
"""Short runs for the sanitizers."""


def line_of(error: Exception) -> str:
    """An error in one line; whole, it goes into the log."""
    traceback.print_exception(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def about(day: Day) -> None:
    """The machine and its settings, and what a small operation of the device costs the host."""
    device, one_line = (
        launched(day.device).device,
        {"capture_output": True, "text": True, "check": False},
    )
    day.note(
        "machine",
        date=time.strftime("%Y-%m-%d"),
        device=day.device,
        host=machine(),
        cpus=os.cpu_count(),
        system=platform.platform(),
        cudnn=torch.backends.cudnn.version(),
        tf32_matmul=torch.backends.cuda.matmul.allow_tf32,
        tf32_cudnn=torch.backends.cudnn.allow_tf32,
        cudnn_benchmark=torch.backends.cudnn.benchmark,
        images="real" if (data_root() / "MNIST").exists() else "noise",
    )
    if shutil.which("nvidia-smi"):
        query = [
            "nvidia-smi",
            "--query-gpu=name,driver_version,memory.total",
            "--format=csv,noheader",
        ]
        day.note("machine", gpu=subprocess.run(query, **one_line).stdout.strip())
    clock, x = device_clock(device), torch.zeros(1, device=device)
    for times in (10, 1000):
        start = clock()
        for _ in range(times):
            x.add_(1)
        each = (clock() - start) / times
    day.note("machine", us_a_launch=round(1e6 * each, 2))


# ---------------------------------------------------------------- tests and sanitizers


class Noting:
    """A plugin of pytest that writes each test's outcome down as it ends."""

    def __init__(self, day: Day, item: str) -> None:
        self.day, self.item = day, item

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            errors = [
                line[2:].strip()
                for line in report.longreprtext.splitlines()
                if line.startswith("E ")
            ]
            error = (errors or [report.longreprtext[-200:]])[0][:300] if report.failed else ""
            self.day.note(
                self.item,
                test=report.nodeid.rpartition("::")[2],
                outcome=report.outcome,
                error=error,
            )


def suite(day: Day, item: str) -> None:
    """The accelerator's tests but the golden runs, or these alone, in as many processes as the
    suite has."""
    # for the deterministic runs
    os.environ |= {"FL_TEST_DEVICE": day.device, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    among = "numbers_of_the_cpu" if item == "golden" else "not numbers_of_the_cpu"
    if day.tiny:
        among += " and fedavg-32" if item == "golden" else " and executors_agree and mlp"
    words = [
        str(ROOT / "tests/accelerator/test_device.py"),
        "-m",
        "",
        "-k",
        among,
        *(["-n", "0"] if day.tiny else []),
    ]
    # Warnings are errors with the versions that the suite is written for; here there may be others.
    words += ["-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default"]
    if (code := pytest.main(words, plugins=[Noting(day, item)])) not in (0, 1):
        raise SystemExit(f"pytest ended with {code}")


def sanitizers(day: Day) -> None:
    """Short runs under compute-sanitizer (memory), and under torch's own sanitizer (streams), some
    at the same time."""
    tool = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    tools: dict[str, list[str]] = {"torch's": []} if day.device == "cuda" else {}
    if tool is None or day.device not in ("cuda", "cpu"):
        day.note("sanitizers", skipped=f"there is no compute-sanitizer for {day.device}")
    else:
        tools["compute-sanitizer"] = [
            tool,
            "--tool",
            "memcheck",
            "--error-exitcode",
            "86",
            "--print-limit",
            "3",
        ]

    def check(name: str, run: str, folder: str) -> None:
        own = {"TORCH_CUDA_SANITIZER": "1"} if name == "torch's" else {}
        if name == "compute-sanitizer":
            # else memory beside a block is torch's, and no error
            own = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        flags = [*SHORT.split(), *SANITIZED[run].split(), "--fabric.accelerator", day.device]
        line = [
            *tools[name],
            sys.executable,
            "-m",
            "fl_lightning",
            *flags,
            "--out",
            f"{folder}/{name[0]}-{run}",
        ]
        start, pipes = (
            time.monotonic(),
            {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True},
        )
        done = subprocess.run(line, env=os.environ | own, check=False, **pipes)
        last = next((text for text in reversed(done.stdout.splitlines()) if text.strip()), "")
        error = last[:300] if done.returncode else ""
        span = round(time.monotonic() - start, 1)
        day.note("sanitizers", tool=name, run=run, exit=done.returncode, error=error, seconds=span)
        print(f"{name}, {run}:\n{done.stdout[-3000:]}", flush=True)

    at_once = max(1, (os.cpu_count() or 1) // 2)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(at_once) as pool:
        list(
            pool.map(
                lambda pair: check(*pair, folder),
                [(name, run) for run in SANITIZED for name in tools],
            )
        )


# ---------------------------------------------------------------- rounds


def workload_of(day: Day, item: str) -> Workload:
    """The workload of an item: clients alike, so that noise and real data take the same steps."""
    known = workloads(data_root())
    mnist, resnet, mlp = known["mnist-cnn-b10"], known["resnet18"], known["100-mlps-all"]
    cifar = replace(resnet, model=mnist.model, batch_size=10)
    base, samples, source, words = {
        "mlps": (mlp, 14, 1437, "MLPs (64-32-10), 14 digits, 5 epochs of one step"),
        "mnist": (mnist, 120, 60_000, "MNIST CNNs, 120 images, batches of 10"),
        "cifar": (cifar, 50, 5000, "CIFAR CNNs, 50 images, batches of 10"),
        "resnet18": (
            replace(resnet, batch_size=64),
            256,
            5000,
            "ResNet-18, 256 images, batches of 64",
        ),
    }[item.split("-")[2]]
    clients = int(item.split("-")[1])
    if item.endswith("bf16"):
        base, words = replace(base, precision="bf16-mixed"), f"{words}, bf16-mixed"
    name = f"{clients} {words}"
    if day.tiny:
        clients, samples = 2, 14
    data = replace(base.data, partition="iid", fraction=clients * samples / source)
    return replace(
        base,
        name=name,
        data=data,
        clients=clients,
        train_samples=clients * samples,
        rounds_at_once=1,
        test_samples=clients * max(1, samples // 6),
        accelerator=day.device,
    )


def makers(workload: Workload) -> Iterator[tuple[str, Callable[[], Rounds]]]:
    """What makes each side of a workload, by name."""
    data, device = workload.config_of()[0], launched(workload.accelerator).device

    def engine(name: Any, hub: Together | None = None) -> Federation:
        fed = workload.federation(FedAvg(), data, executor=name, together=hub)
        trainer = fed.worker.trainers[0]
        if trainer.executor.name != name:
            raise RuntimeError(trainer.made(name)[1])
        return fed

    def beside() -> Rounds:
        hub = Together()
        federations = [engine("vmap", hub) for _ in range(RUNS)]

        def round(t: int) -> None:
            works = iter([(k, partial(fed.round, t)) for k, fed in enumerate(federations)])
            for _ in hub.drive(lambda waits: next(works, None)):
                pass

        return Rounds(round)

    def by_hand(stepper: Any) -> Rounds:
        return Rounds(workload.bare(data, stepper, device).round)

    yield from ((f"hand loop, {stepper}", partial(by_hand, stepper)) for stepper in STEPPERS)
    for name in ("loop", "vmap"):
        yield name, lambda name=name: Rounds(engine(name).round)
    yield "together", beside


def rounds(day: Day, item: str) -> None:
    """Seconds a round of each side, its peak of memory, and what the device does in it."""
    workload = workload_of(day, item)
    device = launched(day.device).device
    clock, memory = device_clock(device), peak_memory(device)
    day.note(item, workload=workload.name, data=workload.config_of()[1], runs=RUNS)
    ready: dict[str, Callable[[], object]] = {}
    for name, make in makers(workload):
        memory.reset()
        start = clock()
        try:
            side = make()
            side()
        except Exception as error:  # memory, an error of the device
            day.note(item, side=name, error=line_of(error))
            continue
        first = clock() - start
        day.note(item, side=name, first=first, peak_mib=round(memory.extra_mib()))
        if first < LIMIT or day.tiny:
            ready[name] = side
        else:
            day.note(item, side=name, error=f"its first round took {first:.0f} s")
    timed = interleaved(ready, 1 if day.tiny else PAIRS, clock, LIMIT)
    timed = {
        name: [s / (RUNS if name == "together" else 1) for s in spans]
        for name, spans in timed.items()
    }
    floor = min(
        (name for name in timed if name.startswith("hand")), key=lambda name: median(timed[name])
    )
    for name, spans in timed.items():
        middle, low, high = ratio(spans, timed[floor])
        day.note(
            item,
            side=name,
            seconds=median(spans),
            ratio=middle,
            low=low,
            high=high,
            turns=len(spans),
        )
    for name, side in ready.items():
        try:
            day.note(item, side=name, **traced(side, device))
        except Exception as error:
            day.note(item, side=name, untraced=line_of(error))
    day.note(item, weights_differ=same_weights(workload, tolerance=math.inf))


def traced(side: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """What the device does in a call of `side`; nothing of a CPU, and of what the profiler does not
    know."""
    kind = getattr(ProfilerActivity, device.type.upper(), None)
    if kind is None or device.type == "cpu":
        return {}
    synchronize(device)
    with profile(activities=[kind]) as profiler:
        side()
        synchronize(device)
    return counted(
        [
            (e.name, e.device_type.name, e.time_range.start, e.time_range.end)
            for e in profiler.events()
        ]
    )


def counted(events: Sequence[tuple[str, str, float, float]]) -> dict[str, Any]:
    """Kernels, launches by the host, waits of the host, and seconds in which anything ran there.

    Args:
        events: name, kind of device, begin and end in microseconds.
    """
    host = [name for name, kind, _, _ in events if kind == "CPU"]
    there = sorted((begin, end, name) for name, kind, begin, end in events if kind != "CPU")
    kernels = sum(not name.startswith(("Memcpy", "Memset")) for *_, name in there)
    if not kernels:
        return {"untraced": "the profiler saw no kernel"}
    busy, until = 0.0, -math.inf
    for begin, end, _ in there:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    launches, waits = (sum(word in name for name in host) for word in ("Launch", "Synchronize"))
    return {"kernels": kernels, "launches": launches, "waits": waits, "busy": busy / 1e6}


# ---------------------------------------------------------------- server and study


def server(day: Day, item: str) -> None:
    """Gram, relation and mix for so many ResNet-18, against the bare products."""
    clients, turns, model = (
        (3, 1, MLP((1, 8, 8), 10, [16])) if day.tiny else (int(item.split("-")[1]), 20, None)
    )
    for solver in ("step", "exact"):
        day.note(
            item,
            clients=clients,
            solver=solver,
            **measured(clients, solver, turns, day.device, LIMIT / 2, model),
        )


def study(day: Day) -> None:
    """Ten seeds of FedAvg on the digits, together and one by one, by each executor and by hand."""
    device, (seeds, rounds) = launched(day.device).device, (2, 1) if day.tiny else (10, 4)

    def configs(executor: str) -> list[Config]:
        made = config_of("fedavg", executor, rounds, 10)
        fabric = replace(made.fabric, accelerator=day.device, devices=1, threads=1)
        return [replace(made, seed=seed, fabric=fabric) for seed in range(seeds)]

    def by_hand(runs: Sequence[Config], folder: Path) -> None:
        for config in runs:
            data = prepare(config.data, config.federation.clients, config.seed)
            model = build(config.models[0].component, data.input_shape, data.num_classes)
            loop = BareFedAvg(config, data, model, STEPPERS[1], device)
            for t in range(1, rounds + 1):
                loop.round(t)

    day.note("study", seeds=seeds, rounds=rounds)
    ways: list[tuple[str, Any, str]] = [
        ("together", together, "vmap"),
        ("hand loop", by_hand, "loop"),
    ]
    for name, work, executor in [*ways, *((name, one_by_one, name) for name in ("loop", "vmap"))]:
        try:
            seconds(work, configs(executor)[:1], device_clock(device))
            day.note(
                "study", side=name, seconds=seconds(work, configs(executor), device_clock(device))
            )
        except Exception as error:
            day.note("study", side=name, error=line_of(error))


KINDS: dict[str, Callable[[Day, str], None]] = {
    "machine": lambda day, item: about(day),
    "suite": suite,
    "golden": suite,
    "rounds": rounds,
    "server": server,
    "sanitizers": lambda day, item: sanitizers(day),
    "study": lambda day, item: study(day),
}
"""By the first word of an item's name."""


def main(item: str, out: str, device: str, tiny: str) -> None:
    """Run one of device_day.BOUNDS in this process, once its turn has come."""
    if sys.stdin.readline() != "go\n":
        return
    torch.set_num_threads(1)
    keep_freed()  # as in a run
    with contextlib.ExitStack() as stack:
        if device == "pretended" and item not in ("suite", "golden"):  # these bring it along
            sys.path.append(str(ROOT / "tests" / "accelerator"))
            import pretended

            pretended.install()
            stack.enter_context(pretended.present())
        KINDS[item.split("-")[0]](Day(Path(out), device, tiny == "1"), item)


if __name__ == "__main__":
    main(*sys.argv[1:])
