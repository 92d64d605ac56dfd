"""Memory of the rank that holds the most, part by part, under the engine's own storage policy (docs/scaling.md)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fl_lightning.callbacks.relations import Relation
from fl_lightning.config import Config
from fl_lightning.core.mixing import TILE, tiles_at_once
from fl_lightning.log import in_bytes
from fl_lightning.methods.base import Method
from fl_lightning.parallel import assign_homes
from fl_lightning.planning.setting import DataSizes, Hardware, cohorts, met
from fl_lightning.planning.trace import ModelProfile
from fl_lightning.storage.policy import StoragePolicy
from fl_lightning.storage.store import is_apart
from fl_lightning.training.executors.vmap import AHEAD, width_of

MIB = 2**20
PROGRAM_MIB, CONTEXT_MIB = 960, 500
"""A process with the smallest model: the interpreter and its libraries (measured), and a GPU's context (assumed)."""
_STATES = {"sgd": 0, "adam": 2, "adamw": 2, "module": 2}  # vectors that the optimiser keeps, without momentum
_SCRATCH = {"sgd": 0, "adam": 1, "adamw": 1, "module": 1}  # vectors that a step of it takes for a moment


@dataclass(frozen=True)
class Part:
    """A part of the memory of the rank that holds the most."""

    name: str
    bytes: float
    how: str
    """What it comes to, in words."""
    at_once: bool = True
    """It lies there all the time; of those that do not, only the greatest counts."""


@dataclass(frozen=True)
class Products:
    """Inner products of vectors of a model's size with each other."""

    vectors: int
    by_layer: bool

    @property
    def numbers(self) -> float:
        """Of one tile or one layer (core/mixing.py)."""
        return self.vectors**2 + self.vectors + 1.0


@dataclass(frozen=True)
class Setup:
    """What memory and traffic are worked out from. Clients take the models in order, as many as `count` says.

    Mixing is weighed as if all clients ran the widest model: each architecture is mixed for itself, which takes less.
    """

    config: Config
    hardware: Hardware
    sizes: DataSizes
    profiles: list[ModelProfile]
    method: Method

    @cached_property
    def relation(self) -> Relation:
        """The method's."""
        return self.method.relation()

    @cached_property
    def policy(self) -> StoragePolicy:
        """The engine's."""
        observers = [c.load() for c in (*self.config.callbacks.values(), *self.config.loggers.values())]
        return StoragePolicy.of(self.method, self.relation, observers, self.config, [p.mask for p in self.profiles])

    @cached_property
    def widest(self) -> ModelProfile:
        """The architecture with the longest vector."""
        return max(self.profiles, key=lambda p: p.vector)

    @cached_property
    def kind(self) -> np.ndarray:
        """Each client's architecture (N,)."""
        dealt, data = self.config.federation.clients, self.sizes.data
        kinds = np.repeat(np.arange(len(self.profiles)), [m.count or dealt for m in self.config.models])
        return kinds[: self.config.clients] if data is None else kinds[data.numbers]

    @cached_property
    def home(self) -> np.ndarray:
        """Each client's rank (N,), as the engine deals them out."""
        return np.array(assign_homes(self.sizes.train, self.hardware.ranks))

    @cached_property
    def mine(self) -> np.ndarray:
        """The clients of the busiest rank, bool (N,)."""
        train = np.array(self.sizes.train)
        load = sum(np.bincount(self.home[c], train[c], self.hardware.ranks) for c in cohorts(self.config))
        return self.home == int(np.argmax(load))

    @cached_property
    def here(self) -> int:
        """Of a cohort, so many are on the busiest rank at most."""
        return max(int(self.mine[c].sum()) for c in cohorts(self.config))

    @cached_property
    def sources(self) -> int:
        """Models that are mixed."""
        if self.policy.one_download or self.relation.sources == "cohort":
            return len(cohorts(self.config)[0])
        return self.config.clients if self.relation.sources == "all" else met(self.config)

    @property
    def receivers(self) -> int:
        """Vectors of the result."""
        return 1 if self.policy.one_download else len(cohorts(self.config)[0])

    @cached_property
    def products(self) -> list[Products]:
        """Of each Gram matrix of a round, as relation, aggregator and method declare them (`inner_products`)."""
        parts: list[Any] = [self.relation, *(c.load() for c in self.config.callbacks.values())]
        asking = [part for part in parts if getattr(part, "inner_products", False)]
        products = [Products(self.sources, self.relation.per_layer) for _ in asking]
        if (of := self.method.inner_products) is not None:
            vectors = len(cohorts(self.config)[0]) + (self.sources if of == "updates and models" else 0)
            products.append(Products(vectors, of != "updates"))
        return products

    def tiles(self, by_layer: bool) -> tuple[list[int], int]:
        """Pieces of what travels in each layer, or in all as one; and how many layers are told apart."""
        widest = self.widest
        return (list(widest.layer_tiles), widest.layers) if by_layer else (list(widest.tiles), 1)

    @property
    def states(self) -> int:
        """Vectors that the optimiser keeps."""
        return _STATES[self.config.optimizer.name] + (self.config.optimizer.momentum > 0)

    @property
    def away(self) -> bool:
        """Vectors lie elsewhere than in the memory that is planned."""
        place = self.config.fabric.bank
        return place == "disk" or (place == "host" and self.hardware.accelerator != "cpu")

    @property
    def apart(self) -> bool:
        """A visit works on copies of vectors (fl_lightning/storage/store.py)."""
        return is_apart(self.config.fabric.bank, self.hardware.accelerator)

    @property
    def stored(self) -> int:
        """Clients of the rank that are kept in the end."""
        return min(met(self.config) if self.policy.keeps_clients else self.here, int(self.mine.sum()))

    @property
    def width(self) -> int:
        """Clients that train at once: what `auto` may pick, if it is to pick."""
        fabric = self.config.fabric
        stacks = fabric.executor in ("vmap", "auto") and self.config.optimizer.name == "sgd"
        stacks = stacks and not fabric.channels_last and all(p.stacks for p in self.profiles)
        return width_of(len(cohorts(self.config)[0]), self.hardware.accelerator) if stacks else 1

    def mean(self, bytes_: Iterable[float]) -> float:
        """Over the clients of the busiest rank, of `bytes_` by architecture."""
        return float(np.array(list(bytes_), dtype=np.float64)[self.kind][self.mine].mean())


