"""Seconds of a round: one that is run, of the real federation, in one process of this machine."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch

from fl_lightning import device
from fl_lightning.engine.federation import Federation
from fl_lightning.errors import BadClient, BadInput, RunFailed
from fl_lightning.heap import keep_freed
from fl_lightning.log import in_bytes
from fl_lightning.planning.memory import Setup
from fl_lightning.planning.plan import Plan
from fl_lightning.planning.setting import cohorts, made_up, met
from fl_lightning.planning.trace import one_process
from fl_lightning.run import assemble, instantiate
from fl_lightning.training.schedule import Length

BUDGET = 8.0
"""Seconds for rehearsed rounds, start-up aside: a plan is to take half a minute."""
FEW, MADE_UP = 2, 8
"""Clients of each architecture in the first rounds; clients of a federation whose data are made up."""
REPEATS = 5
"""Rounds of a kind at most, of which the median counts: more where they are short (at least 0.3 s in all)."""
_WATCHING = ("checkpoint.Checkpoint", "progress.Progress", "heatmaps.Heatmaps")
"""Callbacks that are left out: what they do comes on top of a round's seconds."""


@dataclass(frozen=True)
class Timing:
    """Seconds of a round in one process of this machine, or why they are not known."""

    seconds: dict[str, float]
    """By what is done: `clients`, `evaluation`, `server`; empty where they are not known."""
    basis: str
    """What was run for them, in words."""

    @property
    def round_seconds(self) -> float | None:
        """A whole round."""
        return sum(self.seconds.values()) if self.seconds else None


def timed(setup: Setup, plan: Plan, run: bool = True) -> Timing:
    """Rehearse a round, where this machine can: it has the accelerator, and memory for one client."""
    here, hardware = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), setup.hardware
    if not run:
        return Timing({}, "unknown: nothing was run (--no-run)")
    if hardware.accelerator not in ("cpu", device.here()):
        return Timing({}, "unknown: this machine has no such accelerator to rehearse a round on")
    alone = max(p.bytes for p in plan.memory if not p.at_once)
    if setup.sizes.data is not None:
        alone += sum(p.bytes for p in plan.memory if p.name in ("samples as read", "server"))
    if alone > here / 2:
        return Timing({}, f"unknown: what a first visit holds ({in_bytes(alone)}) is too large to try on this machine")
    try:
        return rehearse(setup)
    except (BadInput, RunFailed) as error:
        return Timing({}, f"unknown: the rehearsal failed: {error}")


def rehearse(setup: Setup) -> Timing:
    """Run rounds of the real federation here: of few clients and steps, then of as many as there is time for.

    Raises:
        BadInput: the run cannot begin.
        RunFailed: a client fails.
    """
    callbacks = {k: c for k, c in setup.config.callbacks.items() if not c.class_path.endswith(_WATCHING)}
    data = setup.sizes.data
    config = replace(setup.config, loggers={}, callbacks=callbacks)
    config = replace(config, fabric=replace(config.fabric, devices=1, num_nodes=1))
    config = replace(config, evaluation=replace(config.evaluation, every=1))
    rounds = max(1, config.federation.rounds)
    config = replace(config, federation=replace(config.federation, rounds=rounds, on_bad_client="stop"))
    if data is None:
        models = [replace(m, count=None if m.count is None else min(m.count, MADE_UP)) for m in config.models]
        clients = sum(m.count or 0 for m in models) or min(MADE_UP, config.clients)
        federation, everyone = replace(config.federation, clients=clients), replace(config.data, held_out_clients=0.0)
        config = replace(config, models=models, federation=federation, data=everyone)
        data = made_up(replace(setup.sizes, train=setup.sizes.train[:clients], test=setup.sizes.test[:clients]))
    keep_freed()  # as a run does
    before = torch.get_num_threads()
    torch.set_num_threads(config.fabric.threads or before)
    try:
        fabric = one_process(config.fabric.precision, setup.hardware.accelerator)
        fabric.launch()
        with tempfile.TemporaryDirectory() as folder:
            made = [instantiate(f"callbacks.{name}", c) for name, c in callbacks.items()]
            fed = assemble(fabric, config, Path(folder), made, data)
            fed.prepare()
            return _Rehearsal(setup, fed).run()
    finally:
        torch.set_num_threads(before)


