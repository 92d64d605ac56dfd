"""What is timed: small federations on real data, and on noise of the same shape where the data are
absent."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bare import STEPPERS, BareFedAvg, Stepper
from lightning.fabric import Fabric
from measure import interleaved
from torch import nn

from fl_lightning.callbacks.base import Callback
from fl_lightning.configuration.config import (
    Component,
    Config,
    DataConfig,
    EvaluationConfig,
    FabricConfig,
    FederationConfig,
    ModelConfig,
    OptimizerConfig,
)
from fl_lightning.data import FederatedData, prepare
from fl_lightning.engine.build import federation as assembled
from fl_lightning.engine.federation import Federation
from fl_lightning.engine.trainer import choose_executors, count_costs
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.parallel import one_process
from fl_lightning.foundation.rng import key
from fl_lightning.lab.planning.made_up import DataSizes, made_up
from fl_lightning.methods.base import Method
from fl_lightning.models import build
from fl_lightning.training.executors.together import Together

SEED, CPU = 0, torch.device("cpu")


class Rounds:
    """The next rounds of one side, each time it is called."""

    def __init__(self, round: Callable[[int], object], at_once: int = 1) -> None:
        self.round, self.at_once, self.done = round, at_once, 0

    def __call__(self) -> None:
        for _ in range(self.at_once):
            self.done += 1
            self.round(self.done)


def faster(seconds: Mapping[str, Sequence[float]]) -> str:
    """The name of the faster bare loop."""
    return min(STEPPERS, key=lambda stepper: median(seconds[stepper]))


@dataclass(frozen=True)
class Workload:
    """One federation: plain SGD, and one forward pass over a client's test data."""

    name: str
    model: Component
    data: DataConfig
    shape: tuple[int, ...]
    train_samples: int
    test_samples: int
    """`shape` and numbers of samples are those of the noise; the real data are cut to about as
    many."""
    batch_size: int
    clients: int = 10
    participation: float = 1.0
    local_epochs: int = 1
    lr: float = 0.01
    rounds_at_once: int = 1
    """Rounds that are timed together."""
    goal: float = 1.05
    accelerator: str = "cpu"
    precision: Any = "32-true"

    def config(self, judge: Any = "before", executor: Any = "loop") -> Config:
        """Plain SGD and one thread of the CPU, judged by one kind of model only (`auto`: by all, as
        a run is)."""
        federation = FederationConfig(
            rounds=10**6,
            clients=self.clients,
            participation=self.participation,
            local_epochs=self.local_epochs,
            batch_size=self.batch_size,
        )
        return Config(
            Component("of the benchmark"),
            [ModelConfig(self.model)],
            SEED,
            federation,
            self.data,
            optimizer=OptimizerConfig(lr=self.lr),
            evaluation=EvaluationConfig(judge=judge, models=None if judge == "auto" else [judge]),
            fabric=FabricConfig(
                self.accelerator, devices=1, threads=1, executor=executor, precision=self.precision
            ),
        )

    def load(self) -> tuple[FederatedData, str]:
        """The data and what they are."""
        try:
            return prepare(self.data, self.clients, SEED), "real data"
        except BadInput:
            return self.noise(), "noise"

    def noise(self) -> FederatedData:
        """Samples of no meaning, as many for every client."""
        sizes = [
            [(n + k) // self.clients for k in range(self.clients)]
            for n in (self.train_samples, self.test_samples)
        ]
        return made_up(DataSizes(*sizes, sample_shape=self.shape, classes=10))

    def initial(self, data: FederatedData) -> nn.Module:
        """A new model with the common initial weights."""
        torch.manual_seed(key(SEED, "initial model"))
        return build(self.model, data.input_shape, data.num_classes)

    def bare(self, data: FederatedData, stepper: Stepper, device: torch.device = CPU) -> BareFedAvg:
        """A hand-written loop that does the same work as FedAvg."""
        return BareFedAvg(self.config(), data, self.initial(data), stepper, device)

    def turns(
        self, sides: Mapping[str, Federation | Callable[[int], object]], pairs: int
    ) -> dict[str, list[float]]:
        """CPU seconds of `rounds_at_once` rounds of each side, in turns; a federation's with what
        its callbacks do."""
        rounds = {
            name: callback_round(s) if isinstance(s, Federation) else s for name, s in sides.items()
        }
        return interleaved(
            {name: Rounds(r, self.rounds_at_once) for name, r in rounds.items()}, pairs
        )

    def federation(
        self,
        method: Method,
        data: FederatedData,
        folder: Path = Path(),
        callbacks: Sequence[Callback] = (),
        judge: str = "before",
        executor: Any = "loop",
        counts: bool = True,
        together: Together | None = None,
    ) -> Federation:
        """The engine's federation of this workload. It `counts` operations, as every run does;
        `together` drives it."""
        config = self.config(judge, executor)
        fabric = launched(self.accelerator, self.precision)
        model = self.initial(data)
        fed = assembled(fabric, config, data, [model], method, callbacks, folder, together=together)
        choose_executors(fed.run, fed.worker.trainers)
        if counts:
            count_costs(fed.run, fed.worker.trainers)
        return fed


def callback_round(fed: Federation) -> Callable[[int], None]:
    """A round of the loop in `Federation.fit`, with what its callbacks do."""

    def round(t: int) -> None:
        with contextlib.redirect_stderr(io.StringIO()):  # the progress line
            fed.tell("on_round_end", fed.round(t))

    return round


def launched(accelerator: str = "cpu", precision: Any = "32-true") -> Fabric:
    """One process."""
    fabric = one_process(precision, accelerator)
    fabric.launch()
    return fabric


def workloads(root: Path) -> dict[str, Workload]:
    """All of them by name; real data are looked for in `root`."""
    mnist = DataConfig(source="mnist", root=str(root), fraction=0.02, alpha=0.1)
    cifar = DataConfig(
        source="arrays", root=str(root / "cifar10_10pct.npz"), fraction=0.128, partition="iid"
    )
    digits = DataConfig(source="digits", partition="iid")
    cnn = Component("fl_lightning.models.cnn.CNN")
    cnn10 = Workload("mnist-cnn-b10", cnn, mnist, (1, 28, 28), 1200, 200, batch_size=10)
    resnet = Workload(
        "resnet18",
        Component("fl_lightning.models.resnet18.ResNet18"),
        cifar,
        (3, 32, 32),
        640,
        128,
        batch_size=32,
    )
    mlp = Workload(
        "100-mlps-10-a-round",
        Component("fl_lightning.models.mlp.MLP", {"hidden": (32,)}),
        digits,
        (1, 8, 8),
        1437,
        360,
        batch_size=16,
        clients=100,
        participation=0.1,
        local_epochs=5,
        lr=0.05,
        rounds_at_once=20,
        goal=1.3,
    )
    cnn64 = replace(cnn10, name="mnist-cnn-b64", batch_size=64)
    everyone = replace(mlp, name="100-mlps-all", participation=1.0, rounds_at_once=2)
    return {w.name: w for w in (cnn10, cnn64, resnet, mlp, everyone)}


def data_root() -> Path:
    """Where real data are looked for: FL_DATA, or `shared/data` beside the repository."""
    return Path(os.environ.get("FL_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
