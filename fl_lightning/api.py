"""For scripts and notebooks: what the command line does, with data, models and methods of the
script itself.

`fit` trains, `study`, `compare` and `tune` are the commands of these names, `Run` reads a run
folder and predicts. Nothing heavy is imported before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import yaml

from fl_lightning.cli import stop_ranks
from fl_lightning.cli.commands import load, trained
from fl_lightning.cli.settings import (
    CommandLine,
    Layer,
    layers_of,
    read_config,
    read_line,
    values_of,
)
from fl_lightning.configuration.catalogue import nearest_first
from fl_lightning.configuration.config import check
from fl_lightning.foundation.errors import BadInput, RunFailed
from fl_lightning.foundation.log import print_anything
from fl_lightning.lab.worth.answer import Worth
from fl_lightning.results.result import RunResult

if TYPE_CHECKING:
    from pandas import DataFrame

    from fl_lightning.engine.predictor import Predictor

__all__ = ["Run", "Worth", "compare", "fit", "study", "tune", "worth"]

Config = Mapping[str, Any] | str | os.PathLike[str] | Iterable[str]
Definition = Mapping[str, Any] | str | os.PathLike[str]
TWICE = "it is given twice: here and by keyword"
BATCH = 500
"""Samples of a forward pass of `Run.predict`: `evaluation.batch_size`'s default."""


class Run(RunResult):
    """A run folder as tables (`RunResult`), and its clients' models."""

    def model(self, client: int | str, checkpoint: Literal["last", "best"] = "last") -> Predictor:
        """The model that the run leaves a client with, an `nn.Module` that takes samples as the
        data source had them.

        Args:
            client: its number, or its name where clients have names.
            checkpoint: the newest one, or the one with the best mean accuracy.

        Raises:
            BadInput: there is no such client, or no checkpoint.
        """
        check("checkpoint", checkpoint, checkpoint in ("last", "best"), "it must be last or best")
        key = self._number(client), checkpoint
        models: dict[Any, Predictor] = self.__dict__.setdefault("_models", {})
        if key not in models:
            from fl_lightning.run import predictor

            models[key] = predictor(load(self.folder), self.folder, *key)
        return models[key]

    def predict(self, client: int | str, x: Any) -> np.ndarray:
        """Names of the classes that a client's model gives raw samples, (n,); of a regression
        numbers, float (n,).

        Args:
            client: number or name.
            x: n samples as `Predictor.forward` takes them.
        """
        import torch

        model, batches = self.model(client), range(0, len(x), BATCH)
        rows = x.iloc if hasattr(x, "iloc") else x
        with torch.no_grad():
            scores = (
                torch.cat([model(rows[at : at + BATCH]) for at in batches])
                if len(x)
                else torch.zeros(0, 1)
            )
        if model.task == "regression":
            return scores[:, 0].cpu().numpy()
        return np.array(model.class_names)[
            scores[..., : len(model.class_names)].argmax(-1).cpu().numpy()
        ]

    def _number(self, client: int | str) -> int:
        if not isinstance(client, str):
            whole = isinstance(client, int | np.integer) and not isinstance(client, bool)
            check("client", client, whole, "it must be a client's number, from 0, or its name")
            return int(client)
        from fl_lightning.data.named import composed

        names, client = (
            {name: number for number, name in self.client_names.items()},
            composed(client),
        )
        allowed = (
            f"no such client; names: {nearest_first(client, names) or 'clients have none here'}"
        )
        check("client", client, client in names, allowed)
        return names[client]


