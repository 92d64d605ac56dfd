"""Builds a federation that is ready to run from configuration, data, networks and method."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_lightning.callbacks.base import Aggregator, Callback, Observer, Transform
from fl_lightning.configuration.components import Network
from fl_lightning.configuration.config import Config, check
from fl_lightning.core import Layout, ModelGroup, RunContext
from fl_lightning.core.buffers import check_modules
from fl_lightning.core.run import assign_layer_axis
from fl_lightning.data import FederatedData
from fl_lightning.engine.evaluation import Evaluator, ServerModels
from fl_lightning.engine.federation import Federation
from fl_lightning.engine.joining import HeldOutScores
from fl_lightning.engine.pool import Pool
from fl_lightning.engine.record import Guard
from fl_lightning.engine.trainer import Trainer
from fl_lightning.engine.worker import Worker
from fl_lightning.foundation.device import digest, seeded, wide
from fl_lightning.foundation.parallel import RankGroup, assign_homes
from fl_lightning.foundation.rng import key
from fl_lightning.methods.base import Method
from fl_lightning.models import freshly_drawn, frozen_in, frozen_when_built, head_of
from fl_lightning.storage.policy import StoragePolicy
from fl_lightning.storage.state import MODEL
from fl_lightning.storage.store import VectorStore
from fl_lightning.training.executors.together import Together

SMOKE_BATCHES = 2
"""Number of batches to which `--smoke` cuts an epoch."""


def federation(
    fabric: Fabric,
    config: Config,
    data: FederatedData,
    models: Sequence[nn.Module],
    method: Method,
    callbacks: Sequence[Callback],
    folder: Path,
    most_batches: int | None = None,
    together: Together | None = None,
) -> Federation:
    """Build the federation of N clients, each with a model, and a server.

    Args:
        fabric: launched, with the client-parallel strategy.
        models: the network of each architecture in `config.models`, with the initial weights of
            its clients.
        callbacks: in the order in which their hooks run.
        folder: the run folder.
        most_batches: upper limit of the batches of an epoch and of the steps of a phase; None: no
            limit.
        together: scheduler of several runs in this process, whose clients train in the same
            passes; None: this run is the only one.

    Raises:
        BadInput: configuration, data, networks, method and callbacks do not fit together.
    """
    precision = config.fabric.precision
    supported = precision != "64-true" or wide(fabric.device) == torch.float64
    requirement = (
        f"{fabric.device.type} has no 64-bit numbers: choose 32-true, bf16-mixed or 16-mixed"
    )
    check("fabric.precision", precision, supported, requirement)
    transforms = [callback for callback in callbacks if isinstance(callback, Transform)]
    protected = any(type(c).on_phase is not Transform.on_phase for c in transforms)
    requirement = "no callback accounts for the privacy that steps spend: add callbacks.stepprivacy"
    check("optimizer.privacy", True, protected or not config.optimizer.privacy.on, requirement)
    _check_suits(method, data, models)
    # a method may freeze parts of the network that it builds: they are the same for every client
    frozen = [frozen_in(model) for model in models]
    nets = []
    for model in models:  # seeded: a method may add modules with random weights
        with seeded(key(config.seed, "method's modules")):
            nets.append(method.build(model, data.num_classes))
    numbers_of = members_of([m.count for m in config.models], config.federation.clients)
    groups = []
    for k, (net, numbers) in enumerate(zip(nets, numbers_of, strict=True)):
        fixed = frozen[k] + frozen_when_built(net)
        members = data.run_numbers(numbers)
        group = make_group(
            k,
            fabric.device,
            config,
            net,
            members,
            method,
            fixed,
        )
        group.name = type(models[k]).__name__.lower()  # not that of the built network
        for place, client in enumerate(data.held_out):
            if client.number in numbers:
                group.held_out.append(place)
        _check_members(group, config, data)
        groups.append(group)
    relation = method.relation()
    processes = RankGroup(fabric)
    policy = StoragePolicy.for_run(
        method,
        relation,
        callbacks,
        config,
        [g.down_mask for g in groups],
    )
    run = RunContext(
        config=config,
        method=method,
        relation=relation,
        data=data,
        folder=folder,
        processes=processes,
        device=fabric.device,
        dtype=groups[0].initial.dtype,
        groups=groups,
        layer_names=assign_layer_axis(groups),
        store=VectorStore(config.fabric.bank, folder, fabric.device),
        policy=policy,
        home=assign_homes(data.train_sizes, processes.size),
        judge=method.traits.judge if config.evaluation.judge == "auto" else config.evaluation.judge,
        callbacks=list(callbacks),
        most_batches=SMOKE_BATCHES if config.smoke else most_batches,
    )
    takes_all = len(groups) == 1 or (run.relation.several and method.traits.several)
    requirement = (
        f"{run.method_name} mixes the models of all clients: give one architecture, or choose "
        "--method fedavg"
    )
    check("model", [g.name for g in groups], takes_all, requirement)
    pairs = zip(groups, nets, strict=True)
    trainers = [
        Trainer(
            fabric,
            run,
            group,
            net,
            together,
        )
        for group, net in pairs
    ]
    _check_same_start(run)
    return _assembled(run, trainers)


def _check_members(
    group: ModelGroup,
    config: Config,
    data: FederatedData,
) -> None:
    """Raise `BadInput` if a group has no clients, or if it has BatchNorm and a client with a single
    training sample."""
    requirement = f"all clients of {group.name} are held out: hold out fewer"
    check("data.held_out_clients", config.data.held_out_clients, bool(group.members), requirement)
    if not group.whole_last or config.federation.on_bad_client != "stop":
        return
    for c in group.members:
        called = data.client_label(c)
        requirement = f"BatchNorm cannot train on the single sample of {called}: set at least 2"
        check("data.min_samples", config.data.min_samples, data.train_sizes[c] != 1, requirement)


def _check_suits(
    method: Method,
    data: FederatedData,
    models: Sequence[nn.Module],
) -> None:
    """Raise `BadInput` if the method cannot work with the data or the networks."""
    name = type(method).__name__.lower()
    per_position = data.text is not None and data.text.per_position
    uses_classes = method.traits.classes or method.traits.features
    requirement = (
        f"{name} needs one class for each sample, but here each token has a target: choose another "
        "--method"
    )
    check("method", name, not (per_position and uses_classes), requirement)
    if type(method).build is Method.build:
        return
    requirement = (
        f"{name} replaces or extends the classifier, which is frozen: set model.adapters.head"
    )
    for model in models:
        head = model.get_submodule(head_of(model))
        trains = any(p.requires_grad for p in head.parameters())
        check("method", name, trains, requirement)


def _check_same_start(run: RunContext) -> None:
    """Raise `BadInput` if ranks begin with different weights: each rank reads `model.weights`
    itself, and frozen parameters are never sent."""
    for group, model in zip(run.groups, run.config.models, strict=True):
        read = isinstance(model.component, Network) and model.component.weights is not None
        if run.world_size == 1 or not (read or group.frozen):
            continue
        digest_here = digest((group.initial, *group.frozen.values()))
        digests = run.processes.gather_objects(digest_here)
        for rank, other in enumerate(digests):
            requirement = f"rank {rank} has other weights than rank 0: all must read the same file"
            check("model", group.name, other == digests[0], requirement)


def _assembled(run: RunContext, trainers: Sequence[Trainer]) -> Federation:
    """Build the federation of `run`, and initialise the server's memory."""
    memory = run.relation.init_server(run) | run.method.init_server(run)
    for name, tensor in memory.items():
        run.server.memory[name] = tensor.clone()
    transforms = [c for c in run.callbacks if isinstance(c, Transform)]
    observers = [c for c in run.callbacks if isinstance(c, Observer)]
    reducer = next((c for c in run.callbacks if isinstance(c, Aggregator)), Aggregator())
    guard = Guard(run)
    evaluator = Evaluator(run, trainers, guard, ServerModels(run, reducer))
    judged = run.judge != "global" or evaluator.has_global
    requirement = "this method keeps no global model: choose before, after or finetuned"
    check("evaluation.judge", "global", judged, requirement)
    pool = Pool(run, trainers)
    worker = Worker(
        run,
        pool,
        trainers,
        guard,
        evaluator,
        transforms,
        observers,
        reducer,
    )
    if run.data.held_out:
        worker.observers = [HeldOutScores(worker), *observers]
    return Federation(worker)


