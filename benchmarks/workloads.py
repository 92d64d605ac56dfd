"""The federations that are timed, on real data, or on noise of the same shape without them."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from bare import BareFedAvg
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

SEED = 0
CPU = torch.device("cpu")
DATA = Path(os.environ.get("FL_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
"""Folder of real data: FL_DATA, or `shared/data` beside the repository."""


class Rounds:
    """Runs the next rounds of a federation or a hand-written loop each time it is called."""

    def __init__(
        self,
        side: Federation | BareFedAvg,
        at_once: int = 1,
    ) -> None:
        self.side = side
        self.at_once = at_once
        self.done = 0

    def __call__(self) -> None:
        for _ in range(self.at_once):
            self.done += 1
            if isinstance(self.side, BareFedAvg):
                self.side.round(self.done)
                continue
            with contextlib.redirect_stderr(io.StringIO()):  # the progress line
                self.side.notify("on_round_end", self.side.round(self.done))


@dataclass(frozen=True)
class Workload:
    """A federation that takes plain SGD steps."""

    name: str
    model: Component
    data: DataConfig
    shape: tuple[int, ...]
    train_samples: int
    test_samples: int
    """The noise has this shape and so many samples; real data are cut to about as many."""
    batch_size: int
    clients: int = 10
    participation: float = 1.0
    local_epochs: int = 1
    lr: float = 0.01
    rounds_at_once: int = 1
    goal: float = 1.05
    accelerator: str = "cpu"
    precision: Any = "32-true"

    def config(
        self,
        judge: Any = "before",
        executor: Any = "loop",
    ) -> Config:
        """Return a configuration with one thread that scores `judge` alone (`auto`: all models)."""
        federation = FederationConfig(
            rounds=10**6,
            clients=self.clients,
            participation=self.participation,
            local_epochs=self.local_epochs,
            batch_size=self.batch_size,
        )
        fabric = FabricConfig(
            self.accelerator, devices=1, threads=1, executor=executor, precision=self.precision
        )
        models = None if judge == "auto" else [judge]
        return Config(
            Component("fl_lightning.methods.fedavg.FedAvg"),
            [ModelConfig(self.model)],
            SEED,
            federation,
            self.data,
            optimizer=OptimizerConfig(lr=self.lr),
            evaluation=EvaluationConfig(judge=judge, models=models),
            fabric=fabric,
        )

    def load(self) -> tuple[FederatedData, str]:
        """Return the data, and `real data` or `noise`."""
        try:
            return prepare(self.data, self.clients, SEED), "real data"
        except BadInput:
            return self.noise(), "noise"

    def noise(self) -> FederatedData:
        clients = range(self.clients)
        train = [(self.train_samples + client) // self.clients for client in clients]
        test = [(self.test_samples + client) // self.clients for client in clients]
        return made_up(
            DataSizes(
                train,
                test,
                sample_shape=self.shape,
                classes=10,
            )
        )

    def initial(self, data: FederatedData) -> nn.Module:
        torch.manual_seed(key(SEED, "initial model"))
        return build(self.model, data.input_shape, data.num_classes)

    def bare(
        self,
        data: FederatedData,
        device: torch.device = CPU,
    ) -> BareFedAvg:
        return BareFedAvg(
            self.config(),
            data,
            self.initial(data),
            device,
        )

    def federation(
        self,
        method: Method,
        data: FederatedData,
        folder: Path = Path(),
        callbacks: Sequence[Callback] = (),
        judge: str = "before",
        executor: Any = "loop",
        together: Together | None = None,
    ) -> Federation:
        """Return the engine's federation, which counts operations as every run does."""
        config = self.config(judge, executor)
        fabric = launched(self.accelerator, self.precision)
        initial = [self.initial(data)]
        federation = assembled(
            fabric, config, data, initial, method, callbacks, folder, together=together
        )
        choose_executors(federation.run, federation.worker.trainers)
        count_costs(federation.run, federation.worker.trainers)
        return federation

    def seconds(
        self, sides: Mapping[str, Federation | BareFedAvg], pairs: int
    ) -> dict[str, list[float]]:
        """Return CPU seconds of `rounds_at_once` rounds of each side, callbacks included."""
        rounds = {name: Rounds(side, self.rounds_at_once) for name, side in sides.items()}
        return interleaved(rounds, pairs)


def launched(accelerator: str = "cpu", precision: Any = "32-true") -> Fabric:
    fabric = one_process(precision, accelerator)
    fabric.launch()
    return fabric


def workloads() -> dict[str, Workload]:
    """Return all workloads by name."""
    mnist = DataConfig(
        source="mnist",
        root=str(DATA),
        fraction=0.02,
        alpha=0.1,
    )
    images = str(DATA / "cifar10_10pct.npz")
    cifar = DataConfig(
        source="arrays",
        root=images,
        fraction=0.128,
        partition="iid",
    )
    digits = DataConfig(source="digits", partition="iid")
    cnn = Component("fl_lightning.models.cnn.CNN")
    resnet = Component("fl_lightning.models.resnet18.ResNet18")
    tiny = Component("fl_lightning.models.mlp.MLP", {"hidden": (32,)})
    cnn10 = Workload(
        "mnist-cnn-b10",
        cnn,
        mnist,
        (1, 28, 28),
        1200,
        200,
        batch_size=10,
    )
    resnet18 = Workload(
        "resnet18",
        resnet,
        cifar,
        (3, 32, 32),
        640,
        128,
        batch_size=32,
    )
    some_mlps = Workload(
        "100-mlps-10-a-round",
        tiny,
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
    all_mlps = replace(some_mlps, name="100-mlps-all", participation=1.0, rounds_at_once=2)
    return {work.name: work for work in (cnn10, cnn64, resnet18, some_mlps, all_mlps)}


def alone(function: Callable[..., Any], *args: object) -> Any:
    """Return what `function` returns in a new process with one thread."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        1,
        spawn,
        initializer=torch.set_num_threads,
        initargs=(1,),
    ) as pool:
        return pool.submit(function, *args).result()