def memory(setup: Setup) -> list[Part]:
    """Of the busiest rank."""
    return [*lasting(setup), visit(setup), evaluation(setup), mixing(setup)]


def peak(parts: list[Part]) -> float:
    """All that lies there all the time, and the greatest of the rest."""
    return sum(p.bytes for p in parts if p.at_once) + max(p.bytes for p in parts if not p.at_once)


def main_memory(setup: Setup, total: float) -> float:
    """Bytes of a node's main memory, over all of its processes, each of which holds `total` at its peak."""
    if setup.hardware.accelerator == "cpu":
        return total * setup.hardware.devices
    beside = 0.0
    if setup.apart:  # blocks of pinned memory are powers of 2
        blocks = (2.0 ** math.ceil(math.log2(max(p.vector, 1))) for p in setup.profiles)
        copies = setup.stored * setup.policy.client_vectors + (0 if setup.policy.one_download else setup.here)
        beside = copies * setup.mean(blocks) * (setup.config.fabric.bank == "host") + _kept_state(setup)
    return (PROGRAM_MIB * MIB + setup.sizes.raw + beside) * setup.hardware.devices


def _kept_state(setup: Setup) -> float:
    kept = setup.states * setup.widest.optimized * float(setup.widest.trained)
    return setup.policy.keeps_optimizer * setup.stored * kept


def of_sample(setup: Setup) -> float:
    """Bytes of one sample and its label, as they are trained on."""
    text, numbers = setup.sizes.text, math.prod(setup.sizes.sample_shape)
    item = setup.widest.item if text is None else 8
    return numbers * item + 8.0 * (numbers if text is not None and text.per_position else 1)


def lasting(setup: Setup) -> list[Part]:
    """What lies there all the time."""
    policy, widest, sizes = setup.policy, setup.widest, setup.sizes
    cpu, one = setup.hardware.accelerator == "cpu", policy.one_download
    samples = int((np.array(sizes.train) + np.array(sizes.test))[setup.mine].sum())
    resident = setup.config.data.resident != "never"
    vector = setup.mean(p.vector + p.own for p in setup.profiles)
    one_each = setup.stored * vector * (not setup.away)
    where = f"on the {setup.config.fabric.bank}: " if setup.away else ""
    named = max(p.memory for p in setup.profiles)
    models = f"{'initial, global and next global' if one else 'initial'} model; relation and the like {in_bytes(named)}"
    data = f"{samples:,} samples" if resident else "prepared batch by batch"
    owned = f"{1 + policy.slots} of {in_bytes(vector)}" if policy.slots else in_bytes(vector)
    clients = f"{where}{setup.stored:,} of {int(setup.mine.sum()):,} clients, {owned} each"
    copies = [*["what travels is changed"] * policy.keeps_received, *["further vectors"] * (policy.exchanged > 0)]
    received = " and ".join(copies) or "they are the vectors themselves"
    state = "optimizer.keep_state" if policy.keeps_optimizer else "cleared at every visit"
    program = (PROGRAM_MIB if cpu else CONTEXT_MIB) * MIB
    frozen = sum(p.frozen for p in setup.profiles)
    kept = setup.here * widest.vector * float(setup.method.inner_products == "updates and models" and not setup.away)
    return [
        *([Part("frozen parts", float(frozen), "once for all clients")] if frozen else []),
        Part("program", program, "interpreter and libraries, a GPU's context"),
        Part("samples as read", sizes.raw * cpu, "all of them, on every rank"),
        Part("data", samples * of_sample(setup) * resident, data),
        Part("clients' vectors", one_each * (1 + policy.slots), clients),
        Part("received copies", one_each * (policy.keeps_received + policy.exchanged), received),
        Part(
            "models for the judge",
            one_each * policy.keeps_start,
            "what clients began their last round with" if policy.keeps_start else "none are kept beside the vectors",
        ),
        Part("kept optimiser state", _kept_state(setup) * (cpu or not setup.away), state),
        Part(
            "composed vectors",
            0.0 if one or setup.away else float(setup.here * widest.vector),
            "all receive one" if one else f"for {setup.here:,} clients",
        ),
        *([Part("mixed models", kept, "until the server has learned of the answers")] if kept else []),
        Part("server", policy.server_vectors * widest.vector + named, models),
    ]


