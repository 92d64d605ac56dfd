"""What `fit` would refuse before its first round, found out on the CPU, in one process and without
a run folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from fl_lightning.callbacks.base import in_order
from fl_lightning.configuration.components import Component, Network
from fl_lightning.configuration.config import Config
from fl_lightning.data import FederatedData, prepare
from fl_lightning.data.source import Absent
from fl_lightning.foundation.parallel import one_process
from fl_lightning.run import assemble, instantiate


def check_starts(configs: Iterable[Config]) -> None:
    """`check_start` of each, but for those that differ from another in their seed alone; equal data
    are read once."""
    data: dict[str, FederatedData | None] = {}
    first_seeds = {repr(replace(config, seed=0)): config for config in reversed(list(configs))}
    for config in first_seeds.values():
        key = repr((config.data, config.federation.clients))
        if key not in data:  # one of them at a time is kept in memory
            data = {key: data_here(config) if _is_here(config) else None}
        check_start(config, data[key])


def check_start(config: Config, data: FederatedData | None) -> None:
    """Raise `BadInput` for what `fit` would refuse before its first round, as far as this machine
    can tell.

    Callbacks and loggers are built, which asks nothing of the network. With `data`, and networks
    that are here (ours, without files), the federation is assembled and checked, too, by all but
    loggers and classes of the user's own.
    """
    callbacks = {name: instantiate(f"callbacks.{name}", c) for name, c in config.callbacks.items()}
    for name, component in config.loggers.items():
        instantiate(f"loggers.{name}", component)
    if data is None or not _is_here(config):
        return
    fabric = one_process(config.fabric.precision)
    fabric.launch()
    with tempfile.TemporaryDirectory() as folder:
        fed = assemble(
            fabric,
            config,
            Path(folder),
            in_order(callbacks.values()),
            data,
        )
        ours = [callbacks[name] for name, c in config.callbacks.items() if _is_ours(c)]
        fed.start(in_order(c for c in ours if c.stage != "show"))  # it would show a bar


def data_here(config: Config) -> FederatedData | None:
    """The data of `config`; None where they are absent: nothing is downloaded for a check."""
    here = replace(config.data, download=False)
    try:
        return prepare(
            here,
            config.federation.clients,
            config.seed,
            config.smoke,
        )
    except Absent:
        return None


def _is_here(config: Config) -> bool:
    """Whether each network is one of ours that needs no file: others may want a GPU, or what a node
    alone can reach."""
    for model in config.models:
        component = model.component
        has_file = isinstance(component, Network) and component.weights is not None
        if has_file or not _is_ours(component):
            return False
    return True


def _is_ours(component: Component) -> bool:
    return component.class_path.startswith("fl_lightning.")
