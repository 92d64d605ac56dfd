"""How a round grows with ranks and with idle clients, and all that `speed.py` measures, in one table.

`uv run python benchmarks/scaling.py --out runs/scaling.json`; `--only NAME ...` measures a part. Rows over ranks are in
seconds of the clock and want a quiet machine (its load is in the notes), beside CPU seconds of the busiest rank,
which other programs disturb less; all other rows are in CPU seconds.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from bare import BareFedAvg
from measure import PeakMemory, Row, compared, interleaved
from speed import HERE, Rounds, callbacks, main, plain_round
from workloads import Workload, data_root, workloads

from fl_lightning.heap import keep_freed
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedper import FedPer

FEDERATIONS = (10, 100, 1_000, 10_000)
TAKE_PART = 10
ROUNDS = 12  # of a run over ranks; the first two do not count
RANKS = (1, 2)


def crowd(clients: int) -> Workload:
    """`TAKE_PART` of so many clients with 14 samples of noise each: the tiny MLPs of speed.py."""
    mlp = workloads(data_root())["100-mlps-10-a-round"]
    return replace(
        mlp, name=f"{clients}-mlps", clients=clients, participation=TAKE_PART / clients, train_samples=14 * clients,
        test_samples=4 * clients, shape=(1, 8, 8), rounds_at_once=20,
    )  # fmt: skip


def idle(pairs: int) -> list[Row]:
    """A round with ten clients, whatever the number of those that are idle."""
    rows = []
    crowd(10).federation(FedAvg(), crowd(10).noise(), Path()).round(1)  # libraries are loaded now
    for what, method, kept in (("FedAvg", FedAvg(), False), ("FedPer", FedPer(), False), ("FedPer", FedPer(), True)):
        judge = "before" if isinstance(method, FedAvg) else "after"
        memory, taken = PeakMemory(), {}
        with tempfile.TemporaryDirectory() as folder:
            sides: dict[str, Callable[[], object]] = {}
            for clients in FEDERATIONS:
                workload, own = crowd(clients), Path(folder) / str(clients)
                own.mkdir()
                memory.reset()
                fed = workload.federation(method, workload.noise(), own, callbacks(own) if kept else [], judge)
                if kept:
                    fed.prepare()
                sides[str(clients)] = Rounds(partial(plain_round, fed), workload.rounds_at_once)
                sides[str(clients)]()
                taken[clients] = memory.extra_mib()
            seconds = interleaved(sides, pairs)
        name = f"{what}, run folder, checkpoint, pictures and progress" if kept else what
        for clients in FEDERATIONS:
            goal = "<= 1.2" if clients == 10_000 else ""
            at_once = crowd(clients).rounds_at_once
            note = f"{at_once / median(seconds[str(clients)]):.0f} rounds a second; {taken[clients]:.0f} MiB more"
            what_ = f"a round of {name}, {TAKE_PART} of {clients:,} clients"
            theirs = seconds["100"]
            rows.append(compared("idle", what_, seconds[str(clients)], "100 clients", theirs, at_once, goal, note))
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


def on_ranks(workload: Workload, ranks: int, method: str = "fedavg") -> tuple[list[float], list[float]]:
    """Seconds of each round after the first two, by the clock, and CPU seconds of the busiest rank."""
    with tempfile.TemporaryDirectory() as folder:
        stamps = {"stamps": {"class_path": "stamps.Stamps", "path": f"{folder}/stamps"}}
        without = [w for name in ("checkpoint", "heatmaps", "progress") for w in (f"--callbacks.{name}", "null")]
        data, federation = workload.data, workload.config().federation
        line = [
            sys.executable, "-m", "fl_lightning", "fit", "--out", folder, "--method", method, "--loggers", "null",
            "--callbacks", json.dumps(stamps), *without, "--model", workload.model.class_path,
            "--data.source", data.source, "--data.root", str(data.root), "--data.partition", data.partition,
            "--data.fraction", str(data.fraction), "--federation.clients", str(federation.clients),
            "--federation.rounds", str(ROUNDS), "--federation.local_epochs", str(federation.local_epochs),
            "--federation.batch_size", str(federation.batch_size), "--evaluation.judge", "before",
            "--evaluation.models", "[before]", "--fabric.accelerator", "cpu", "--fabric.devices", str(ranks),
            "--fabric.threads", "1",
        ]  # fmt: skip
        _run(line)
        stamps = [json.loads(Path(f"{folder}/stamps.{rank}").read_text()) for rank in range(ranks)]
    spans = [[(y[0] - x[0], y[1] - x[1]) for x, y in pairwise(f[1:])] for f in stamps]
    return [max(s[0] for s in each) for each in zip(*spans, strict=True)], [
        max(s[1] for s in each) for each in zip(*spans, strict=True)
    ]


def bare_pair(workload: Workload, processes: int) -> tuple[list[float], list[float]]:
    """The same of independent bare loops with an equal part of the clients each, run at the same time."""
    number = workload.clients // processes
    images = workload.train_samples // workload.clients
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, str(HERE / "scaling.py"), "--bare", str(number), str(images), folder, str(processes)]
        started = [subprocess.Popen([*line, str(k)], env=_environment()) for k in range(processes)]
        if any(p.wait() for p in started):
            raise SystemExit("a bare loop failed")
        by_rank = [json.loads(Path(f"{folder}/{k}.json").read_text()) for k in range(processes)]
    rounds = range(len(by_rank[0]))
    return [max(f[k][0] for f in by_rank) for k in rounds], [max(f[k][1] for f in by_rank) for k in rounds]


def bare_alone(clients: int, images: int, folder: str, processes: int, number: int) -> None:
    """One of them: starts when all are ready."""
    torch.set_num_threads(1)
    keep_freed()  # as the engine does: the loop would otherwise lose by it, or not, as it happens
    workload = cnn(clients, images)
    data, _ = workload.load()
    loop = BareFedAvg(workload.config(), data, workload.initial(data), "autograd.grad + foreach")
    loop.round(1)
    loop.round(2)
    Path(f"{folder}/{number}.ready").touch()
    while len(list(Path(folder).glob("*.ready"))) < processes:
        time.sleep(0.01)
    spans = []
    for t in range(3, ROUNDS + 1):
        clock, cpu = time.time(), time.process_time()
        loop.round(t)
        spans.append((time.time() - clock, time.process_time() - cpu))
    Path(f"{folder}/{number}.json").write_text(json.dumps(spans))


def ranks(pairs: int) -> list[Row]:
    """Strong and weak scaling, and two ranks against two bare loops at the same time."""
    times = max(1, min(pairs, 3))
    clock: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}

    def add(name: str, seconds: tuple[list[float], list[float]]) -> None:
        clock.setdefault(name, []).append(median(seconds[0]))
        cpu.setdefault(name, []).append(median(seconds[1]))

    loads = []
    for _ in range(times):
        loads.append(os.getloadavg()[0])
        add("1 rank", on_ranks(cnn(10), 1))
        add("2 ranks", on_ranks(cnn(10), 2))
        add("2 ranks, twice the clients", on_ranks(cnn(20), 2))
        add("2 bare loops", bare_pair(cnn(10), 2))
        add("1 bare loop", bare_pair(cnn(10), 1))
        for ranks_ in RANKS:
            add(f"{ranks_} of 600", on_ranks(cnn(10, 600), ranks_))
            add(f"{ranks_} bare of 600", bare_pair(cnn(10, 600), ranks_))
        add("KAPC, 1 rank", on_ranks(cnn(10), 1, "kapc"))
        add("KAPC, 2 ranks", on_ranks(cnn(10), 2, "kapc"))
    load = f"load {min(loads):.1f} to {max(loads):.1f}"

    def against(what: str, ours: str, theirs: str, goal: str = "", scale: float = 1.0) -> list[Row]:
        """Both ways: by the clock, and in CPU seconds of the busiest rank."""
        rows = []
        for unit, side in (("clock", clock), ("CPU of the busiest rank", cpu)):
            reference = [t * scale for t in side[theirs]]
            row = compared("ranks", f"{what}, {unit}", side[ours], theirs, reference, 1, goal, load)
            rows.append(row)
        return rows

    return [
        *against("strong: 10 CNNs on 2 ranks", "2 ranks", "1 rank", "0.5 is ideal"),
        *against("weak: 20 CNNs on 2 ranks", "2 ranks, twice the clients", "1 rank", "1 is ideal"),
        *against("strong: KAPC, 10 CNNs on 2 ranks", "KAPC, 2 ranks", "KAPC, 1 rank", "0.5 is ideal"),
        *against("10 CNNs on 1 rank", "1 rank", "1 bare loop", "<= 1.05"),
        *against("10 CNNs on 2 ranks", "2 ranks", "2 bare loops", "<= 1.11 (throughput >= 0.9)"),
        *against("10 CNNs of 600 images on 1 rank", "1 of 600", "1 bare of 600", "<= 1.05"),
        *against("10 CNNs of 600 images on 2 ranks", "2 of 600", "2 bare of 600", "<= 1.11 (throughput >= 0.9)"),
    ]


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, env=_environment(), check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return done


def benchmarks(pairs: int) -> dict[str, Callable[[], list[Row]]]:
    """What speed.py does not measure."""
    return {"idle": partial(idle, pairs), "ranks": partial(ranks, pairs)}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--bare"]:
        bare_alone(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]), int(sys.argv[6]))
    else:
        main(more=benchmarks)