class _Rehearsal:
    """Rounds of chosen clients, cut after some batches of each epoch."""

    def __init__(self, setup: Setup, fed: Federation) -> None:
        self.setup, self.fed, run = setup, fed, fed.run
        known = round(met(setup.config) / setup.config.clients * run.clients)
        run.server.uploaded.update(range(known))  # in the end so many are mixed
        drawn = set(range(run.clients)) if run.data.made_up else set(cohorts(setup.config)[0].tolist())
        sizes = run.data.train_sizes
        kinds = ([c for c in group.members if c in drawn] for group in run.groups)
        self._members = [sorted(members, key=lambda c: (sizes[c], c)) for members in kinds if members]

    def run(self) -> Timing:
        """First more steps, up to whole epochs; then more clients, as far as time and memory go."""
        run, end = self.fed.run, time.perf_counter() + BUDGET
        few = max(FEW, *(trainer.executor.at_once for trainer in self.fed.worker.trainers))
        chosen, cohort = self._chosen(few), self._chosen(run.clients)
        federation, most = run.config.federation, max(run.data.train_sizes[c] for c in cohort)
        limit, whole = 1, max(-(-most // federation.batch_size), federation.local_steps or 0)
        vectors = self.setup.policy.client_vectors + 1 + self.setup.states
        room = int(self.setup.hardware.capacity / 4 / (vectors * self.setup.widest.vector))
        self._round(chosen, limit)  # whatever is made once
        seconds = self._round(chosen, limit)
        measured, broken = (chosen, limit, seconds), ""
        while time.perf_counter() + 2.2 * sum(seconds) < end:
            if limit < whole:
                limit *= 2
            elif 2 * few <= room and len(chosen) < len(cohort):
                few *= 2
                chosen = self._chosen(few)
            else:
                break
            try:
                seconds = self._round(chosen, limit)
            except BadClient as failure:  # models that train for longer than the run's may diverge
                broken = f"; a longer rehearsal ended since {failure}"
                break
            measured = chosen, limit, seconds
        timing = self._scaled(*measured)
        return replace(timing, basis=timing.basis + broken)

    def _chosen(self, count: int) -> list[int]:
        """So many clients of each architecture, from that with the fewest samples to that with the most."""
        places = ((members, np.linspace(0, len(members) - 1, min(count, len(members)))) for members in self._members)
        return sorted({members[round(k)] for members, spread in places for k in spread})

    def _round(self, chosen: list[int], limit: int) -> list[float]:
        """Seconds of clients, evaluation and server."""
        fed, run = self.fed, self.fed.run
        times: list[list[float]] = []
        run.most_batches = limit
        start = time.perf_counter()
        while len(times) < REPEATS and (not times or time.perf_counter() - start < 0.3):
            next_round = run.server.round + 1  # no more than the run has: privacy is planned for these
            record = fed.round(next_round if next_round <= run.rounds else min(2, run.rounds), chosen)
            fed.tell("on_round_end", record)
            client, evaluation = (record.metrics[f"seconds_{name}"] for name in ("client", "evaluation"))
            times.append([client, evaluation, record.metrics["seconds"] - client - evaluation])
        return [median(part) for part in zip(*times, strict=True)]

    def _scaled(self, chosen: list[int], limit: int, seconds: list[float]) -> Timing:
        """From the clients and steps that were run to a mean cohort's, by samples; the server's as they are."""
        config, data, sizes = self.setup.config, self.fed.run.data, self.setup.sizes
        done = self._samples([data.train_sizes[c] for c in chosen], limit)
        all_of_it = self._samples([data.train_sizes[c] for c in chosen])
        drawn = cohorts(config)
        train, test = np.array(sizes.train), np.array(sizes.test)
        ratio = float(np.mean([self._samples(train[c].tolist()) for c in drawn])) / max(done, 1e-9)
        judged = float(np.mean([test[c].sum() for c in drawn])) / max(sum(data.test_sizes[c] for c in chosen), 1)
        client, evaluation, server = seconds
        evaluation *= judged / config.evaluation.every
        parts = {"clients": client * ratio, "evaluation": evaluation, "server": server}
        basis = f"from a round of {len(chosen)} of {len(drawn[0])} clients, run in one process of this machine"
        basis += ", on made-up data" if sizes.data is None else ""
        if done < all_of_it:
            basis += f", cut to {done / all_of_it:.0%} of their local training"
        if len(chosen) < len(drawn[0]) or done < all_of_it:
            basis += f"; scaled to the cohort by samples, but for the server's part, that of {len(chosen)} clients"
        if self.setup.hardware.ranks > 1:
            basis += f"; how long {self.setup.hardware.ranks} processes take was not measured"
        return Timing(parts, basis)

    def _samples(self, train: list[int], limit: int | None = None) -> float:
        """Samples of all local steps of clients with so many, epochs cut after `limit` batches."""
        federation = self.setup.config.federation
        length, size = Length.of(federation), federation.batch_size
        length = length if limit is None else length.at_most(limit)
        total = 0.0
        for samples in train:
            batches = -(-samples // size)
            cut = batches if limit is None else min(batches, limit)
            total += length.steps_of(cut) / max(cut, 1) * min(samples, cut * size)
        return total