def fit(
    config: Config | None = None, *, data: Any = None, model: Any = None, method: Any = None
) -> Run:
    """Train a federation as `fl-train fit` does, in this process or in those that `fabric.devices`
    asks for.

    No signal handler is left behind and the interpreter goes on, whatever becomes of the run, so
    that it may be called again and again, in a notebook too. Where it starts several processes, a
    script keeps its own lines below ``if __name__ == "__main__":``.

    Args:
        config: keys and values as a config file has them, nested or with dots
            (``{"federation.rounds": 20}``), over the file or files that ``config`` names; or the
            path of a config file, or the name of one that is shipped; or flags as on the command
            line (``["--config=kapc_digits", "--seed=1"]``). In a mapping a class, or an object of a
            method, may be where a file has its import path, and None is null: ``{"loggers": None}``
            goes without any.
        data: (x, y) or (x, y, client) arrays, a Dataset of such samples, or a LightningDataModule
            (`data.given.keep`). Clients that are named make the natural partition, unless
            ``config`` says otherwise. The data are kept beside the run, in ``OUT/given``, where a
            resumed run and other processes find them.
        model: an `nn.Module`, with whose weights every client begins (kept in ``OUT/given``); a
            class, or a name.
        method: an object of a method's class, the class, or a name.

    Returns:
        The finished run.

    Raises:
        BadInput: a key, a value or a class that cannot work.
        RunFailed: the run began well and could not go on; most can be continued with `resume`.
    """
    given = {"data": data, "model": model, "method": method}
    others = multiprocessing.active_children()
    try:
        out = config.get("out", "runs") if isinstance(config, Mapping) else "runs"
        with _given(given, Path(str(out))) as beneath:
            layers, first = _layers({} if config is None else config, beneath)
            folder = trained(layers, first)
    except KeyboardInterrupt:
        stop_ranks(but=others)
        raise
    if folder is None:
        raise BadInput("print_config", True, "it is for the command line")
    return Run(folder)


def worth(config: Config, out: str | os.PathLike[str] = "worth", **keys: Any) -> Worth:
    """What each silo gains from federating: as `fl-train worth` does, in worker processes of this
    one.

    Args:
        config: as for `fit`.
        out: folder; an existing one is continued, also after an interruption.
        keys: the command's others: ``methods`` (names, or one text with commas), ``repeats``,
            ``minutes``, ``metric``, ``margin``, ``workers``, ....

    Returns:
        The answer: `silos` is a DataFrame with a row for each, `consortium` what holds for all.

    Raises:
        BadInput: a key or a value that cannot work.
        RunFailed: trainings failed; the same call tries them again.
    """
    from fl_lightning.cli.worth import answer

    layers, _ = _layers(config, {})
    own = {key: value for key, value in _plain({"out": out, **keys}).items() if value is not None}
    if isinstance(own.get("methods"), list):
        own["methods"] = ",".join(own["methods"])
    answer(CommandLine("worth", own=[own], layers=layers), ["fl_lightning.worth(...)"])
    return Worth(own["out"])


def study(
    definition: Definition,
    out: str | os.PathLike[str],
    *,
    data: Any = None,
    model: Any = None,
    **keys: Any,
) -> DataFrame:
    """Run a study's missing runs, as `fl-train study` does, in separate processes.

    Args:
        definition: a study file, the name of a shipped one, or its content as a mapping; its
            methods may be classes or objects. Classes must be in a module that can be imported.
        out: the study's folder; an existing one is continued.
        data: as for `fit`, over the study's base.
        model: likewise.
        keys: further keys of the command: `workers`, `methods`, `seeds`, `settings`,
            `accept_changed_code`.

    Returns:
        All final scores (`results.runs.tidy`): method, setting, seed, client, model, metric, value.
        Methods and settings go by the study's labels; of a run that several rows share, by its
        folder's name.

    Raises:
        BadInput: it cannot work, before anything is written.
        RunFailed: runs have failed; the others have been run.
    """
    from fl_lightning.lab.study.folder import StudyFolder
    from fl_lightning.lab.study.grid import by_key
    from fl_lightning.results.runs import tidy, words

    _command("study", definition, out, data, model, keys)
    folder = StudyFolder(Path(out))
    rows, runs = by_key(folder.cells(), lambda cell: cell["folder"]), folder.results()
    labels = [
        rows[name][0]["label"] if len(rows[name]) == 1 else Path(name).parent.name for name in runs
    ]
    names = [
        (label, words(rows[name][0]["setting"])) for label, name in zip(labels, runs, strict=True)
    ]
    return tidy(runs.values(), names)


