"""A run, as everything that works on it sees it: what was configured, the clients' models, the
processes, the state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.configuration.config import Config
from fl_lightning.core.layout import Layout, tensors_of
from fl_lightning.core.module import Module
from fl_lightning.data import FederatedData
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.metric import FURTHER, Metric
from fl_lightning.foundation.parallel import RankGroup
from fl_lightning.foundation.rng import numpy_rng
from fl_lightning.storage.policy import StoragePolicy
from fl_lightning.storage.state import ClientState, ServerState
from fl_lightning.storage.store import VectorStore

if TYPE_CHECKING:
    from fl_lightning.callbacks.base import Callback
    from fl_lightning.callbacks.relations import Relation
    from fl_lightning.engine.phases import SampleCost
    from fl_lightning.methods.base import Method


@dataclass(eq=False)
class ModelGroup:
    """The clients that run one architecture. Most federations have one such group; models are mixed
    within a group."""

    index: int
    """Among the groups of the run."""
    name: str
    members: list[int]
    """Ascending."""
    layout: Layout
    initial: Tensor
    """The model (D,) that these clients begin from."""
    initial_buffers: list[Tensor]
    """Buffers that are no block of the layout (counters, masks); they never travel."""
    down_mask: np.ndarray
    """Bool [B]: the blocks that travel to clients."""
    up_mask: np.ndarray
    """Bool [B]: the blocks that travel to the server."""
    whole_last: bool
    """A lone last sample joins the batch before it: BatchNorm cannot train on one."""
    head: nn.Module
    """The classifier."""
    another: Callable[[int], Tensor]
    """Another initial model (D,), drawn for a number: the network is built again."""
    module: Module = None  # type: ignore[assignment]
    """The LightningModule of this rank that vectors are bound to; the engine's, once it is put
    together."""
    cost: SampleCost | None = None
    """Operations of a sample's forward and backward pass; None: not known."""
    vectors: dict[str, Tensor] = field(default_factory=dict)
    """What the server keeps, by name; `model` is the global model, if there is one, and else the
    initial model."""
    axis: slice = field(default_factory=lambda: slice(0, 0))
    """Where its layers are among those of all groups."""
    buffers: dict[int, Tensor] = field(default_factory=dict)
    """The server's vectors for mixes, reused in every round."""
    held_out: list[int] = field(default_factory=list)
    """Places in `FederatedData.held_out` of the clients that would run this architecture."""
    spare: list[Tensor] = field(default_factory=list)
    """Vectors of clients whose states were dropped, to be used again: fresh memory costs more than
    a copy."""

    def first_buffers(self) -> list[Tensor]:
        """Copies of `initial_buffers`: a model may write to them in evaluation, too."""
        return [b.clone() for b in self.initial_buffers]

    @property
    def frozen(self) -> dict[str, Tensor]:
        """Parameters and statistics that do not train, by name: stored once per rank and shared by
        its clients."""
        if not self.layout.frozen:
            return {}
        tensors = tensors_of(self.module.model)
        return {name: tensors[name] for name in self.layout.frozen}

    @property
    def feature_width(self) -> int:
        """d, the number of features that the classifier takes.

        Raises:
            BadInput: the classifier is not one linear layer.
        """
        if not isinstance(self.head, nn.Linear):
            requirement = "the method needs a classifier that is one linear layer"
            raise BadInput("model", self.name, requirement)
        return self.head.in_features


