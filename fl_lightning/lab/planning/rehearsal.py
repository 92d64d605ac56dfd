"""Rehearses a round of a run: measures the memory, bytes and seconds that it takes here, and scales
them to the whole cohort and all rounds."""

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
from fl_lightning.lab.planning.made_up import made_up_for
from fl_lightning.lab.planning.plan import Plan
from fl_lightning.lab.planning.start import check_start, data_here
from fl_lightning.results.record import RoundRecord
from fl_lightning.run import assemble, instantiate

BUDGET = 8.0
"""Seconds that the local training of the measured round may take; its steps are cut to fit, so that
a plan takes about half a minute (our choice)."""
MOST_CLIENTS = 16
"""Most clients of the rehearsed round: twice as many as train at once on a CPU (our choice)."""
MADE_UP_CLIENTS = 16
"""Most clients of each architecture for which data are made up."""
_WATCHING = ("checkpoint.Checkpoint", "progress.Progress", "heatmaps.Heatmaps")
"""Callbacks that are left out of a rehearsal: a plan does not count the seconds of checkpoints and
pictures."""


def rehearse(config: Config, samples: int = 500) -> Plan:
    """Measure a round of a run.

    A first round, of one batch an epoch, is timed. From its seconds follows how many batches an
    epoch of the measured round may have for local training to take at most `BUDGET` seconds.

    Args:
        config: the run; nothing is written to its folder.
        samples: training samples of each client to make up if the data are not on this machine.

    Raises:
        BadInput: the run cannot begin, or this machine has no such accelerator.
        RunFailed: a client fails.
    """
    accelerator = device.resolved(config.fabric.accelerator)
    is_here = accelerator in ("cpu", device.accelerator_kind())
    check(
        "fabric.accelerator",
        accelerator,
        is_here,
        "this machine has none; rehearse with --fabric.accelerator cpu",
    )
    data = data_here(config)
    check_start(config, data)
    rehearsal = _without_watchers(config)
    if data is None:
        rehearsal = _few_clients(rehearsal)
        data = made_up_for(config, rehearsal.clients, samples)
        if data is None:
            raise BadInput(
                "data.root",
                config.data.root,
                "the data are not there, and a plan needs them: put them there",
            )
    with _process_settings(rehearsal):
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
    return _plan_of(
        config,
        fed,
        record,
        most_batches,
        samples if data.made_up else 0,
    )


def _without_watchers(config: Config) -> Config:
    """Return `config` for one process, without loggers and without the callbacks of `_WATCHING`;
    every round is scored, and a client that fails ends the run."""
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
    """Return `config` with at most `MADE_UP_CLIENTS` clients of each architecture and no held-out
    clients."""
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
def _process_settings(config: Config) -> Any:
    """Inside the context, use the run's number of threads; freed memory stays with the process, as
    in a run."""
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
    """Run `rounds` rounds of some clients.

    Args:
        most_batches: batches after which an epoch is cut.

    Returns:
        The federation, and the record of the last round.
    """
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
            record = fed.round(t, _rehearsed_clients(fed))
            fed.notify("on_round_end", record)
    return fed, record


def _rehearsed_clients(fed: Federation) -> list[int]:
    """Choose at most `MOST_CLIENTS` clients of the first cohort, but at least two of each
    architecture, evenly spread from those with fewest samples to those with most."""
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


def _plan_of(
    config: Config,
    fed: Federation,
    record: RoundRecord,
    most_batches: int,
    made_up: int,
) -> Plan:
    """Scale the measurements of the rehearsed clients to a cohort of mean size.

    Args:
        config: the whole run.
        fed: the rehearsed federation.
        record: its measured round.
        most_batches: batches after which an epoch was cut.
        made_up: made-up training samples of each client; 0 if the data are real.
    """
    run, metrics = fed.run, record.metrics
    data, rehearsed = run.data, record.cohort
    mean_cohort = run.cohort_size * config.clients / run.clients
    by_clients = mean_cohort / len(rehearsed)
    batch = config.federation.batch_size
    samples = [data.train_sizes[client] for client in rehearsed]
    trained_samples = sum(min(number, most_batches * batch) for number in samples)
    trained = trained_samples / sum(samples)
    # training and test samples of a mean round, as multiples of the rehearsed round's
    train_ratio = np.mean(data.train_sizes) * mean_cohort / sum(samples) / trained
    tests = sum(data.test_sizes[client] for client in rehearsed)
    test_ratio = np.mean(data.test_sizes) * mean_cohort / max(tests, 1) / config.evaluation.every
    client = metrics["seconds_client"]
    evaluation = metrics["seconds_evaluation"]
    further_clients = max(0, _clients_taking_part(config) - len(rehearsed))
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
        stored=further_clients * _stored_bytes_of_client(fed, rehearsed),
        upload=metrics["upload_bytes"] * by_clients,
        download=metrics["download_bytes"] * by_clients,
        seconds={
            "clients": float(client * train_ratio),
            "evaluation": float(evaluation * test_ratio),
            "server": metrics["seconds"] - client - evaluation,
        },
        privacy=_privacy(config, fed),
    )


def _clients_taking_part(config: Config) -> int:
    """The expected number of clients that take part at least once."""
    share = len(cohort_of(config, 1)) / config.clients
    share_taking_part = 1 - (1 - share) ** config.federation.rounds
    return math.ceil(share_taking_part * config.clients - 1e-9)


def _stored_bytes_of_client(fed: Federation, rehearsed: Sequence[int]) -> float:
    """The mean bytes that a rehearsed client keeps in memory between rounds: vectors, `memory` and
    samples."""
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
    """The bytes of all tensors; tensors that share memory are counted once."""
    storages = [tensor.untyped_storage() for tensors in named for tensor in tensors.values()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _privacy(config: Config, fed: Federation) -> dict[str, Any]:
    """The values that privacy callbacks will report after all rounds; empty without such
    callbacks."""
    run = fed.run
    has_downloads = any(group.down_mask.any() for group in run.groups)
    report: dict[str, Any] = {}
    for component in config.callbacks.values():
        if getattr(component.load(), "accounts", False):
            report |= component.build().planned(
                config,
                run.method,
                has_downloads,
                run.data.train_sizes,
            )
    return report


def memory_of_runs(config: Config) -> tuple[float, float]:
    """Measure how much memory a process takes on the CPU that trains one run of `config`, and how
    much each further run in the same process adds. The runs train one round of one batch an epoch.

    Returns:
        Bytes of the process with one run, and bytes that each further run adds.

    Raises:
        BadInput: the run cannot begin, or its data are not on this machine.
    """
    data = prepare(
        replace(config.data, download=False),
        config.federation.clients,
        config.seed,
    )
    rehearsal = _without_watchers(config)
    runs, measured = [], []
    with _process_settings(rehearsal):
        for _ in range(3):  # the first run also allocates what all runs share
            runs.append(_run(rehearsal, data, "cpu", most_batches=1, rounds=1)[0])
            measured.append(device.resident_bytes())
    return measured[0], max(0.0, measured[2] - measured[1])