def tune(
    definition: Definition,
    out: str | os.PathLike[str],
    *,
    data: Any = None,
    model: Any = None,
    **keys: Any,
) -> DataFrame:
    """Search for methods' arguments on validation data as `fl-train tune` does, then run the study
    of the choices.

    Args:
        definition: as for `study`.
        out: the search's folder; the study of the choices is in its `study`.
        data: as for `fit`.
        model: likewise.
        keys: further keys of the command: `trials`, `seed`, `workers`, `untuned`, `study`,
            `accept_changed_code`.

    Returns:
        `tuned.csv`: a row for each method, with its choice and its trials' scores on validation
        data.

    Raises:
        BadInput: as `study`.
        RunFailed: as `study`.
    """
    import pandas as pd

    _command("tune", definition, out, data, model, keys)
    return pd.read_csv(Path(out) / "tuned.csv")


def compare(runs: Any, **keys: Any) -> DataFrame:
    """Methods over seeds, as `fl-train compare` has them.

    Args:
        runs: a study's folder or archive, or several runs: folders or `Run`.
        keys: further keys of the command: `baseline`, `judge`, `metric`, `target`, `clients`,
            `picture`, `accept_changed_code`.

    Returns:
        A row for each method by judge and setting, every digit kept (docs/compare.md names the
        columns; with `clients` a row for each client and method). What is said below the table is
        in `attrs["notes"]`.

    Raises:
        BadInput: as the command, and for keys of its text: `format`, `out`, `columns`, `caption`,
            `label`.
    """
    from fl_lightning.cli.compare import listing_of

    several = [runs] if isinstance(runs, str | os.PathLike | RunResult) else list(runs)
    words = [str(one.folder) if isinstance(one, RunResult) else os.fspath(one) for one in several]
    for key in ("format", "out", "columns", "caption", "label"):
        allowed = (
            "it is of the command's text: the DataFrame has all columns, and to_csv, to_latex and "
            "the like"
        )
        check(key, keys.get(key), keys.get(key) is None, allowed)
    values = values_of("compare", [{key: _plain(value)} for key, value in keys.items()])
    listing = listing_of(words, values)
    table = listing.numbers
    table.attrs["notes"] = [*listing.notes]
    return table


# ---------------------------------------------------------------- what a script hands over


