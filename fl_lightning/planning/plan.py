"""The plan of one config, and what would make it fit."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from fl_lightning.config import Component, Config
from fl_lightning.engine.joining import SAMPLES
from fl_lightning.errors import BadInput
from fl_lightning.methods.base import Method
from fl_lightning.planning.memory import Part, Setup, main_memory, memory, peak
from fl_lightning.planning.seconds import steps_of, work_of
from fl_lightning.planning.setting import DataSizes, Hardware, cohorts
from fl_lightning.planning.trace import ModelProfile, trace
from fl_lightning.planning.traffic import traffic
from fl_lightning.run import instantiate


@dataclass(frozen=True)
class Plan:
    """What a run takes, seconds aside."""

    memory: list[Part]
    total: float
    """Bytes of the busiest rank at its peak."""
    capacity: float
    ranks: int
    wire: dict[str, float]
    """Bytes between ranks in a round, over all ranks, by what they are."""
    exchanges: int
    """Of a rank in a round."""
    flops: dict[str, float]
    """Operations of a round, over all ranks, in training and evaluation of one kind of model."""
    host: float
    """Bytes of a node's main memory, over all of its processes: every one of them reads all samples."""
    newcomers: dict[str, float]
    """Operations of the clients that are held out, after the last round, at most; empty where nobody is."""

    @property
    def fits(self) -> bool:
        """Whether the peak is within the capacity."""
        return self.total <= self.capacity


@dataclass(frozen=True)
class Way:
    """A change, and the memory of the busiest rank with it."""

    change: str
    total: float
    fits: bool


WORKING = ("broadcast", "receive", "phases", "upload", "aggregate", "personal", "prepare", "outputs")
"""Hooks in which a method may do work of its own: further passes, phases or steps, on clients or on the server."""


def left_out(method: Method) -> dict[str, str]:
    """What a plan's operations leave out, by hook: what each of the method's own hooks does, in its own words.

    They count local training down the task loss, once, and evaluation. What hooks add is counted as it runs.
    """
    kind = type(method)
    own = [hook for hook in WORKING if getattr(kind, hook) is not getattr(Method, hook)]
    return {hook: (getattr(kind, hook).__doc__ or "no words").partition("\n")[0].rstrip(".") for hook in own}


def newcomers(setup: Setup) -> dict[str, float]:
    """Operations of the clients that are held out, if any: each is given a model from each number of samples, with as
    many labels as are asked for, trains all of it, and is scored (and its loss taken) before and after."""
    config, sizes = setup.config, setup.sizes
    if not config.held_out:
        return {}
    held = [(sizes.train[0], sizes.test[0])] * config.held_out
    if sizes.data is not None:
        held = [(len(who.train) + len(who.validation), len(who.test)) for who in sizes.data.held_out]
    classes = sizes.classes if sizes.task == "classification" else 1
    asked = config.evaluation.newcomer_samples or SAMPLES
    train, test = zip(*((min(count * classes, own), judged) for own, judged in held for count in asked), strict=True)
    work, rounds = work_of(config, train, test), config.evaluation.newcomer_rounds
    step, forward = (max(getattr(p.cost, k) for p in setup.profiles) for k in ("step", "forward"))
    return {"training": rounds * step * work[:, 2].sum(), "evaluation": 4 * forward * work[:, 3].sum()}


class Planner:
    """Plans of one config and its variations; a model is traced once for each way to train it."""

    def __init__(self, config: Config, sizes: DataSizes) -> None:
        self.config, self.sizes = config, sizes
        self._traced: dict[Any, ModelProfile] = {}

    def setup(self, hardware: Hardware, config: Config | None = None) -> Setup:
        """Of `config`, or of the planner's own."""
        config = config or self.config
        method: Method = instantiate("method", config.method)
        found = []
        for component in (model.component for model in config.models):
            how = config.federation.batch_size, config.evaluation.batch_size, config.fabric, config.method
            key = component.class_path, repr((component.init_args, how))
            if key not in self._traced:
                self._traced[key] = trace(component, config, method, self.sizes)
            found.append(self._traced[key])
        return Setup(config, hardware, self.sizes, found, method)

    def plan(self, hardware: Hardware, config: Config | None = None) -> Plan:
        """Of `config`, or of the planner's own."""
        setup = self.setup(hardware, config)
        parts, (wire, exchanges) = memory(setup), traffic(setup)
        total, batches = peak(parts), np.ceil(np.array(self.sizes.train) / setup.config.federation.batch_size)
        epochs = steps_of(setup.config, batches) / np.maximum(batches, 1)
        step, forward = (
            np.array([getattr(p.cost, k) for p in setup.profiles])[setup.kind] for k in ("step", "forward")
        )
        drawn = cohorts(setup.config)
        flops = {
            "training": float(np.mean([(step * self.sizes.train * epochs)[c].sum() for c in drawn])),
            "evaluation": float(np.mean([(forward * self.sizes.test)[c].sum() for c in drawn])),
        }
        ranks, host = hardware.ranks, main_memory(setup, total)
        return Plan(parts, total, hardware.capacity, ranks, wire, exchanges, flops, host, newcomers(setup))

    def ways(self, hardware: Hardware) -> list[Way]:
        """Single changes that need less memory, those that fit first, then by how much they save."""
        now = self.plan(hardware).total
        found = []
        for change, (other, new) in self._changes(hardware, now).items():
            with contextlib.suppress(BadInput):
                total = self.plan(other, new).total
                if total < 0.99 * now:
                    found.append(Way(change, total, total <= other.capacity))
        return sorted(found, key=lambda way: (not way.fits, way.total))

    def _changes(self, hardware: Hardware, now: float) -> dict[str, tuple[Hardware, Config]]:
        config, fabric = self.config, self.config.fabric
        changed: dict[str, tuple[Hardware, Config]] = {}

        def change(group: str, **values: Any) -> None:
            (name, value), *_ = values.items()
            told = str(value).lower() if isinstance(value, bool) else value
            new = replace(config, **{group: replace(getattr(config, group), **values)})
            changed[f"--{group}.{name} {told}"] = hardware, new

        for group in ("federation", "evaluation"):  # what a batch takes is in proportion to it: two traces tell
            old = getattr(config, group).batch_size
            half = replace(config, **{group: replace(getattr(config, group), batch_size=max(1, old // 2))})
            saving = max(now - self.plan(hardware, half).total, 0.0)
            share = 1 - (now - hardware.capacity) / (2 * saving) if saving else 0.0  # of the batch, that would just fit
            change(group, batch_size=max(1, old // next((k for k in (2, 4, 8, 16) if share >= 1 / k), 16)))
        more = hardware  # nodes: the ranks of one share its memory
        while more.ranks * 2 <= config.clients and not self.plan(more).fits:
            more = replace(more, nodes=2 * more.nodes)
        changed[f"--nodes {more.nodes}"] = more, config
        change("data", resident="never")
        change("fabric", precision="bf16-true")
        if fabric.bank == "memory":
            place: Literal["host", "disk"] = "disk" if hardware.accelerator == "cpu" else "host"
            change("fabric", bank=place)
        if fabric.executor != "loop":
            change("fabric", executor="loop")
        if config.optimizer.keep_state:
            change("optimizer", keep_state=False)
        fedavg = Component("fl_lightning.methods.fedavg.FedAvg")
        plain = replace(config, method=fedavg, evaluation=replace(config.evaluation, judge="auto", models=None))
        changed["--method fedavg (no model of one's own is kept)"] = hardware, plain
        return changed
