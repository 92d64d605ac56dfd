"""A rehearsed round of a run: the memory, bytes and seconds that it takes here, scaled to the
cohort and all rounds."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.configuration.config import Config, check
from fl_lightning.core.run import cohort_of
from fl_lightning.data import FederatedData, prepare
from fl_lightning.engine.federation import Federation
from fl_lightning.foundation import device
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.heap import keep_freed
from fl_lightning.foundation.parallel import one_process
from fl_lightning.lab.planning.made_up import in_shape_of
from fl_lightning.lab.planning.plan import Plan
from fl_lightning.lab.planning.start import check_start, data_here
from fl_lightning.results.record import RoundRecord
from fl_lightning.run import assemble, instantiate

BUDGET = 8.0
"""Seconds of a rehearsed round that local training is cut to, so that a plan takes some half a
minute (our choice)."""
MOST_CLIENTS = 16
"""Clients of the rehearsed round: twice as many as train at once on a CPU (our choice)."""
MADE_UP_CLIENTS = 16
"""Clients of a federation whose data are made up."""
_WATCHING = ("checkpoint.Checkpoint", "progress.Progress", "heatmaps.Heatmaps")
"""Callbacks that are left out: their seconds come on top of a round's."""


def rehearse(config: Config, samples: int = 500) -> Plan:
    """Run a short round of some clients of `config` here, then a measured one of as many steps as
    `BUDGET` allows.

    Args:
        config: the run; nothing of it is written.
        samples: training samples a client, where the data are not here.

    Raises:
        BadInput: the run cannot begin, or this machine has no such accelerator.
        RunFailed: a client fails.
    """
    accelerator = device.resolved(config.fabric.accelerator)
    is_here = accelerator in ("cpu", device.accelerator_kind())
    requirement = "this machine has none to rehearse a round on"
    check("fabric.accelerator", accelerator, is_here, requirement)
    data = data_here(config)
    check_start(config, data)
    rehearsal = _bare(config)
    if data is None:
        rehearsal = _few_clients(rehearsal)
        data = in_shape_of(config, rehearsal.clients, samples)
        if data is None:
            requirement = "a rehearsal needs the data, which are not here: put them there"
            raise BadInput("data.root", config.data.root, requirement)
    with _one_run_alone(rehearsal):
        _, first = _run(
            rehearsal,
            data,
            accelerator,
            most_batches=1,
            rounds=1,
        )
        seconds = first.metrics["seconds_client"]
        batches = max(data.train_sizes) // config.federation.batch_size + 1
        most_batches = min(batches, max(1, int(BUDGET / max(seconds, 1e-3))))
        fed, record = _run(
            rehearsal,
            data,
            accelerator,
            most_batches,
            rounds=2,
        )
    return _scaled(
        config,
        fed,
        record,
        most_batches,
        samples if data.made_up else 0,
    )


def _bare(config: Config) -> Config:
    """`config` in one process, without loggers and callbacks that watch; every round is scored, a
    failure ends it."""
    callbacks = {k: c for k, c in config.callbacks.items() if not c.class_path.endswith(_WATCHING)}
    return replace(
        config,
        loggers={},
        callbacks=callbacks,
        fabric=replace(config.fabric, devices=1, num_nodes=1),
        evaluation=replace(config.evaluation, every=1),
        federation=replace(config.federation, on_bad_client="stop"),
    )


def _few_clients(config: Config) -> Config:
    """`config` with at most `MADE_UP_CLIENTS` of each architecture, all of whom take part."""
    models = []
    for model in config.models:
        count = None if model.count is None else min(model.count, MADE_UP_CLIENTS)
        models.append(replace(model, count=count))
    clients = sum(model.count or 0 for model in models) or min(MADE_UP_CLIENTS, config.clients)
    return replace(
        config,
        models=models,
        federation=replace(config.federation, clients=clients),
        data=replace(config.data, held_out_clients=0.0),
    )


