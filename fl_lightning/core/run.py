"""The context of a run that engine, methods and callbacks share: configuration, data, groups of
clients, processes and state."""

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
    """The clients that run one architecture, with its layout and initial model. Most federations
    have one group; models are mixed within a group."""

    index: int
    """Number of the group in the run."""
    name: str
    members: list[int]
    """Ascending."""
    layout: Layout
    initial: Tensor
    """The initial model (D,) of these clients."""
    initial_buffers: list[Tensor]
    """Initial values of buffers that are not in the vector (counters, masks) and are never sent."""
    down_mask: np.ndarray
    """Bool [B]: mask of the blocks that are downloaded."""
    up_mask: np.ndarray
    """Bool [B]: mask of the blocks that are uploaded."""
    whole_last: bool
    """Whether a last batch of a single sample is joined to the one before: BatchNorm cannot train
    on one sample."""
    head: nn.Module
    """The classifier."""
    draw_initial: Callable[[int], Tensor]
    """Builds the network again and returns another initial model (D,), with weights from a seed."""
    module: Module = None  # type: ignore[assignment]
    """This rank's LightningModule, to which clients' vectors are bound; set by the engine's
    `Trainer`."""
    cost: SampleCost | None = None
    """FLOPs of training on one sample; None: unknown."""
    vectors: dict[str, Tensor] = field(default_factory=dict)
    """The server's vectors by name; `model` is the global model, or the initial one if there is no
    global model."""
    axis: slice = field(default_factory=lambda: slice(0, 0))
    """The slice of the group's layers in `RunContext.layer_names`, the layers of all groups."""
    buffers: dict[int, Tensor] = field(default_factory=dict)
    """The server's vectors for mixes, reused in every round."""
    held_out: list[int] = field(default_factory=list)
    """Indices in `FederatedData.held_out` of the clients with this architecture."""
    spare: list[Tensor] = field(default_factory=list)
    """Vectors of clients whose states were dropped, for reuse: allocating costs more than a
    copy."""

    def first_buffers(self) -> list[Tensor]:
        """Return copies of `initial_buffers`: a model may write to its buffers in evaluation,
        too."""
        return [b.clone() for b in self.initial_buffers]

    @property
    def frozen(self) -> dict[str, Tensor]:
        """Parameters and statistics that do not train, by name: all clients of a rank share
        them."""
        if not self.layout.frozen:
            return {}
        tensors = tensors_of(self.module.model)
        return {name: tensors[name] for name in self.layout.frozen}

    @property
    def feature_width(self) -> int:
        """d, the number of features in the classifier's input.

        Raises:
            BadInput: the classifier is not a single linear layer.
        """
        if not isinstance(self.head, nn.Linear):
            requirement = (
                "the method needs a classifier that is a single nn.Linear: choose another model"
            )
            raise BadInput("model", self.name, requirement)
        return self.head.in_features