@dataclass(eq=False)
class RunContext:
    """Everything that the rounds of a run work on. Methods and callbacks read it; the engine alone
    writes to it."""

    config: Config
    method: Method
    relation: Relation
    data: FederatedData
    folder: Path
    processes: RankGroup
    device: torch.device
    """Where clients train."""
    dtype: torch.dtype
    """Of the vectors."""
    groups: list[ModelGroup]
    layer_names: list[str]
    """The layers of all groups, in the order of the ledger's axis."""
    store: VectorStore
    policy: StoragePolicy
    home: list[int]
    """Rank of every client."""
    judge: str
    """The kind of model that counts as the run's score: before, after, global, finetuned."""
    callbacks: Sequence[Callback]
    """Transforms, observers and an aggregator, in the order of their configuration."""
    server: ServerState = field(default_factory=ServerState)
    states: dict[int, ClientState] = field(default_factory=dict)
    """Of the clients whose home is this rank, once they have taken part."""
    resumed_from: int = 0
    """The last round of the checkpoint from which the run goes on; 0: a fresh start."""
    most_batches: int | None = None
    """Batches of an epoch, and steps of a phase, at most; None: all."""
    warned: set[str] = field(default_factory=set)
    """Names of the warnings that have been printed."""

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.processes.rank

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self.processes.size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.processes.rank == 0

    @property
    def metric(self) -> Metric:
        """The metric that chooses rounds, and is shown first: `evaluation.metric`."""
        return FURTHER.get(str(self.config.evaluation.metric), self.data.metric)

    @property
    def rounds(self) -> int:
        """Rounds in all."""
        return self.config.federation.rounds

    @property
    def clients(self) -> int:
        """N, those that take part."""
        return len(self.home)

    @property
    def cohort_size(self) -> int:
        """Clients that take part in a round."""
        return cohort_size(self.config, self.clients)

    @property
    def tolerant(self) -> bool:
        """Whether the run goes on without a client that fails."""
        return self.config.federation.on_bad_client != "stop"

    @property
    def method_name(self) -> str:
        """As it is called on the command line."""
        return type(self.method).__name__.lower()

    @property
    def feature_width(self) -> int:
        """d, the number of features that every client's classifier takes.

        Raises:
            BadInput: it differs between architectures, or a classifier is not one linear layer.
        """
        widths = {group.feature_width for group in self.groups}
        if len(widths) > 1:
            listed = ", ".join(f"{group.name} {group.feature_width}" for group in self.groups)
            requirement = (
                f"{self.method_name} exchanges features: all architectures must give equally many"
            )
            raise BadInput("model", listed, requirement)
        return widths.pop()

    def check_validation(self, why: str) -> None:
        """Raise `BadInput` unless every client has validation data, which the method needs."""
        sizes = self.data.validation_sizes
        if not all(sizes[c] for c in range(self.clients)):
            requirement = f"{self.method_name} {why}: above 0, and enough for every client"
            raise BadInput("data.validation", self.config.data.validation, requirement)

    def at_home(self, clients: Iterable[int]) -> list[int]:
        """Those of `clients` whose home is this rank."""
        return [c for c in clients if self.home[c] == self.rank]

    def took_part(self, client: int) -> bool:
        """Whether a visit of this rank's `client` has succeeded. (A client whose visits have all
        failed may have a state, too: the privacy that it has spent.)"""
        return client in self.states and self.states[client].rounds > 0

    def group_of(self, client: int) -> ModelGroup:
        """The group of `client`."""
        if len(self.groups) == 1:
            return self.groups[0]
        # From the last on: a newcomer has the last number of all, in whichever group it is.
        for group in reversed(self.groups):
            if group.members[0] <= client <= group.members[-1]:
                return group
        raise LookupError(f"no client {client}")

    def learning_rate(self, t: int) -> float:
        """Of round `t`."""
        config = self.config.optimizer
        return config.lr * config.lr_decay ** ((t - 1) // config.lr_step)


def cohort_of(config: Config, t: int) -> list[int]:
    """The clients that are drawn for round `t`, ascending."""
    clients = config.clients
    size = cohort_size(config, clients)
    if size == clients:
        return list(range(clients))
    rng = numpy_rng(config.seed, "cohort", t)
    return sorted(rng.choice(clients, size, replace=False).tolist())


def cohort_size(config: Config, clients: int) -> int:
    """max(1, round(participation N)) of N clients."""
    return max(1, round(config.federation.participation * clients))


def layer_axis(groups: Sequence[ModelGroup]) -> list[str]:
    """Give each group its place on the axis of all layers; returns the layers' names (`NAME:LAYER`
    with several groups)."""
    names = [group.name for group in groups]
    labels: list[str] = []
    for k, group in enumerate(groups):
        layers = group.layout.layers
        group.axis = slice(len(labels), len(labels) + len(layers))
        number = names[:k].count(group.name) + 1
        label = group.name
        if names.count(group.name) > 1:
            label = f"{group.name}{number}"
        labels += [f"{label}:{layer}" if len(groups) > 1 else layer for layer in layers]
    return labels