@contextlib.contextmanager
def _given(given: Mapping[str, Any], out: Path) -> Iterator[Layer]:
    """The settings of data, model and method that a script hands over; bad input leaves no file of
    them."""
    from fl_lightning.data import given as own_data
    from fl_lightning.models import given as own_models

    folder = out / "given"
    layer: Layer = {}
    before = set(folder.rglob("*"))
    absent = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        if given.get("data") is not None:
            layer |= own_data.keep(given["data"], folder)[1]
        if (model := given.get("model")) is not None:
            named = isinstance(model, str | type | Mapping)
            layer |= {"model": _plain(model)} if named else own_models.keep(model, folder)[1]
        if given.get("method") is not None:
            layer["method"] = _plain(given["method"])
        yield layer
    except BadInput:
        for path in sorted({*folder.rglob("*")} - before, reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        for path in absent:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise


def _layers(config: Config, beneath: Layer) -> tuple[list[Layer], str | None]:
    """The settings of `config`, over those of what a script hands over, and the config file that
    names the run."""
    if isinstance(config, str | os.PathLike):
        name = os.fspath(config)
        return [*read_config(name), beneath], name
    if isinstance(config, Mapping):
        given = _plain(config)
        files = given.pop("config", None) or []
        files = files if isinstance(files, list) else [files]
        layers = [layer for file in files for layer in read_config(str(file))]
        for key in ("model", "method"):
            check(key, given.get(key), key not in given or key not in beneath, TWICE)
        if "base" in given:  # what a script hands over goes over it, too
            layers += layers_of("fit", {"base": given.pop("base")}, Path())
        own = layers_of("fit", given, Path())
        for key in ("source", "root"):
            value = next(
                (layer["data"][key] for layer in own if key in layer.get("data", {})), None
            )
            check(f"data.{key}", value, value is None or "data" not in beneath, TWICE)
        return [*layers, beneath, *own], str(files[0]) if files else None
    allowed = "it must be a mapping, a config file or its name, or flags"
    check("config", config, isinstance(config, Iterable), allowed)
    flags = [*config]
    wrong = [flag for flag in flags if not isinstance(flag, str)]
    check("config", wrong[0] if wrong else None, not wrong, "flags are text: --key=value")
    allowed = "with data, model or method by keyword it must be a mapping or a file"
    check("config", " ".join(flags), not beneath, allowed)
    line = read_line(flags)
    return line.layers, line.first


def _plain(value: Any) -> Any:
    """`value` as a config file could hold it: paths and classes as text, numpy's numbers and arrays
    as Python's, an object of a method's class as the class and those arguments that are no
    defaults."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        changed = {
            f.name: own[f.name]
            for f in dataclasses.fields(value)
            if f.init and own[f.name] != f.default
        }
        return {"class_path": _plain(type(value)), "init_args": _plain(changed)}
    if callable(value):
        path = f"{value.__module__}.{getattr(value, '__qualname__', '<none>')}"
        inside = "<" in path or "." in getattr(value, "__qualname__", ".")
        check(
            "config",
            path,
            not inside,
            "it must be at the top of a module, where every process can import it",
        )
        return path
    return value


# --------------------------------------------------------------- commands in processes of their own


def _command(
    name: str,
    definition: Definition,
    out: str | os.PathLike[str],
    data: Any,
    model: Any,
    keys: Mapping[str, Any],
) -> None:
    """Run `fl-train NAME` on a study, after it has been checked here.

    Its workers are forked, which a process with threads of its own, as a notebook is, must not do.
    """
    from fl_lightning.cli import studyfile
    from fl_lightning.cli.study import resolve
    from fl_lightning.lab.study.grid import Study

    with _given({"data": data, "model": model}, Path(out).parent) as over:
        content = (
            studyfile.read(os.fspath(definition))
            if not isinstance(definition, Mapping)
            else _plain(definition)
        )
        if over and isinstance(content, dict):
            base = content.get("base") or []
            content["base"] = [*(base if isinstance(base, list) else [base]), over]
        resolve(Study.of(content))
    # What a refused study has kept stays: runs of an earlier call may name it.
    words = [f"--{key}={_text(_plain(value))}" for key, value in keys.items()]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "study.yaml"
        file.write_text(
            yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8"
        )
        _run([name, str(file), f"--out={os.fspath(out)}", *words])


def _text(value: Any) -> str:
    """`value` as the command line takes it: text as it is, all else as YAML in one line."""
    if isinstance(value, str):
        return value
    return yaml.safe_dump(value, default_flow_style=True, width=float("inf")).splitlines()[0]


def _run(words: list[str]) -> None:
    """Run a command, and print what it prints; where it fails `BadInput` or `RunFailed`, with its
    last line."""
    path = os.pathsep.join(dict.fromkeys([*filter(None, sys.path), os.getcwd()]))
    line, last = [sys.executable, "-m", "fl_lightning", *words], ""
    options: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
        "bufsize": 1,
    }
    options |= {"errors": "replace"}
    print_anything()
    with subprocess.Popen(line, env=os.environ | {"PYTHONPATH": path}, **options) as process:
        try:
            for text in process.stdout or ():
                print(text, end="", flush=True)
                last = text.strip() or last
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        reason = last.removeprefix("fl-train: error: ") or f"exit code {process.returncode}"
        if process.returncode == BadInput.exit_code:
            key, _, allowed = reason.partition(": ")
            error = BadInput(key, None, allowed)
            error.args = (reason,)
            raise error
        raise RunFailed(reason)
