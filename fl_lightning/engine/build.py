"""From a configuration, data, networks and a method to a federation that is ready to run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_lightning.callbacks.base import Aggregator, Callback, Observer, Transform
from fl_lightning.configuration.components import Network
from fl_lightning.configuration.config import Config, check
from fl_lightning.core.buffers import check_modules
from fl_lightning.core.layout import Layout
from fl_lightning.core.run import ModelGroup, RunContext, layer_axis
from fl_lightning.data import FederatedData
from fl_lightning.engine.evaluation import Evaluator, ServerModels
from fl_lightning.engine.federation import Federation
from fl_lightning.engine.joining import HeldOut
from fl_lightning.engine.pool import Pool
from fl_lightning.engine.record import Guard
from fl_lightning.engine.trainer import Trainer
from fl_lightning.engine.worker import Worker
from fl_lightning.foundation.device import digest, seeded, wide
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.parallel import Group, assign_homes
from fl_lightning.foundation.rng import key
from fl_lightning.methods.base import Method
from fl_lightning.models import freshly_drawn, frozen_in, frozen_when_built, head_of
from fl_lightning.storage.policy import StoragePolicy
from fl_lightning.storage.state import MODEL
from fl_lightning.storage.store import VectorStore
from fl_lightning.training.executors.together import Together

SMOKE_BATCHES = 2
"""Of an epoch, with `--smoke`."""


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
    """N clients with a model each, and the server between them.

    Args:
        fabric: launched, with the client-parallel strategy.
        models: the network of each architecture in `config.models`, with the initial weights its
            clients begin from.
        callbacks: in the order in which their hooks run.
        folder: the run folder.
        most_batches: batches of an epoch, and steps of a phase, at most; None: all.
        together: drives the run beside others.

    Raises:
        BadInput: these do not fit together.
    """
    if config.fabric.precision == "64-true" and wide(fabric.device) != torch.float64:
        allowed = f"{fabric.device.type} has no 64-bit numbers: 32-true, bf16-mixed, 16-mixed"
        raise BadInput("fabric.precision", config.fabric.precision, allowed)
    transforms = [callback for callback in callbacks if isinstance(callback, Transform)]
    protected = any(type(c).on_phase is not Transform.on_phase for c in transforms)
    allowed = "callbacks.stepprivacy must hang on the run, to account for it"
    check("optimizer.privacy", "", protected or not config.optimizer.privacy.on, allowed)
    _check_suits(method, data, models)
    # a method may freeze what it builds: that is every client's
    frozen = [frozen_in(model) for model in models]
    nets = [built(method, model, data.num_classes, config.seed) for model in models]
    dealt = members_of([m.count for m in config.models], config.federation.clients)
    groups = []
    for k, (net, model, who) in enumerate(zip(nets, models, dealt, strict=True)):
        never = frozen[k] + frozen_when_built(net)
        group = make_group(k, fabric.device, config, net, data.taking_part(who), method, never)
        group.name = type(model).__name__.lower()  # not that of what the method has built of it
        group.held_out = [
            place for place, client in enumerate(data.held_out) if client.number in who
        ]
        allowed = f"all clients of {group.name} are held out"
        check("data.held_out_clients", config.data.held_out_clients, bool(group.members), allowed)
        alone = next(
            (c for c in group.members if group.whole_last and data.train_sizes[c] == 1), None
        )
        if alone is not None and config.federation.on_bad_client == "stop":
            allowed = (
                f"BatchNorm cannot train on the single sample of {data.called(alone)}: at least 2"
            )
            raise BadInput("data.min_samples", config.data.min_samples, allowed)
        groups.append(group)
    relation = method.relation()
    processes = Group(fabric)
    policy = StoragePolicy.of(method, relation, callbacks, config, [g.down_mask for g in groups])
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
        layer_names=layer_axis(groups),
        store=VectorStore(config.fabric.bank, folder, fabric.device),
        policy=policy,
        home=assign_homes(data.train_sizes, processes.size),
        judge=method.traits.judge if config.evaluation.judge == "auto" else config.evaluation.judge,
        callbacks=list(callbacks),
        most_batches=SMOKE_BATCHES if config.smoke else most_batches,
    )
    if len(groups) > 1 and not (run.relation.several and method.traits.several):
        allowed = (
            f"one architecture: {run.method_name} mixes the models of all clients; "
            f"--method fedavg takes several"
        )
        raise BadInput("model", [g.name for g in groups], allowed)
    trainers = [
        Trainer(fabric, run, group, net, together) for group, net in zip(groups, nets, strict=True)
    ]
    _check_same_start(run)
    return _assembled(run, trainers)


def _check_suits(method: Method, data: FederatedData, models: Sequence[nn.Module]) -> None:
    """Raise `BadInput` where the method wants of data or networks what they have not."""
    name = type(method).__name__.lower()
    per_position = data.text is not None and data.text.per_position
    allowed = f"{name} goes by the class of a sample, and here each token has one to come"
    check(
        "method",
        name,
        not (per_position and (method.traits.classes or method.traits.features)),
        allowed,
    )
    trains = all(
        any(p.requires_grad for p in m.get_submodule(head_of(m)).parameters()) for m in models
    )
    allowed = f"{name} builds on the classifier, and it is frozen (model.adapters.head)"
    check("method", name, trains or type(method).build is Method.build, allowed)


def _check_same_start(run: RunContext) -> None:
    """Raise `BadInput` where this process and rank 0 begin with other weights: each reads
    `model.weights` itself, and a frozen part is nobody's that would be sent."""
    for group, model in zip(run.groups, run.config.models, strict=True):
        read = isinstance(model.component, Network) and model.component.weights is not None
        if run.world_size == 1 or not (read or group.frozen):
            continue
        digests = run.processes.gather_objects(digest((group.initial, *group.frozen.values())))
        odd = [rank for rank, one in enumerate(digests) if one != digests[0]]
        allowed = (
            f"rank {odd[0] if odd else 0} has other weights than rank 0: all must read the same "
            f"file"
        )
        check("model", group.name, not odd, allowed)


