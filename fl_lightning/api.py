"""For scripts and notebooks: `fit` trains, `Run` reads a run folder. Nothing heavy is imported before."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.cli import stop_ranks
from fl_lightning.cli.commands import trained
from fl_lightning.cli.settings import CommandLine, Layer, layers_of, read_config, read_line
from fl_lightning.config import check
from fl_lightning.errors import BadInput
from fl_lightning.gains.answer import Worth
from fl_lightning.results.result import RunResult as Run

__all__ = ["Run", "Worth", "fit", "worth"]

Config = Mapping[str, Any] | str | os.PathLike[str] | Iterable[str]


def fit(config: Config) -> Run:
    """Train a federation as `fl-train fit` does, in this process or in those that `fabric.devices` asks for.

    No signal handler is left behind and the interpreter goes on, whatever becomes of the run, so that it may be called
    again and again, in a notebook too. Where it starts several processes, a script keeps its own lines below
    ``if __name__ == "__main__":``.

    Args:
        config: keys and values as a config file has them, nested or with dots (``{"federation.rounds": 20}``), over the
            file or files that ``config`` names; or the path of a config file, or the name of one that is shipped; or
            flags as on the command line (``["--config=kapc_digits", "--seed=1"]``). In a mapping a class may be
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
        stop_ranks(notified=False, but=others)
        raise
    if folder is None:
        raise BadInput("print_config", True, "it is for the command line")
    return Run(folder)


def worth(config: Config, out: str | os.PathLike[str] = "worth", **keys: Any) -> Worth:
    """What each silo gains from federating: as `fl-train worth` does, in worker processes of this one.

    Args:
        config: as for `fit`.
        out: folder, new or with a part of the runs; the same call goes on where it was stopped.
        keys: the command's others: ``methods`` (names, or one text with commas), ``repeats``, ``minutes``, ``metric``,
            ``margin``, ``workers``, ....

    Returns:
        The answer: `silos` is a DataFrame with a row for each, `consortium` what holds for all.

    Raises:
        BadInput: a key or a value that cannot work.
        RunFailed: trainings failed; the same call tries them again.
    """
    from fl_lightning.cli.worth import answer

    layers, _ = _layers(config)
    own = {key: value for key, value in _plain({"out": out, **keys}).items() if value is not None}
    if isinstance(own.get("methods"), list):
        own["methods"] = ",".join(own["methods"])
    answer(CommandLine("worth", own=[own], layers=layers), ["fl_lightning.worth(...)"])
    return Worth(own["out"])


def _layers(config: Config) -> tuple[list[Layer], str | None]:
    """The settings that `config` says, and the config file that names the run."""
    if isinstance(config, str | os.PathLike):
        name = os.fspath(config)
        return read_config(name), name
    if isinstance(config, Mapping):
        given = _plain(config)
        files = given.pop("config", None) or []
        files = files if isinstance(files, list) else [files]
        layers = [layer for file in files for layer in read_config(str(file))]
        none = {key: None for key in ("callbacks", "loggers") if given.get(key, key) is None}  # a file leaves them out
        return [*layers, none, *layers_of("fit", given, Path())], str(files[0]) if files else None
    flags = [*config]
    wrong = [flag for flag in flags if not isinstance(flag, str)]
    check("config", wrong[0] if wrong else None, not wrong, "flags are text: --key=value")
    line = read_line(flags)
    return line.layers, line.first


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
        check("config", path, not inside, "it must be at the top of a module, where every process can import it")
        return path
    return value
