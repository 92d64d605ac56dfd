"""For scripts and notebooks: `fit` trains, `Run` reads a run folder as arrays. Nothing heavy is imported before."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_lightning.cli import stop_ranks
from fl_lightning.cli.commands import trained
from fl_lightning.cli.parser import fit_parser, keys
from fl_lightning.cli.settings import Layer, config_in, layers_of, read_config, read_flags
from fl_lightning.config import check
from fl_lightning.csvtable import Row
from fl_lightning.errors import BadInput
from fl_lightning.record import RelationView

if TYPE_CHECKING:
    from fl_lightning.results.read import Run as Loaded

Config = Mapping[str, Any] | str | os.PathLike[str] | Iterable[str]
Table = dict[str, np.ndarray]
"""Columns by name, each with a number for each row; nan where a row has none."""


def fit(config: Config) -> Run:
    """Train a federation as `fl-train fit` does, in this process or in those that `fabric.devices` asks for.

    No signal handler is left behind and the interpreter goes on, whatever becomes of the run, so that it may be called
    again and again, in a notebook too. Where it starts several processes, a script keeps its own lines below
    ``if __name__ == "__main__":``.

    Args:
        config: keys and values as a config file has them, nested or with dots (``{"federation.rounds": 20}``), over the
            file or files that ``config`` names; or the path of a config file, or the name of one that is shipped; or
            flags as on the command line (``["--config=kapc_digits", "--seed=1"]``). In a mapping a class may stand
            where a file has its import path, and None is null: ``{"loggers": None}`` goes without any.

    Returns:
        The finished run.

    Raises:
        BadInput: a key, a value or a class that cannot work.
        RunFailed: the run began well and could not go on; most can be continued with `resume`.
    """
    layers, first = _layers(config)
    others = multiprocessing.active_children()
    try:
        folder = trained(layers, first)
    except KeyboardInterrupt:
        stop_ranks(told=False, but=others)
        raise
    if folder is None:
        raise BadInput("print_config", True, "it is for the command line")
    return Run(folder)


class Run:
    """A run folder, finished or not, as arrays. What it has read it keeps: make another to see what came since.

    Args:
        folder: the run's, such as ``runs/kapc_digits-001``.

    Raises:
        BadInput: it holds no run.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        """Where all that it left lies."""
        from fl_lightning.results.read import load  # it brings the page's libraries with it

        self._loaded: Loaded = load([self.folder], ledger=False)[0]

    def __repr__(self) -> str:
        run, which = self._loaded, self.config.get("method") or {}
        method = which.get("name") or which.get("class_path") if isinstance(which, dict) else which
        asked = run.rounds_asked or run.rounds_done
        reached = "" if not run.finished else f", {run.metric.mean_words} {run.metric.shown(self._mean())} at the end"
        return f"<Run {self.folder}: {method}, {run.rounds_done} of {asked} rounds{reached}>"

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration, as `config.yaml` holds it."""
        return self._loaded.config

    @property
    def summary(self) -> dict[str, Any]:
        """What `summary.json` holds; empty unless the run has ended, and was not extended since."""
        return self._loaded.summary if self._loaded.finished else {}

    @cached_property
    def metrics(self) -> Table:
        """The columns of `metrics.csv`, a row for each round."""
        return _table(self._loaded.metrics)

    @cached_property
    def clients(self) -> Table:
        """The columns of `clients.csv`, a row for each client of each round."""
        return _table(self._loaded.clients)

    @cached_property
    def final(self) -> Table:
        """The columns of `final.csv`, a row for each client; none before the run has ended."""
        return _table(self._loaded.final if self._loaded.finished else [])

    @cached_property
    def split(self) -> Table:
        """The columns of `split.csv`: samples of each client, and of each class."""
        return _table(self._loaded.split)

    @cached_property
    def newcomers(self) -> Table:
        """The columns of `newcomers.csv`; none where no client was held out, or before the run has ended."""
        return _table(self._loaded.newcomers if self._loaded.finished else [])

    @property
    def final_accuracies(self) -> np.ndarray:
        """Accuracy of each client's final model, (N,), or its mean absolute error (regression); none before the end."""
        return self.final.get(self._loaded.metric.name, np.empty(0))

    @property
    def relation_rounds(self) -> list[int]:
        """The rounds whose relation is kept."""
        return self._loaded.folder.relation_rounds()

    def by_client(self, column: str) -> np.ndarray:
        """A column of `clients.csv` as (rounds, N): nan where a client took no part, or has no value.

        Raises:
            BadInput: there is no such column.
        """
        known = ", ".join(self.clients)
        check("column", column, column in self.clients, f"columns of clients.csv: {known}")
        found = np.full((self._loaded.rounds_done, self._clients()), math.nan)
        rounds, clients = (self.clients[name].astype(int) for name in ("round", "client"))
        there = rounds <= len(found)  # a round whose own row is still to come does not count
        found[rounds[there] - 1, clients[there]] = self.clients[column][there]
        return found

    def relation(self, round: int | None = None) -> RelationView:
        """Who received whom in `round` (None: the last), as it was kept: rows of the round's cohort alone.

        Raises:
            BadInput: nothing is kept of that round.
        """
        kept = self.relation_rounds
        said = f"kept: {kept[0]} to {kept[-1]}" if kept else "nothing is kept"
        wanted = round if round is not None else max(kept, default=None)
        if wanted is None or wanted not in kept:
            raise BadInput("round", round, f"there is no relation of it; {said}")
        return self._loaded.folder.read_relation(wanted)

    def cube(self, round: int | None = None) -> np.ndarray:
        """The relation cube of `round` (None: the last), float32 (N, layers, N): receiver, layer, source.

        Rows of clients that were not in the cohort are nan; who was no source has weight 0. `relation` has the layers'
        names.

        Raises:
            BadInput: nothing is kept of that round.
        """
        view, n = self.relation(round), self._clients()
        found = np.full((n, len(view.layers), n), math.nan, dtype=np.float32)
        found[view.receivers] = 0
        found[np.ix_(view.receivers, range(len(view.layers)), view.sources)] = view.rows
        return found

    def _clients(self) -> int:
        """How many took part: those that were held out have numbers of their own."""
        asked = self._loaded.setting("federation.clients")
        return len(self._loaded.split) or int(self.summary.get("clients", asked))

    def _mean(self) -> float:
        return float(self.final_accuracies.mean()) if len(self.final_accuracies) else math.nan