def _assembled(run: RunContext, trainers: Sequence[Trainer]) -> Federation:
    """The parts that work on `run`, with the server's first memory."""
    memory = run.relation.init_server(run) | run.method.init_server(run)
    run.server.memory |= {name: tensor.clone() for name, tensor in memory.items()}
    transforms = [c for c in run.callbacks if isinstance(c, Transform)]
    observers = [c for c in run.callbacks if isinstance(c, Observer)]
    reducer = next((c for c in run.callbacks if isinstance(c, Aggregator)), Aggregator())
    guard = Guard(run)
    evaluator = Evaluator(run, trainers, guard, ServerModels(run, reducer))
    if run.judge == "global" and not evaluator.has_global:
        allowed = "this method keeps no global model: before, after, finetuned"
        raise BadInput("evaluation.judge", "global", allowed)
    pool = Pool(run, trainers)
    worker = Worker(run, pool, trainers, guard, evaluator, transforms, observers, reducer)
    if run.data.held_out:
        worker.observers = [HeldOut(worker), *observers]
    return Federation(worker)


def built(method: Method, model: nn.Module, num_classes: int, seed: int) -> nn.Module:
    """The network that clients train; what the method draws for modules of its own depends on the
    run's seed alone."""
    with seeded(key(seed, "method's modules")):
        return method.build(model, num_classes)


def make_group(
    index: int,
    device: torch.device,
    config: Config,
    model: nn.Module,
    members: list[int],
    method: Method,
    frozen: Collection[nn.Parameter] = (),
) -> ModelGroup:
    """The clients `members`, who begin from `model`; of it the parameters `frozen` are nobody's."""
    dtype = {"64-true": torch.float64, "bf16-true": torch.bfloat16}.get(
        config.fabric.precision, torch.float32
    )
    check_modules(model)
    layout = Layout(model, head_of(model), frozen)
    vector, buffers = layout.read(model, dtype)
    vector = vector.to(device)
    whole_last = any(
        isinstance(m, _BatchNorm) and name not in layout.still for name, m in model.named_modules()
    )
    if whole_last and config.federation.batch_size == 1:
        raise BadInput(
            "federation.batch_size", 1, "BatchNorm cannot train on single samples: at least 2"
        )
    scopes = [method.scope(b) for b in layout.blocks]
    return ModelGroup(
        index=index,
        name=type(model).__name__.lower(),
        members=members,
        layout=layout,
        initial=vector,
        initial_buffers=[b.to(device) for b in buffers],
        down_mask=np.array([s == "shared" for s in scopes], dtype=bool),
        up_mask=np.array([s in ("shared", "uploaded") for s in scopes], dtype=bool),
        whole_last=whole_last,
        head=model.get_submodule(layout.head),
        another=partial(_another, model, layout, dtype, device),
        vectors={MODEL: vector},
    )


def _another(
    model: nn.Module, layout: Layout, dtype: torch.dtype, device: torch.device, number: int
) -> Tensor:
    """A model (D,) like `model`, drawn anew for `number`."""
    with seeded(number):
        return layout.read(freshly_drawn(model), dtype)[0].to(device)


def members_of(counts: Sequence[int | None], clients: int) -> list[list[int]]:
    """Which clients run each architecture: the first `counts[0]` the first, and so on (one without
    a count: all)."""
    if len(counts) == 1:
        return [list(range(clients))]
    ends = np.cumsum([count or 0 for count in counts]).tolist()
    return [list(range(*pair)) for pair in pairwise([0, *ends])]
