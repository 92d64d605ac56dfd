"""What is timed: small federations on real data, and on noise of the same shape where the data are absent."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import nn

from fl_lightning.callbacks.base import Callback
from fl_lightning.config import (
    Component,
    Config,
    DataConfig,
    EvaluationConfig,
    FabricConfig,
    FederationConfig,
    ModelConfig,
    OptimizerConfig,
)
from fl_lightning.data import FederatedData, Samples, prepare
from fl_lightning.engine.build import federation as assembled
from fl_lightning.engine.federation import Federation
from fl_lightning.engine.trainer import choose_executors, count_costs
from fl_lightning.errors import BadInput
from fl_lightning.methods.base import Method
from fl_lightning.models import build
from fl_lightning.parallel import ClientParallelStrategy
from fl_lightning.rng import key

SEED = 0


def settings(
    method: Component,
    model: Component,
    data: DataConfig,
    lr: float,
    evaluation: EvaluationConfig,
    seed: int = SEED,
    executor: Any = "loop",
    checkpoint: dict[str, Any] | None = None,
    **federation: Any,
) -> Config:
    """A run of plain SGD in one process with one thread of the CPU.

    Args:
        method: with its arguments.
        model: of all clients.
        data: likewise.
        lr: learning rate.
        evaluation: what is scored, and when.
        seed: of all draws.
        executor: how clients train.
        checkpoint: arguments of the checkpoint callback; None: none is written.
        federation: rounds, clients, and how they train.
    """
    saver = Component("fl_lightning.callbacks.checkpoint.Checkpoint", checkpoint or {})
    return Config(
        method=method,
        models=[ModelConfig(model)],
        seed=seed,
        federation=FederationConfig(**federation),
        data=data,
        optimizer=OptimizerConfig(lr=lr),
        evaluation=evaluation,
        fabric=FabricConfig(accelerator="cpu", devices=1, threads=1, executor=executor),
        callbacks={} if checkpoint is None else {"checkpoint": saver},
    )


@dataclass(frozen=True)
class Workload:
    """One federation: plain SGD, and one forward pass over a client's test data."""

    name: str
    model: Component
    data: DataConfig
    shape: tuple[int, ...]
    train_samples: int
    test_samples: int
    """`shape` and numbers of samples are those of the noise; the real data are cut to about as many."""
    batch_size: int
    clients: int = 10
    participation: float = 1.0
    local_epochs: int = 1
    lr: float = 0.01
    rounds_at_once: int = 1
    """Rounds that are timed together."""
    goal: float = 1.05

    def config(self, judge: Any = "before", executor: Any = "loop") -> Config:
        """The run, judged by one kind of model only (`auto`: by all, as a run is)."""
        evaluation = EvaluationConfig(judge=judge, models=None if judge == "auto" else [judge])
        return settings(
            Component("of the benchmark"), self.model, self.data, self.lr, evaluation, executor=executor, rounds=10**6,
            clients=self.clients, participation=self.participation, local_epochs=self.local_epochs,
            batch_size=self.batch_size,
        )  # fmt: skip

    def load(self) -> tuple[FederatedData, str]:
        """The data and what they are."""
        try:
            return prepare(self.data, self.clients, SEED), "real data"
        except BadInput:
            return self.noise(), "noise"

    def noise(self) -> FederatedData:
        """Samples of no meaning, as many for every client."""
        rng = np.random.default_rng(SEED)
        pools, shares = [], []
        for size in (self.train_samples, self.test_samples):
            raw = torch.from_numpy(rng.integers(0, 256, (size, *self.shape), dtype=np.uint8))
            labels = torch.from_numpy(rng.integers(0, 10, size))
            channels = (self.shape[0], *[1] * (len(self.shape) - 1))
            pools.append(Samples(raw, labels, torch.full(channels, 127.5), torch.full(channels, 74.0)))
            shares.append(np.array_split(np.arange(size), self.clients))
        nothing = [np.arange(0)] * self.clients
        names = [str(k) for k in range(10)]
        return FederatedData(pools[0], pools[1], (shares[0], nothing, shares[1]), names, [0.0] * self.clients)

    def initial(self, data: FederatedData) -> nn.Module:
        """A new model with the common initial weights."""
        torch.manual_seed(key(SEED, "initial model"))
        return build(self.model, data.input_shape, data.num_classes)

    def federation(
        self,
        method: Method,
        data: FederatedData,
        folder: Path,
        callbacks: Sequence[Callback] = (),
        judge: str = "before",
        executor: Any = "loop",
        counts: bool = True,
    ) -> Federation:
        """The engine's federation of this workload. It `counts` operations, as every run does."""
        config = self.config(judge, executor)
        fed = assembled(launched(), config, data, [self.initial(data)], method, callbacks, folder)
        choose_executors(fed.run, fed.worker.trainers)
        if counts:
            count_costs(fed.run, fed.worker.trainers)
        return fed


def launched() -> Fabric:
    """One CPU process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*srun.* command is available.*")
        fabric = Fabric(accelerator="cpu", devices=1, strategy=ClientParallelStrategy())
    fabric.launch()
    return fabric


def workloads(root: Path) -> dict[str, Workload]:
    """All of them by name; real data are looked for in `root`."""
    mnist = DataConfig(source="mnist", root=str(root), fraction=0.02, alpha=0.1)
    cifar = DataConfig(source="arrays", root=str(root / "cifar10_10pct.npz"), fraction=0.128, partition="iid")
    digits = DataConfig(source="digits", partition="iid")
    cnn = Component("fl_lightning.models.cnn.CNN")
    cnn10 = Workload("mnist-cnn-b10", cnn, mnist, (1, 28, 28), 1200, 200, batch_size=10)
    resnet = Workload(
        "resnet18", Component("fl_lightning.models.resnet18.ResNet18"), cifar, (3, 32, 32), 640, 128, batch_size=32
    )
    mlp = Workload(
        "100-mlps-10-a-round", Component("fl_lightning.models.mlp.MLP", {"hidden": (32,)}), digits,
        (1, 8, 8), 1437, 360, batch_size=16, clients=100, participation=0.1, local_epochs=5, lr=0.05,
        rounds_at_once=20, goal=1.3,
    )  # fmt: skip
    cnn64 = replace(cnn10, name="mnist-cnn-b64", batch_size=64)
    everyone = replace(mlp, name="100-mlps-all", participation=1.0, rounds_at_once=2)
    return {w.name: w for w in (cnn10, cnn64, resnet, mlp, everyone)}


def data_root() -> Path:
    """Where real data are looked for: FL_DATA, or `shared/data` beside the repository."""
    return Path(os.environ.get("FL_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
