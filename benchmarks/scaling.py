"""How a round grows with ranks and with idle clients, and all that `speed.py` measures, in one
table.

`uv run python benchmarks/scaling.py --out runs/scaling.json`; `--only NAME ...` measures a part.
Rows over ranks are in seconds of the clock and want a quiet machine (its load is in the notes),
beside CPU seconds of the busiest rank, which other programs disturb less; all other rows are in CPU
seconds.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Barrier

import numpy as np
import torch
from bare import STEPPERS
from measure import PeakMemory, Row, command, compared, interleaved
from speed import benchmarks, callbacks, main
from workloads import Rounds, Workload, callback_round, data_root, workloads

from fl_lightning.foundation.heap import keep_freed
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedper import FedPer

FEDERATIONS = (10, 100, 1_000, 10_000)
TAKE_PART = 10
ROUNDS = 12  # of a run over ranks; the first two do not count
SPAWN = multiprocessing.get_context("spawn")
Seconds = tuple[list[float], list[float]]
"""Of each round but the first two: by the clock, and of the CPU."""


def crowd(clients: int) -> Workload:
    """`TAKE_PART` of so many clients with 14 samples of noise each: the tiny MLPs of speed.py."""
    mlp = workloads(data_root())["100-mlps-10-a-round"]
    return replace(
        mlp,
        name=f"{clients}-mlps",
        clients=clients,
        participation=TAKE_PART / clients,
        train_samples=14 * clients,
        test_samples=4 * clients,
        shape=(1, 8, 8),
        rounds_at_once=20,
    )


def idle(pairs: int) -> list[Row]:
    """A round with ten clients, whatever the number of those that are idle."""
    rows = []
    crowd(10).federation(FedAvg(), crowd(10).noise()).round(1)  # libraries are loaded now
    for what, method, kept in (
        ("FedAvg", FedAvg(), False),
        ("FedPer", FedPer(), False),
        ("FedPer", FedPer(), True),
    ):
        judge = "before" if isinstance(method, FedAvg) else "after"
        memory, taken, sides = PeakMemory(), dict[int, float](), dict[int, Rounds]()
        with tempfile.TemporaryDirectory() as folder:
            for clients in FEDERATIONS:
                workload, own = crowd(clients), Path(folder) / str(clients)
                own.mkdir()
                memory.reset()
                fed = workload.federation(
                    method, workload.noise(), own, callbacks(own) if kept else [], judge
                )
                if kept:
                    fed.prepare()
                sides[clients] = Rounds(callback_round(fed), workload.rounds_at_once)
                sides[clients]()
                taken[clients] = memory.extra_mib()
            seconds = interleaved(sides, pairs)
        name = f"{what}, run folder, checkpoint, pictures and progress" if kept else what
        for clients in FEDERATIONS:
            goal, at_once = "<= 1.2" if clients == 10_000 else "", sides[clients].at_once
            note = (
                f"{at_once / median(seconds[clients]):.0f} rounds a second; {taken[clients]:.0f} "
                f"MiB more"
            )
            what_ = f"a round of {name}, {TAKE_PART} of {clients:,} clients"
            rows.append(
                compared(
                    "idle",
                    what_,
                    seconds[clients],
                    "100 clients",
                    seconds[100],
                    at_once,
                    goal,
                    note,
                )
            )
    return rows


# ---------------------------------------------------------------- over ranks


def cnn(clients: int, images: int = 120) -> Workload:
    """So many clients with so many images each, the CNN of the KAPC papers, batches of 64."""
    known = workloads(data_root())["mnist-cnn-b64"]
    data = replace(known.data, partition="iid", fraction=images * clients / 60_000)
    return replace(
        known,
        name=f"{clients}-cnns",
        data=data,
        clients=clients,
        train_samples=images * clients,
        test_samples=images * clients // 6,
    )


def on_ranks(workload: Workload, ranks: int, method: str = "fedavg") -> Seconds:
    """Of `fl-train fit`, of the busiest rank."""
    with tempfile.TemporaryDirectory() as folder:
        stamps = {"stamps": {"class_path": "stamps.Stamps", "path": f"{folder}/stamps"}}
        without = [
            w
            for name in ("checkpoint", "heatmaps", "progress")
            for w in (f"--callbacks.{name}", "null")
        ]
        data, federation = workload.data, workload.config().federation
        line = [
            sys.executable,
            "-m",
            "fl_lightning",
            "fit",
            "--out",
            folder,
            "--method",
            method,
            "--loggers",
            "null",
            "--callbacks",
            json.dumps(stamps),
            *without,
            "--model",
            workload.model.class_path,
            "--data.source",
            data.source,
            "--data.root",
            str(data.root),
            "--data.partition",
            data.partition,
            "--data.fraction",
            str(data.fraction),
            "--federation.clients",
            str(federation.clients),
            "--federation.rounds",
            str(ROUNDS),
            "--federation.local_epochs",
            str(federation.local_epochs),
            "--federation.batch_size",
            str(federation.batch_size),
            "--evaluation.judge",
            "before",
            "--evaluation.models",
            "[before]",
            "--fabric.accelerator",
            "cpu",
            "--fabric.devices",
            str(ranks),
            "--fabric.threads",
            "1",
        ]
        command(*line)
        stamps = [json.loads(Path(f"{folder}/stamps.{rank}").read_text()) for rank in range(ranks)]
    return busiest([[(y[0] - x[0], y[1] - x[1]) for x, y in pairwise(f[1:])] for f in stamps])


def busiest(spans: Sequence[Sequence[tuple[float, float]]]) -> Seconds:
    """Of each round what the rank took that took most; `spans`: by rank and round."""
    clock, cpu = np.array(spans).max(axis=0).T.tolist()
    return clock, cpu


def bare_loops(workload: Workload, processes: int) -> Seconds:
    """The same of independent bare loops with an equal part of the clients each, run at the same
    time."""
    part = cnn(workload.clients // processes, workload.train_samples // workload.clients)
    with SPAWN.Manager() as manager, ProcessPoolExecutor(processes, SPAWN) as pool:
        ready = manager.Barrier(processes)
        return busiest(
            [
                one.result()
                for one in [pool.submit(bare_alone, part, ready) for _ in range(processes)]
            ]
        )


def bare_alone(workload: Workload, ready: Barrier) -> list[tuple[float, float]]:
    """One of them: starts when all are ready."""
    torch.set_num_threads(1)
    keep_freed()  # as the engine does: the loop would otherwise lose by it, or not, as it happens
    loop, spans = workload.bare(workload.load()[0], STEPPERS[1]), []
    for t in range(1, ROUNDS + 1):
        if t == 3:
            ready.wait()
        clock, cpu = time.time(), time.process_time()
        loop.round(t)
        spans.append((time.time() - clock, time.process_time() - cpu))
    return spans[2:]


def ranks(pairs: int) -> list[Row]:
    """Strong and weak scaling, and two ranks against two bare loops at the same time."""
    few, many, large = cnn(10), cnn(20), cnn(10, 600)
    sides = {
        "1 rank": partial(on_ranks, few, 1),
        "2 ranks": partial(on_ranks, few, 2),
        "2 ranks, twice the clients": partial(on_ranks, many, 2),
        "2 bare loops": partial(bare_loops, few, 2),
        "1 bare loop": partial(bare_loops, few, 1),
        "1 of 600": partial(on_ranks, large, 1),
        "1 bare of 600": partial(bare_loops, large, 1),
        "2 of 600": partial(on_ranks, large, 2),
        "2 bare of 600": partial(bare_loops, large, 2),
        "KAPC, 1 rank": partial(on_ranks, few, 1, "kapc"),
        "KAPC, 2 ranks": partial(on_ranks, few, 2, "kapc"),
    }
    seconds: dict[str, list[list[float]]] = {name: [] for name in sides}
    loads = []
    for _ in range(max(1, min(pairs, 3))):
        loads.append(os.getloadavg()[0])
        for name, measured in sides.items():
            seconds[name].append([median(spans) for spans in measured()])
    load = f"load {min(loads):.1f} to {max(loads):.1f}"

    def against(what: str, ours: str, theirs: str, goal: str = "") -> list[Row]:
        """Both ways: by the clock, and in CPU seconds of the busiest rank."""
        rows = []
        for k, unit in enumerate(("clock", "CPU of the busiest rank")):
            a, b = ([both[k] for both in seconds[side]] for side in (ours, theirs))
            rows.append(compared("ranks", f"{what}, {unit}", a, theirs, b, 1, goal, load))
        return rows

    return [
        *against("strong: 10 CNNs on 2 ranks", "2 ranks", "1 rank", "0.5 is ideal"),
        *against("weak: 20 CNNs on 2 ranks", "2 ranks, twice the clients", "1 rank", "1 is ideal"),
        *against(
            "strong: KAPC, 10 CNNs on 2 ranks", "KAPC, 2 ranks", "KAPC, 1 rank", "0.5 is ideal"
        ),
        *against("10 CNNs on 1 rank", "1 rank", "1 bare loop", "<= 1.05"),
        *against("10 CNNs on 2 ranks", "2 ranks", "2 bare loops", "<= 1.11 (throughput >= 0.9)"),
        *against("10 CNNs of 600 images on 1 rank", "1 of 600", "1 bare of 600", "<= 1.05"),
        *against(
            "10 CNNs of 600 images on 2 ranks",
            "2 of 600",
            "2 bare of 600",
            "<= 1.11 (throughput >= 0.9)",
        ),
    ]


if __name__ == "__main__":
    main({"idle": idle, "ranks": ranks} | benchmarks())
