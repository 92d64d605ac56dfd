"""The plan of one config, and what would make it fit."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any, Literal

from fl_lightning.config import Component, Config
from fl_lightning.errors import BadInput
from fl_lightning.methods.base import Method
from fl_lightning.planning.memory import Part, Setup, main_memory, memory, peak
from fl_lightning.planning.setting import DataSizes, Hardware, cohorts
from fl_lightning.planning.trace import ModelProfile, trace

RESULT_BYTES = 1500
"""What one client's results come to when they are gathered (pickled), beside its table of bytes by layer."""


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
    host: float
    """Bytes of a node's main memory, over all of its processes: every one of them reads all samples."""

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


class Planner:
    """Plans of one config and its variations; a model is traced once for each way to train it."""

    def __init__(self, config: Config, sizes: DataSizes) -> None:
        self.config, self.sizes = config, sizes
        self._traced: dict[Any, ModelProfile] = {}

    def setup(self, hardware: Hardware, config: Config | None = None) -> Setup:
        """Of `config`, or of the planner's own."""
        config = config or self.config
        method: Method = config.method.build()
        profiles = []
        for component in (model.component for model in config.models):
            how = config.federation.batch_size, config.evaluation.batch_size, config.fabric, config.method
            key = component.class_path, repr((component.init_args, how))
            if key not in self._traced:
                self._traced[key] = trace(component, config, method, self.sizes)
            profiles.append(self._traced[key])
        return Setup(config, hardware, self.sizes, profiles, method)

    def plan(self, hardware: Hardware, config: Config | None = None) -> Plan:
        """Of `config`, or of the planner's own."""
        setup = self.setup(hardware, config)
        parts = memory(setup)
        total = peak(parts)
        host = main_memory(setup, total)
        return Plan(parts, total, hardware.capacity, hardware.ranks, traffic(setup), host)

    def ways(self, hardware: Hardware) -> list[Way]:
        """Single changes that need less memory, those that fit first, then by how much they save."""
        now = self.plan(hardware).total
        ways = []
        for change, (other, new) in self._changes(hardware, now).items():
            with contextlib.suppress(BadInput):
                total = self.plan(other, new).total
                if total < 0.99 * now:
                    ways.append(Way(change, total, total <= other.capacity))
        return sorted(ways, key=lambda way: (not way.fits, way.total))

    def _changes(self, hardware: Hardware, now: float) -> dict[str, tuple[Hardware, Config]]:
        config, fabric = self.config, self.config.fabric
        changed: dict[str, tuple[Hardware, Config]] = {}

        def change(group: str, **values: Any) -> None:
            (name, value), *_ = values.items()
            text = str(value).lower() if isinstance(value, bool) else value
            new = replace(config, **{group: replace(getattr(config, group), **values)})
            changed[f"--{group}.{name} {text}"] = hardware, new

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


def traffic(setup: Setup) -> dict[str, float]:
    """Bytes between ranks in a round, over all ranks, by what they are (core/mixing.py)."""
    n, m, ranks, widest = setup.sources, setup.receivers, setup.hardware.ranks, setup.widest
    if ranks == 1:
        return {}
    columns, away = float(widest.columns) * widest.item, 1 - 1 / ranks
    more, vectors = setup.policy.exchanged, sum(each.vectors for each in setup.products)
    bytes_by_part = {"models to the ranks of tiles": ((1 + more) * n + vectors) * columns * away}
    if setup.policy.one_download:
        bytes_by_part["the mix to every rank"] = (1 + more) * columns * (ranks - 1)
    else:
        bytes_by_part["what clients receive"] = m * columns * away
    if setup.products:  # to the layer's rank, and all to all ranks
        of = [(each.numbers, *setup.tiles(each.by_layer)) for each in setup.products]
        sums = (numbers * (sum(tiles) * away + 2 * layers * (ranks - 1)) for numbers, tiles, layers in of)
        bytes_by_part["inner products"] = 8 * sum(sums)
    bytes_by_part["results"] = len(cohorts(setup.config)[0]) * (RESULT_BYTES + 66.0 * (widest.layers + 1)) * (ranks - 1)
    return bytes_by_part