def _layers(config: Config) -> tuple[list[Layer], str | None]:
    """The settings that `config` says, and the config file that names the run."""
    known = keys(fit_parser())
    if isinstance(config, str | os.PathLike):
        name = os.fspath(config)
        return read_config(name, known), name
    if isinstance(config, Mapping):
        given = _plain(config)
        files = given.pop("config", None) or []
        files = files if isinstance(files, list) else [files]
        layers = [layer for file in files for layer in read_config(str(file), known)]
        none = {key: None for key in ("callbacks", "loggers") if given.get(key, key) is None}  # a file leaves them out
        return [*layers, none, *layers_of("fit", given, known, Path())], str(files[0]) if files else None
    flags = [*config]
    wrong = [flag for flag in flags if not isinstance(flag, str)]
    check("config", wrong[0] if wrong else None, not wrong, "flags are text: --key=value")
    return read_flags(flags, known), config_in(flags)


def _plain(value: Any) -> Any:
    """`value` as a config file could hold it: paths and classes as text, numpy's numbers and arrays as Python's."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(value):
        path = f"{value.__module__}.{getattr(value, '__qualname__', '<none>')}"
        inside = "<" in path or "." in getattr(value, "__qualname__", ".")
        check("config", path, not inside, "it must stand at the top of a module, where every process can import it")
        return path
    return value


def _table(rows: list[Row]) -> Table:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.array([row.get(name, math.nan) for row in rows]) for name in names}
