"""Short runs of the checked method in a temporary folder, and the comparison of two runs."""

from __future__ import annotations

import contextlib
import io
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric
from torch.multiprocessing.spawn import ProcessRaisedException

from fl_lightning import run as engine
from fl_lightning.configuration.config import Component, Config
from fl_lightning.foundation.errors import BadInput, RunFailed
from fl_lightning.lab.study.archive import checkpoint_digest
from fl_lightning.sites.rehearsal import unlike


class CheckFailed(Exception):
    """A check has failed; the text says what is wrong and the usual reason."""


@dataclass
class Bench:
    """The folder and the base config of the runs that check a method; trains runs with variants of
    this config."""

    config: Config
    """The base config of all runs."""
    path: Path
    runs: dict[str, Path] = field(default_factory=dict)
    """Folders of runs that several checks use, by name."""

    @property
    def half(self) -> int:
        """The number of rounds after which a run is stopped, to be resumed."""
        return self.config.federation.rounds // 2

    def with_settings(
        self, components: dict[str, Any] | None = None, **groups: dict[str, Any]
    ) -> Config:
        """The base config with some settings replaced.

        Args:
            components: new values of `models` or `callbacks`.
            groups: new values within a group of settings: `federation={"rounds": 2}`.
        """
        values = {}
        for name, settings in groups.items():
            values[name] = replace(getattr(self.config, name), **settings)
        return replace(self.config, **values, **(components or {}))

    def with_failing_client(self, policy: str, **arguments: int) -> Config:
        """The base config with a client whose upload fails.

        Args:
            policy: `federation.on_bad_client`.
            arguments: round, client and number of failures: those of `parts.Failing`.
        """
        failing = Component("fl_lightning.lab.check.parts.Failing", dict(arguments))
        callbacks = {"failing": failing, **self.config.callbacks}
        return self.with_settings({"callbacks": callbacks}, federation={"on_bad_client": policy})

    def fit(
        self,
        name: str,
        config: Config | None = None,
        resume: bool = False,
        fresh: bool = True,
    ) -> Path:
        """Train a run in this process, and return its folder.

        Args:
            name: name of the run's folder.
            config: None: the base config.
            resume: whether to resume the run in the folder.
            fresh: whether to import the method's module again first, as a new process would.

        Raises:
            CheckFailed: the run failed.
            BadInput: the method, or the engine for it, refuses this config.
        """
        config = config or self.config
        with self.new_run(name, config, fresh) as folder:
            engine.fit(config, folder, resume)
        return folder

    def run_on_ranks(
        self,
        name: str,
        work: Callable[..., dict[str, Any]],
        config: Config,
        *arguments: Any,
    ) -> dict[str, Any]:
        """Calls `work(fabric, config, folder, *arguments)` on every rank, with a new folder `name`;
        returns the result of rank 0."""
        with self.new_run(name, config) as folder:
            return engine.launch(config, work, folder, *arguments)

    @contextlib.contextmanager
    def new_run(
        self,
        name: str,
        config: Config,
        fresh: bool = True,
    ) -> Iterator[Path]:
        """Context manager: yield the folder of a run; while the context lasts, output is discarded
        and errors become `CheckFailed`.

        Args:
            name: name of the folder, which is made if it does not exist.
            config: the run's config.
            fresh: whether to import the method's module again first, as a new process would.
        """
        folder = self.path / name
        folder.mkdir(exist_ok=True)
        if fresh:
            unload_package(config.method.class_path)
        with quiet(), self.explaining_errors(config):
            yield folder

    def fit_in_two_parts(self, name: str, config: Config | None = None) -> Path:
        """Train a run for half of its rounds, resume it with the method's module imported again,
        and return its folder."""
        config = config or self.config
        first_half = replace(config, federation=replace(config.federation, rounds=self.half))
        self.fit(name, first_half)
        return self.fit(name, config, resume=True)

    def fit_on_two_ranks(self, jobs: dict[str, Config]) -> dict[str, Path]:
        """Train the configs `jobs`, by name, one after the other on two processes; return the run
        folders by name. Raises as `fit`."""
        folders = {name: self.path / name for name in jobs}
        for folder in folders.values():
            folder.mkdir()
        work = [(config, folders[name]) for name, config in jobs.items()]
        with quiet(), self.explaining_errors(self.config):
            two = replace(self.config, fabric=replace(self.config.fabric, devices=2))
            engine.launch(two, _one_after_the_other, work)
        return folders

    @contextlib.contextmanager
    def explaining_errors(self, config: Config) -> Iterator[None]:
        """Context manager: turn an error inside, except `BadInput`, into `CheckFailed` with the
        error's text and the line in the method's file."""
        try:
            yield
        except BadInput:
            raise
        except Exception as error:
            place = _line_of(error.__cause__ or error, config.method.class_path)
            raise CheckFailed(f"{_message(error)}{place}") from error


def _one_after_the_other(
    fabric: Fabric, config: Config, work: list[tuple[Config, Path]]
) -> dict[str, Any]:
    """Train runs on every rank, one after the other."""
    for of_run, folder in work:
        engine.fit_on_rank(fabric, of_run, folder, False)
    return {}


def unload_package(class_path: str) -> None:
    """Remove the package of a user's class from `sys.modules`, so that the next import reads its
    files again."""
    package = class_path.partition(".")[0]
    if package != "fl_lightning":
        for name in list(sys.modules):
            if name.partition(".")[0] == package:
                del sys.modules[name]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Context manager: discard all output to stdout and stderr."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        yield


def difference(run: Path, other: Path) -> str | None:
    """The first difference between two runs, as text; None if they are bit-identical. Seconds and
    memory are not compared."""
    for table, _, row, other_row, columns in unlike(run, other):
        rounds = {**row, **other_row}
        place = f"from round {int(rounds['round'])} on" if "round" in rounds else "at the end"
        dots = ", ..." if len(columns) > 3 else ""
        return f"{table}.csv differs {place} ({', '.join(columns[:3])}{dots})"
    if checkpoint_digest(run) != checkpoint_digest(other):
        return "their tables agree, but not what clients and server keep"
    return None


def _message(error: Exception) -> str:
    """The error's text in one line. The text of an error from another process is a traceback, whose
    last line is the error."""
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, ProcessRaisedException):
        return lines[-1]
    reason = lines[0].partition(" (traceback in")[0]
    return reason if isinstance(error, RunFailed) else f"{type(error).__name__}: {reason}"


def _line_of(error: BaseException, class_path: str) -> str:
    """The last line of the method's file in the error's traceback, ` (my_methods.py, line 12)`;
    empty if there is none."""
    module = sys.modules.get(class_path.rpartition(".")[0])
    file = getattr(module, "__file__", None)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    return f" ({Path(str(file)).name}, line {lines[-1]})" if lines else ""
