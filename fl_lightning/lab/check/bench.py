"""Small runs of one method in a folder that is thrown away, and in what two of them differ."""

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


class Wrong(Exception):
    """A check fails; the text says in what, and what is mostly the reason."""


@dataclass
class Bench:
    """Where the runs of a method lie, and what they are changed from."""

    config: Config
    """Of all runs, unless a check changes it."""
    path: Path
    runs: dict[str, Path] = field(default_factory=dict)
    """Runs that several checks look at, by name."""

    @property
    def half(self) -> int:
        """The round after which a run is stopped to be continued."""
        return self.config.federation.rounds // 2

    def changed(self, components: dict[str, Any] | None = None, **groups: dict[str, Any]) -> Config:
        """The configuration with other values in its groups, and with other `components` (models,
        callbacks)."""
        values = {}
        for name, settings in groups.items():
            values[name] = replace(getattr(self.config, name), **settings)
        return replace(self.config, **values, **(components or {}))

    def failing(self, policy: str, **arguments: int) -> Config:
        """The configuration with a client that fails, and what is then to be done."""
        part = Component("fl_lightning.lab.check.parts.Failing", dict(arguments))
        callbacks = {"failing": part, **self.config.callbacks}
        return self.changed({"callbacks": callbacks}, federation={"on_bad_client": policy})

    def fit(
        self,
        name: str,
        config: Config | None = None,
        resume: bool = False,
        fresh: bool = True,
    ) -> Path:
        """Run `config` (None: as it is) in this process; gives its folder.

        With `fresh` the method's own module is imported again first, as a new process would do.

        Raises:
            Wrong: it did not run to the end.
            BadInput: the method, or the engine for it, refuses this setting.
        """
        config = config or self.config
        with self.about_to(name, config, fresh) as folder:
            engine.fit(config, folder, resume)
        return folder

    def launch(
        self,
        name: str,
        work: Callable[..., dict[str, Any]],
        config: Config,
        *arguments: Any,
    ) -> dict[str, Any]:
        """Returns what `work` returns, called on every rank with its Fabric, `config`, a folder of
        this name and `arguments`."""
        with self.about_to(name, config) as folder:
            return engine.launch(config, work, folder, *arguments)

    @contextlib.contextmanager
    def about_to(
        self,
        name: str,
        config: Config,
        fresh: bool = True,
    ) -> Iterator[Path]:
        """Make the folder of a run; the block that runs it is quiet and `explained`. `fresh`: as in
        `fit`."""
        folder = self.path / name
        folder.mkdir(exist_ok=True)
        if fresh:
            forget(config.method.class_path)
        with quiet(), self.explained(config):
            yield folder

    def in_two_parts(self, name: str, config: Config | None = None) -> Path:
        """The same run, stopped after half of its rounds, and continued as by another process."""
        config = config or self.config
        first = replace(config, federation=replace(config.federation, rounds=self.half))
        self.fit(name, first)
        return self.fit(name, config, resume=True)

    def on_two(self, jobs: dict[str, Config]) -> dict[str, Path]:
        """Runs on two processes, one after the other, by name; gives their folders. Raises as
        `fit`."""
        folders = {name: self.path / name for name in jobs}
        for folder in folders.values():
            folder.mkdir()
        work = [(config, folders[name]) for name, config in jobs.items()]
        with quiet(), self.explained(self.config):
            two = replace(self.config, fabric=replace(self.config.fabric, devices=2))
            engine.launch(two, _one_after_the_other, work)
        return folders

    @contextlib.contextmanager
    def explained(self, config: Config) -> Iterator[None]:
        """What runs within fails in words, with the line of the method's own file at which it
        was."""
        try:
            yield
        except BadInput:
            raise
        except Exception as error:
            place = _line_of(error.__cause__ or error, config.method.class_path)
            raise Wrong(f"{_message(error)}{place}") from error


def _one_after_the_other(
    fabric: Fabric, config: Config, work: list[tuple[Config, Path]]
) -> dict[str, Any]:
    """On every rank."""
    for of_run, folder in work:
        engine.fit_on_rank(fabric, of_run, folder, False)
    return {}


def forget(class_path: str) -> None:
    """Have the package of a user's own class be imported anew when it is next asked for."""
    package = class_path.partition(".")[0]
    if package != "fl_lightning":
        for name in list(sys.modules):
            if name.partition(".")[0] == package:
                del sys.modules[name]


@contextlib.contextmanager
def quiet() -> Iterator[io.StringIO]:
    """Keep what is printed within from the screen."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        yield output


def difference(run: Path, other: Path) -> str | None:
    """In what two runs differ, in words, but for seconds and memory; None: they agree to the last
    bit."""
    for table, _, row, other_row, columns in unlike(run, other):
        rounds = {**row, **other_row}
        place = f"from round {int(rounds['round'])} on" if "round" in rounds else "at the end"
        more = ", ..." if len(columns) > 3 else ""
        return f"{table}.csv differs {place} ({', '.join(columns[:3])}{more})"
    if checkpoint_digest(run) != checkpoint_digest(other):
        return "their tables agree, but not what clients and server keep"
    return None


def _message(error: Exception) -> str:
    """An error in one line; one of another process comes with its traceback, which ends with it."""
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, ProcessRaisedException):
        return lines[-1]
    reason = lines[0].partition(" (traceback in")[0]
    return reason if isinstance(error, RunFailed) else f"{type(error).__name__}: {reason}"


def _line_of(error: BaseException, class_path: str) -> str:
    """` (my_methods.py, line 12)` where the error came out of the method's own file."""
    module = sys.modules.get(class_path.rpartition(".")[0])
    file = getattr(module, "__file__", None)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    return f" ({Path(str(file)).name}, line {lines[-1]})" if lines else ""
