"""How a round grows with ranks and with idle clients.

    uv run python benchmarks/scaling.py --out runs/scaling.json

Rows over ranks are in seconds of the clock and want a quiet machine, beside CPU seconds of the
busiest rank, which other programs disturb less; rows of idle clients are in CPU seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Barrier

import numpy as np
import torch
from measure import PeakMemory, Row, compared, interleaved, stamps
from speed import callbacks, main
from workloads import CPU, Rounds, Workload, alone, workloads

from fl_lightning.configuration.config import Component
from fl_lightning.foundation.heap import keep_freed
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedper import FedPer
from fl_lightning.run import fit

FEDERATIONS = (100, 10, 1_000, 10_000)
COHORT = 10
ROUNDS = 12
"""Of a run over ranks; the first two do not count."""


def idle(pairs: int) -> list[Row]:
    """A round with ten clients, whatever the number of those that are idle."""
    tiny = workloads()["100-mlps-10-a-round"]
    rows = []
    for name, method, judge, with_callbacks in (
        ("FedAvg", FedAvg(), "before", False),
        ("FedPer", FedPer(), "after", False),
        ("FedPer, run folder, checkpoint, pictures and progress", FedPer(), "after", True),
    ):
        sides, mib, memory = {}, {}, PeakMemory(CPU)
        with tempfile.TemporaryDirectory() as parent:
            for clients in FEDERATIONS:
                workload = replace(
                    tiny,
                    clients=clients,
                    participation=COHORT / clients,
                    train_samples=14 * clients,
                    test_samples=4 * clients,
                )
                folder = Path(parent) / str(clients)
                folder.mkdir()
                hooks = callbacks(folder) if with_callbacks else []
                memory.reset()
                federation = workload.federation(
                    method,
                    workload.noise(),
                    folder,
                    hooks,
                    judge,
                )
                if with_callbacks:
                    federation.prepare()
                side = f"a round of {name}, {COHORT} of {clients:,} clients"
                sides[side] = Rounds(federation, tiny.rounds_at_once)
                sides[side]()
                mib[side] = f"{memory.extra_mib():.0f} MiB more"
            seconds = interleaved(sides, pairs)
        other = next(iter(sides))
        rows += [
            compared("idle", side, other, seconds, tiny.rounds_at_once, "<= 1.2", mib[side])
            for side in sides
        ]
    return rows


def cnns(clients: int, images: int) -> Workload:
    """Return so many clients with so many images each, the CNN of the KAPC papers."""
    base = workloads()["mnist-cnn-b64"]
    return replace(
        base,
        data=replace(
            base.data,
            partition="iid",
            fraction=images * clients / 60_000,
        ),
        clients=clients,
        train_samples=images * clients,
        test_samples=images * clients // 6,
    )


def on_ranks(workload: Workload, ranks: int) -> np.ndarray:
    """Return clock and CPU seconds of a round of a run, medians of the busiest rank."""
    with tempfile.TemporaryDirectory() as folder:
        config = workload.config()
        config.federation.rounds = ROUNDS
        config.fabric.devices = ranks
        config.callbacks = {"stamps": Component("measure.Stamps", {"path": f"{folder}/stamps"})}
        alone(fit, config, Path(folder))
        return busiest([stamps(Path(f"{folder}/stamps.{rank}"))[2:, :2] for rank in range(ranks)])


def busiest(times: list[np.ndarray]) -> np.ndarray:
    """Return the median over rounds of what the rank took that took most."""
    seconds = np.diff(times, axis=1)
    return np.median(np.max(seconds, axis=0), axis=0)


def hand_loops(workload: Workload, processes: int) -> np.ndarray:
    """Return the same of so many hand loops at the same time, each with its part of the clients."""
    clients = workload.clients // processes
    part = cnns(clients, workload.train_samples // workload.clients)
    spawn = multiprocessing.get_context("spawn")
    with spawn.Manager() as manager, ProcessPoolExecutor(processes, spawn) as pool:
        ready = manager.Barrier(processes)
        jobs = [pool.submit(hand_loop, part, ready) for _ in range(processes)]
        return busiest([job.result() for job in jobs])


def hand_loop(workload: Workload, ready: Barrier) -> np.ndarray:
    torch.set_num_threads(1)
    keep_freed()  # as in a run
    loop = workload.bare(workload.load()[0])
    times = []
    for t in range(1, ROUNDS + 1):
        if t == 3:
            ready.wait()
        if t >= 3:
            times.append((time.time(), time.process_time()))
        loop.round(t)
    times.append((time.time(), time.process_time()))
    return np.array(times)


def ranks(pairs: int) -> list[Row]:
    """Strong and weak scaling, and ranks against hand loops at the same time."""
    few = cnns(10, 120)
    many = cnns(20, 120)
    large = cnns(10, 600)
    sides = {
        "10 CNNs on 1 rank": partial(on_ranks, few, 1),
        "10 CNNs on 2 ranks": partial(on_ranks, few, 2),
        "20 CNNs on 2 ranks": partial(on_ranks, many, 2),
        "10 CNNs in 1 hand loop": partial(hand_loops, few, 1),
        "10 CNNs in 2 hand loops": partial(hand_loops, few, 2),
        "10 CNNs of 600 images on 2 ranks": partial(on_ranks, large, 2),
        "10 CNNs of 600 images in 2 hand loops": partial(hand_loops, large, 2),
    }
    comparisons = [
        ("10 CNNs on 2 ranks", "10 CNNs on 1 rank", "0.5 is ideal"),
        ("20 CNNs on 2 ranks", "10 CNNs on 1 rank", "1 is ideal"),
        ("10 CNNs on 1 rank", "10 CNNs in 1 hand loop", "<= 1.05"),
        ("10 CNNs on 2 ranks", "10 CNNs in 2 hand loops", "<= 1.11"),
        ("10 CNNs of 600 images on 2 ranks", "10 CNNs of 600 images in 2 hand loops", "<= 1.11"),
    ]
    repeats = max(1, min(pairs, 3))
    times: dict[str, list[np.ndarray]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            times[name].append(side())
    rows = []
    for column, unit in enumerate(("clock", "CPU of the busiest rank")):
        seconds = {side: [float(t[column]) for t in taken] for side, taken in times.items()}
        note = f"{unit}; load {os.getloadavg()[0]:.1f}"
        for side, other, goal in comparisons:
            rows.append(
                compared(
                    "ranks",
                    side,
                    other,
                    seconds,
                    1,
                    goal,
                    note,
                )
            )
    return rows


if __name__ == "__main__":
    main({"idle": idle, "ranks": ranks})