@contextmanager
def _one_run_alone(config: Config) -> Any:
    """Give the process the run's threads and its way to keep freed memory."""
    keep_freed()
    before = torch.get_num_threads()
    torch.set_num_threads(config.fabric.threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run(
    config: Config,
    data: FederatedData,
    accelerator: str,
    most_batches: int,
    rounds: int,
) -> tuple[Federation, RoundRecord]:
    """Run rounds of some clients, their epochs cut after `most_batches`; the federation and the
    last record."""
    fabric = one_process(config.fabric.precision, accelerator)
    fabric.launch()
    with tempfile.TemporaryDirectory() as folder:
        callbacks = [instantiate(f"callbacks.{k}", c) for k, c in config.callbacks.items()]
        fed = assemble(
            fabric,
            config,
            Path(folder),
            callbacks,
            data,
            most_batches,
        )
        fed.prepare()
        for t in range(1, min(rounds, config.federation.rounds) + 1):
            record = fed.round(t, _chosen(fed))
            fed.tell("on_round_end", record)
    return fed, record


def _chosen(fed: Federation) -> list[int]:
    """At most `MOST_CLIENTS` of the first cohort, two of each architecture at least: from few
    samples to most."""
    run = fed.run
    cohort = set(fed.cohort(1))
    chosen: list[int] = []
    for group in run.groups:
        members = [client for client in group.members if client in cohort]
        members.sort(key=lambda client: run.data.train_sizes[client])
        share = max(2, MOST_CLIENTS * len(members) // len(cohort))
        places = np.linspace(0, len(members) - 1, min(share, len(members))).round().astype(int)
        chosen += [members[place] for place in places]
    return sorted(chosen)


def _scaled(
    config: Config,
    fed: Federation,
    record: RoundRecord,
    most_batches: int,
    made_up: int,
) -> Plan:
    """The plan of the whole run: what the rehearsed clients took, scaled to the cohort of a mean
    round."""
    run, metrics = fed.run, record.metrics
    data, rehearsed = run.data, record.cohort
    mean_cohort = run.cohort_size * config.clients / run.clients
    by_clients = mean_cohort / len(rehearsed)
    batch = config.federation.batch_size
    samples = [data.train_sizes[client] for client in rehearsed]
    trained_samples = sum(min(number, most_batches * batch) for number in samples)
    trained = trained_samples / sum(samples)
    # training and test samples of a mean round, as a multiple of the rehearsed
    train_ratio = np.mean(data.train_sizes) * mean_cohort / sum(samples) / trained
    tests = sum(data.test_sizes[client] for client in rehearsed)
    test_ratio = np.mean(data.test_sizes) * mean_cohort / max(tests, 1) / config.evaluation.every
    client = metrics["seconds_client"]
    evaluation = metrics["seconds_evaluation"]
    met = _clients_met(config)
    device_mib = metrics.get("memory_device_mib")
    return Plan(
        method=run.method_name,
        models=[
            f"{group.name} ({group.layout.size / 1e6:.3g} million numbers)" for group in run.groups
        ],
        accelerator=run.device.type,
        precision=config.fabric.precision,
        clients=config.clients,
        cohort=round(mean_cohort),
        rounds=config.federation.rounds,
        rehearsed=len(rehearsed),
        trained=trained,
        made_up=made_up,
        memory=metrics["memory_mib"] * 2**20,
        memory_device=None if device_mib is None else device_mib * 2**20,
        stored=max(0, met - len(rehearsed)) * _bytes_of_a_client(fed, rehearsed),
        upload=metrics["upload_bytes"] * by_clients,
        download=metrics["download_bytes"] * by_clients,
        seconds={
            "clients": float(client * train_ratio),
            "evaluation": float(evaluation * test_ratio),
            "server": metrics["seconds"] - client - evaluation,
        },
        privacy=_privacy(config, fed),
    )


def _clients_met(config: Config) -> int:
    """Clients that have taken part by the last round (expected)."""
    share = len(cohort_of(config, 1)) / config.clients
    met = 1 - (1 - share) ** config.federation.rounds
    return math.ceil(met * config.clients - 1e-9)


def _bytes_of_a_client(fed: Federation, rehearsed: Sequence[int]) -> float:
    """Bytes that stay in memory of a client that took part, mean over the rehearsed: vectors,
    memory and samples."""
    run = fed.run
    stored = sum(
        _tensor_bytes(state.vectors, state.received, state.memory) for state in run.states.values()
    )
    if run.config.fabric.bank != "memory":
        stored = 0
    if run.config.data.resident != "never":
        numbers = math.prod(run.data.input_shape)
        samples = sum(run.data.train_sizes[c] + run.data.test_sizes[c] for c in rehearsed)
        stored += samples * numbers * run.groups[0].initial.element_size()
    return stored / len(rehearsed)


def _tensor_bytes(*named: Mapping[str, Tensor]) -> int:
    """Bytes of all tensors, those that share their memory counted once."""
    storages = [tensor.untyped_storage() for tensors in named for tensor in tensors.values()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _privacy(config: Config, fed: Federation) -> dict[str, Any]:
    """What callbacks that account for privacy report for all rounds; empty where there is none."""
    run = fed.run
    sends = any(group.down_mask.any() for group in run.groups)
    report: dict[str, Any] = {}
    for component in config.callbacks.values():
        if getattr(component.load(), "accounts", False):
            report |= component.build().planned(
                config,
                run.method,
                sends,
                run.data.train_sizes,
            )
    return report


def run_bytes(config: Config) -> tuple[float, float]:
    """Bytes of a process with one run of `config` after a round cut to a batch an epoch, and what a
    second run adds.

    Raises:
        BadInput: the run cannot begin, or its data are not here.
    """
    data = prepare(
        replace(config.data, download=False),
        config.federation.clients,
        config.seed,
    )
    rehearsal = _bare(config)
    runs, measured = [], []
    with _one_run_alone(rehearsal):
        for _ in range(3):  # the first run also makes what all share
            runs.append(_run(rehearsal, data, "cpu", most_batches=1, rounds=1)[0])
            measured.append(device.resident_bytes())
    return measured[0], max(0.0, measured[2] - measured[1])
