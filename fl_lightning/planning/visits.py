"""A few real visits: rounds of the run's own federation on this machine, of few clients and few steps."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fl_lightning import device
from fl_lightning.config import Config
from fl_lightning.engine.federation import Federation
from fl_lightning.errors import BadInput, RunFailed
from fl_lightning.heap import keep_freed
from fl_lightning.log import in_bytes
from fl_lightning.planning.memory import Setup
from fl_lightning.planning.plan import Plan
from fl_lightning.planning.seconds import Link, Observed, Speeds, mixing_of, seconds, work_of
from fl_lightning.planning.setting import cohorts, made_up, met
from fl_lightning.planning.trace import one_process
from fl_lightning.run import assemble, instantiate

BUDGET = 8.0
"""Seconds for visits, over all architectures, start-up and their last round aside: a plan is to take half a minute."""
FEW = 2
"""Clients of the first rounds: two tell apart what a round and what a client costs."""
MADE_UP = 8
"""Clients of a federation whose data are made up."""
REPEATS = 5
"""Rounds of a kind at most, of which the median counts: more where they are short (at least 0.3 s in all)."""
ROUNDS = 10**9
_WATCHING = ("checkpoint.Checkpoint", "progress.Progress", "heatmaps.Heatmaps")
"""Callbacks that are left out: what they do stands beside a round's seconds."""

EXCHANGE = """
import sys, time
import torch, torch.distributed as dist
rank, file = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=2)
def timed(numbers, times):
    send, received = torch.zeros(2 * numbers), torch.zeros(2 * numbers)
    dist.all_to_all_single(received, send)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(times):
        dist.all_to_all_single(received, send)
    return (time.perf_counter() - start) / times
small, large = timed(16, 200), timed(1 << 19, 20)
if rank == 0:
    print(small, (4 << 19) / max(large - small, 1e-9))
dist.destroy_process_group()
"""
"""An exchange of two processes: seconds of a small one, and bytes a second that a rank sends in a large one."""


def rehearse(setup: Setup, threads: int | None) -> list[Observed]:
    """Run a few rounds of the real federation in this process.

    Raises:
        BadInput: the run cannot begin.
        RunFailed: a client fails.
    """
    callbacks = {k: c for k, c in setup.config.callbacks.items() if not c.class_path.endswith(_WATCHING)}
    data = setup.sizes.data
    config = replace(setup.config, loggers={}, callbacks=callbacks)
    config = replace(config, fabric=replace(config.fabric, devices=1, num_nodes=1))
    config = replace(config, evaluation=replace(config.evaluation, every=1))
    config = replace(config, federation=replace(config.federation, rounds=ROUNDS, on_bad_client="stop"))
    if data is None:
        models = [replace(m, count=None if m.count is None else min(m.count, MADE_UP)) for m in config.models]
        clients = sum(m.count or 0 for m in models) or min(MADE_UP, config.clients)
        federation, everyone = replace(config.federation, clients=clients), replace(config.data, held_out_clients=0.0)
        config = replace(config, models=models, federation=federation, data=everyone)
        data = made_up(replace(setup.sizes, train=setup.sizes.train[:clients], test=setup.sizes.test[:clients]))
    keep_freed()  # as a run does
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        fabric = one_process(config.fabric.precision, setup.hardware.accelerator)
        fabric.launch()
        with tempfile.TemporaryDirectory() as folder:
            made = [instantiate(f"callbacks.{name}", c) for name, c in callbacks.items()]
            fed = assemble(fabric, config, Path(folder), made, data)
            fed.prepare()
            rehearsal = _Rehearsal(setup, fed)
            kinds = len(fed.run.groups)
            return [o for kind in range(kinds) for o in rehearsal.run(kind, BUDGET / kinds)]
    finally:
        torch.set_num_threads(before)