def make_group(
    index: int,
    device: torch.device,
    config: Config,
    model: nn.Module,
    members: list[int],
    method: Method,
    frozen: Collection[nn.Parameter] = (),
) -> ModelGroup:
    """Make the group of clients that run one architecture.

    Args:
        index: number of the architecture in `config.models`.
        model: its network with initial weights.
        members: its clients.
        frozen: parameters that never train; they are in no client's vector.
    """
    dtypes = {"64-true": torch.float64, "bf16-true": torch.bfloat16}
    dtype = dtypes.get(config.fabric.precision, torch.float32)
    check_modules(model)
    layout = Layout(model, head_of(model), frozen)
    vector, buffers = layout.read(model, dtype)
    vector = vector.to(device)
    norms = {name for name, m in model.named_modules() if isinstance(m, _BatchNorm)}
    trains_norms = not norms <= set(layout.still)
    requirement = "BatchNorm cannot train on single samples: set at least 2"
    trainable = config.federation.batch_size > 1 or not trains_norms
    check("federation.batch_size", 1, trainable, requirement)
    scopes = [method.scope(block) for block in layout.blocks]
    return ModelGroup(
        index=index,
        name=type(model).__name__.lower(),
        members=members,
        layout=layout,
        initial=vector,
        initial_buffers=[b.to(device) for b in buffers],
        down_mask=np.array([s == "shared" for s in scopes], dtype=bool),
        up_mask=np.array([s in ("shared", "uploaded") for s in scopes], dtype=bool),
        whole_last=trains_norms,
        head=model.get_submodule(layout.head),
        draw_initial=partial(
            _draw_initial,
            model,
            layout,
            dtype,
            device,
        ),
        vectors={MODEL: vector},
    )


def _draw_initial(
    model: nn.Module,
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
    number: int,
) -> Tensor:
    """Return a model (D,) of the same architecture, with random weights from the seed `number`."""
    with seeded(number):
        vector, _ = layout.read(freshly_drawn(model), dtype)
    return vector.to(device)


def members_of(counts: Sequence[int | None], clients: int) -> list[list[int]]:
    """Divide the clients 0 to `clients` - 1 among the architectures, in order; returns the clients
    of each.

    Args:
        counts: number of clients of each architecture. If there is a single architecture, its count
            is ignored and it gets all clients; if there are several, one whose count is None gets
            no clients.
        clients: number of clients.
    """
    if len(counts) == 1:
        return [list(range(clients))]
    members = []
    start = 0
    for count in counts:
        stop = start + (count or 0)
        members.append(list(range(start, stop)))
        start = stop
    return members