def visit(setup: Setup) -> Part:
    """What the local training of a client holds, or of all that train at once."""
    config, width = setup.config, setup.width
    size, most = config.federation.batch_size, int(np.array(setup.sizes.train)[setup.mine].max())
    resident = config.data.resident != "never"
    sample, permuted = of_sample(setup), most if resident else 0  # an epoch of resident data is a permuted copy
    total = sample * (permuted or min(most, size)) + max(_steps(setup, p) for p in setup.profiles)
    if width > 1:  # of each client a permuted copy, and the next batches side by side
        total += width * sample * (min(AHEAD, math.ceil(most / size)) * min(size, most) + permuted)
    total += width * setup.widest.vector * setup.relation.measures  # where each began
    if config.federation.on_bad_client != "stop" and (setup.hardware.accelerator == "cpu" or not setup.away):
        total += width * setup.policy.keeps_clients * setup.policy.client_vectors * setup.widest.vector  # to go back to
    lent = setup.policy.client_vectors + (not setup.policy.one_download)
    total += 2 * width * setup.apart * lent * setup.widest.vector  # of this visit and of the next one
    saved, trained = max(p.saved for p in setup.profiles), setup.widest.trained
    states = in_bytes(setup.states * trained)
    how = f"saved activations {in_bytes(saved)}, gradients {in_bytes(trained)}, optimiser {states}"
    return Part("a client's visit", total, how + (f", {width} at once" if width > 1 else ""), False)


def _steps(setup: Setup, p: ModelProfile) -> float:
    """What the steps of a visit hold at once: of one client, or of all that train at once."""
    config = setup.config.optimizer
    if setup.width > 1:  # vectors, gradients, what is received, how it pulls
        stack = (4 + (config.momentum > 0)) * p.vector
        return setup.width * (stack + max(p.step, p.trained + 2 * p.vector))
    scratch = _SCRATCH[config.name] + (config.weight_decay > 0)
    return max(p.step, p.trained * (1 + scratch)) + p.trained * setup.states


def evaluation(setup: Setup) -> Part:
    """What a pass over test data holds."""
    scored = min(setup.config.evaluation.batch_size, max(setup.sizes.test))
    total = float(max(p.evaluation for p in setup.profiles))
    total += 0 if setup.config.data.resident != "never" else scored * of_sample(setup)
    return Part("evaluation", total, f"batches of {scored:,}", False)


def mixing(setup: Setup) -> Part:
    """What the server holds while it mixes models, or takes inner products."""
    n, m, ranks, widest = setup.sources, setup.receivers, setup.hardware.ranks, setup.widest
    one, sums = setup.policy.one_download, 0.0
    if ranks == 1:
        in_use = 2 * n if one else n + m
    else:  # with what is sent and what came, both twice where ranks share memory
        in_use = (6 * n if one else 5 * n + 3 * m) * tiles_at_once(n, sum(widest.tiles), ranks)
    for each in setup.products:
        by_layer, layers = setup.tiles(each.by_layer)
        tiles = sum(by_layer)
        in_use = max(in_use, each.vectors * (1 if ranks == 1 else 5 * tiles_at_once(each.vectors, tiles, ranks)))
        # By tile, what a rank gets of the layers that it adds up, and by layer.
        own = int(np.bincount(np.arange(len(by_layer)) % ranks, by_layer).max()) * (ranks > 1)
        sums = max(sums, 8 * (3 * math.ceil(tiles / ranks) + own + 3 * layers) * each.numbers)
    updates = setup.here * widest.vector * (setup.method.inner_products is not None)
    work = float(in_use * TILE * max(widest.item, 4)) + sums + updates
    return Part("mixing", work, f"{n:,} models, {TILE:,} columns at a time", False)