class _Rehearsal:
    """Rounds of chosen clients, cut after some batches of each epoch."""

    def __init__(self, setup: Setup, fed: Federation) -> None:
        self.setup, self.fed, run = setup, fed, fed.run
        # Then what other programs take of the machine can be told from what the rounds do: they never wait.
        self._one_thread = run.device.type == "cpu" and torch.get_num_threads() == 1
        known = round(met(setup.config) / setup.config.clients * run.clients)
        run.server.uploaded.update(range(known))  # in the end so many are mixed

    def run(self, kind: int, budget: float) -> list[Observed]:
        """Rounds of clients of one architecture: two of them, then as many as there is time for, then more steps."""
        run, end = self.fed.run, time.perf_counter() + budget
        at_once = self.fed.worker.trainers[kind].executor.at_once
        everyone, drawn = run.groups[kind].members, set(cohorts(self.setup.config)[0].tolist())
        members = [c for c in everyone if c in drawn and not run.data.made_up] or everyone
        members = sorted(members, key=lambda c: (run.data.train_sizes[c], c))
        few = min(max(FEW, at_once), len(members))
        self._round(kind, _spread(members, few), 1)  # whatever is made once
        found = [self._round(kind, _spread(members, few), 1)]
        copies = self.setup.policy.client_vectors + 1 + self.setup.states
        room = self.setup.hardware.capacity / 4 / (copies * self.setup.profiles[kind].vector)
        took = found[0].client + found[0].evaluation + found[0].server
        more = int(min(len(members), room, few * budget / 8 / took)) // few * few or few
        more = len(members) if more + few > len(members) and more > few else more
        if few < more < len(members):  # three sizes of a cohort tell what the server does in proportion to its square
            found.append(self._round(kind, _spread(members, (few + more) // 2), 1))
        limit, whole = 1, math.ceil(max(run.data.train_sizes) / run.config.federation.batch_size)
        while True:
            found.append(self._round(kind, _spread(members, more), limit))
            took = found[-1].client + found[-1].evaluation + found[-1].server
            if limit >= whole or time.perf_counter() + 2.2 * took > end:
                return found
            limit *= 2

    def _round(self, kind: int, chosen: list[int], limit: int) -> Observed:
        fed, run = self.fed, self.fed.run
        times: list[np.ndarray] = []
        run.most_batches = limit
        start = time.perf_counter()
        while len(times) < REPEATS and (not times or time.perf_counter() - start < 0.3):
            wall, busy = time.perf_counter(), time.process_time()
            record = fed.round(run.server.round + 1, chosen)
            alone = (time.process_time() - busy) / (time.perf_counter() - wall)
            fed.tell("on_round_end", record)
            client, evaluation = (record.metrics[f"seconds_{name}"] for name in ("client", "evaluation"))
            parts = np.array([client, evaluation, record.metrics["seconds"] - client - evaluation])
            times.append(parts * (min(1.0, alone) if self._one_thread else 1.0))
        client, evaluation, server = np.median(times, axis=0).tolist()
        train, test = ([part[c] for c in chosen] for part in (run.data.train_sizes, run.data.test_sizes))
        members = set(run.groups[kind].members)
        sources = self.setup.mixed(len(chosen), len(members & run.server.uploaded), len(members))
        mixed = mixing_of(self.setup, sources, len(chosen))
        work = work_of(run.config, train, test, limit, fed.worker.trainers[kind].executor.at_once).sum(0)
        return Observed(kind, work, mixed, client, evaluation, server)


def _spread(members: list[int], count: int) -> list[int]:
    """So many of `members`, from the first to the last, ascending."""
    return sorted({members[round(k)] for k in np.linspace(0, len(members) - 1, count)})


def measure_link() -> Link:
    """Between two processes of this machine, by gloo; assumed where they cannot meet."""
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, "-c", EXCHANGE]
        ranks = [
            subprocess.Popen([*line, str(rank), f"{folder}/meet"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            for rank in range(2)
        ]
        try:
            said = [rank.communicate(timeout=60)[0] for rank in ranks]
        except subprocess.TimeoutExpired:
            return Link()
        finally:
            for rank in ranks:
                rank.kill()
    if any(rank.returncode for rank in ranks):
        return Link()
    latency, bandwidth = map(float, said[0].split())
    return Link(latency, bandwidth, True)


def threads_of(config: Config, devices: int) -> int | None:
    """Threads of a rank, as a run has them; None: torch's own number."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return config.fabric.threads or (max(1, cores // devices) if devices > 1 else None)


@dataclass(frozen=True)
class Timing:
    """Seconds of a round, or why they are not known."""

    seconds: dict[str, float]
    """On the busiest rank, by what is done; empty where they are not known."""
    basis: str
    """What they rest on, in words."""

    @property
    def round_seconds(self) -> float | None:
        """A whole round."""
        return sum(self.seconds.values()) if self.seconds else None


def timed(setup: Setup, plan: Plan, run: bool = True) -> Timing:
    """Run visits here and extrapolate, where this machine can: it has the accelerator, and memory for one client."""
    here, hardware = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), setup.hardware
    if not run:
        return Timing({}, "unknown: nothing was run (--no-run)")
    if hardware.accelerator not in ("cpu", device.here()):
        return Timing({}, "unknown: this machine has no such accelerator to run visits on")
    alone = max(p.bytes for p in plan.memory if not p.at_once)
    if setup.sizes.data is not None:
        alone += sum(p.bytes for p in plan.memory if p.name in ("samples as read", "server"))
    if alone > here / 2:
        return Timing({}, f"unknown: what a first visit holds ({in_bytes(alone)}) is too large to try on this machine")
    try:
        observed = rehearse(setup, threads_of(setup.config, hardware.devices))
    except (BadInput, RunFailed) as error:
        return Timing({}, f"unknown: the visits failed: {error}")
    judge = setup.config.evaluation.judge
    scored = [setup.method.judge if judge == "auto" else judge, *(setup.config.evaluation.models or [])]
    on_cpus = hardware.ranks > 1 and hardware.nodes == 1 and hardware.accelerator == "cpu"
    link = measure_link() if on_cpus else Link()
    found = seconds(setup, Speeds.fit(observed, "finetuned" in scored), link, sum(plan.wire.values()), plan.exchanges)
    basis = f"from {len(observed)} sorts of short rounds run on this machine"
    if setup.sizes.data is None:
        basis += ", on made-up data"
    if hardware.ranks > 1:
        how = "measured between two processes" if link.measured else "assumed"
        speed = f"{link.latency:.2g} s and {link.bandwidth / 2**20:,.0f} MiB/s"
        basis += f", in one process; between ranks {speed} for an exchange ({how})"
    return Timing(found, basis)