@dataclass(eq=False)
class RunContext:
    """The configuration, parts and state of a run. Methods and callbacks read it; only the engine
    writes to it."""

    config: Config
    method: Method
    relation: Relation
    data: FederatedData
    folder: Path
    processes: RankGroup
    device: torch.device
    """The device on which clients train."""
    dtype: torch.dtype
    """The type of the vectors."""
    groups: list[ModelGroup]
    layer_names: list[str]
    """Names of the layers of all groups, in the order of `ModelGroup.axis`."""
    store: VectorStore
    policy: StoragePolicy
    home: list[int]
    """Rank of every client."""
    judge: str
    """The kind of model whose score counts as the run's: before, after, global or finetuned."""
    callbacks: Sequence[Callback]
    """Transforms, observers and an aggregator, in the order of their configuration."""
    server: ServerState = field(default_factory=ServerState)
    states: dict[int, ClientState] = field(default_factory=dict)
    """States of the clients whose home is this rank, from their first visit on."""
    resumed_from: int = 0
    """Round of the checkpoint from which the run was resumed; 0: it was not resumed."""
    most_batches: int | None = None
    """Upper limit of the batches of an epoch and of the steps of a phase; None: no limit."""
    warned: set[str] = field(default_factory=set)
    """Names of the warnings that have been logged."""

    @property
    def rank(self) -> int:
        """Number of this process."""
        return self.processes.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.processes.size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.processes.rank == 0

    @property
    def metric(self) -> Metric:
        """The metric by which the best round is chosen and which is shown first:
        `evaluation.metric`."""
        return FURTHER.get(str(self.config.evaluation.metric), self.data.metric)

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return self.config.federation.rounds

    @property
    def clients(self) -> int:
        """N, the number of clients without those held out."""
        return len(self.home)

    @property
    def cohort_size(self) -> int:
        """Number of clients in a round's cohort."""
        return cohort_size(self.config, self.clients)

    @property
    def tolerant(self) -> bool:
        """Whether the run continues without a client that fails."""
        return self.config.federation.on_bad_client != "stop"

    @property
    def method_name(self) -> str:
        """Name of the method on the command line."""
        return type(self.method).__name__.lower()

    @property
    def feature_width(self) -> int:
        """d, the number of features in the input of every client's classifier.

        Raises:
            BadInput: it differs between architectures, or a classifier is not a single linear
                layer.
        """
        widths = {group.feature_width for group in self.groups}
        if len(widths) > 1:
            listed = ", ".join(f"{group.name} {group.feature_width}" for group in self.groups)
            requirement = (
                f"{self.method_name} exchanges features: choose architectures with equally many"
            )
            raise BadInput("model", listed, requirement)
        return widths.pop()

    def check_validation(self, why: str) -> None:
        """Raise `BadInput` unless every client has validation data, which the method needs.

        Args:
            why: the words after the method's name in the message, such as "weighs models by their
                loss on validation data".
        """
        sizes = self.data.validation_sizes
        if not all(sizes[c] for c in range(self.clients)):
            requirement = (
                f"{self.method_name} {why}: set it above 0, so that every client has samples"
            )
            raise BadInput("data.validation", self.config.data.validation, requirement)

    def at_home(self, clients: Iterable[int]) -> list[int]:
        """Return the clients whose home is this rank."""
        return [c for c in clients if self.home[c] == self.rank]

    def took_part(self, client: int) -> bool:
        """Whether a client, whose home must be this rank, has had a visit that succeeded. It is not
        enough that the client has a state: after failed visits alone, a client has a state that
        holds the privacy it has spent."""
        return client in self.states and self.states[client].rounds > 0

    def group_of(self, client: int) -> ModelGroup:
        """Return the group of `client`."""
        if len(self.groups) == 1:
            return self.groups[0]
        # reversed: a newcomer has the greatest number of all, in any group
        for group in reversed(self.groups):
            if group.members[0] <= client <= group.members[-1]:
                return group
        raise LookupError(f"no client {client}")

    def learning_rate(self, t: int) -> float:
        """Return the learning rate of round `t`."""
        config = self.config.optimizer
        return config.lr * config.lr_decay ** ((t - 1) // config.lr_step)


def cohort_of(config: Config, t: int) -> list[int]:
    """Draw the clients of round `t` from seed and round, ascending. The trait `everyone_first`
    plays no role here; `Federation.cohort` applies it."""
    clients = config.clients
    size = cohort_size(config, clients)
    if size == clients:
        return list(range(clients))
    rng = numpy_rng(config.seed, "cohort", t)
    return sorted(rng.choice(clients, size, replace=False).tolist())


def cohort_size(config: Config, clients: int) -> int:
    """Return the number of clients in a round's cohort, max(1, round(participation N)) of N."""
    return max(1, round(config.federation.participation * clients))


def assign_layer_axis(groups: Sequence[ModelGroup]) -> list[str]:
    """Number the layers of all groups consecutively, and set each group's `axis` to the slice that
    its layers have; returns the names of all layers, which are `GROUP:LAYER` if there are several
    groups."""
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
