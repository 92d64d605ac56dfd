"""The checks that `fit` makes before its first round, on the CPU, in one process and without a run
folder."""

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
    """Run `check_start` on all configs; of configs that differ only in their seed, on one. Equal
    data are read once."""
    data: dict[str, FederatedData | None] = {}
    first_seeds = {repr(replace(config, seed=0)): config for config in reversed(list(configs))}
    for config in first_seeds.values():
        key = repr((config.data, config.federation.clients))
        if key not in data:  # keep one data set in memory at a time
            data = {key: data_here(config) if _has_local_models(config) else None}
        check_start(config, data[key])


def check_start(config: Config, data: FederatedData | None) -> None:
    """Raise `BadInput` where `fit` would do so before its first round.

    Callbacks and loggers are constructed, without network access. If `data` is given and all
    networks are this package's and need no file, the federation is put together and checked as
    well, except for loggers and the user's own classes.

    Args:
        data: the data of `config`; None if they are not on this machine.
    """
    callbacks = {name: instantiate(f"callbacks.{name}", c) for name, c in config.callbacks.items()}
    for name, component in config.loggers.items():
        instantiate(f"loggers.{name}", component)
    if data is None or not _has_local_models(config):
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
    """Returns the data of `config` if they are on this machine, else None; downloads nothing."""
    try:
        return prepare(
            replace(config.data, download=False),
            config.federation.clients,
            config.seed,
            config.smoke,
        )
    except Absent:
        return None


def _has_local_models(config: Config) -> bool:
    """Whether all networks are this package's and need no file. Other networks may need a GPU, or
    files that only a compute node can read."""
    for model in config.models:
        component = model.component
        has_file = isinstance(component, Network) and component.weights is not None
        if has_file or not _is_ours(component):
            return False
    return True


def _is_ours(component: Component) -> bool:
    return component.class_path.startswith("fl_lightning.")
