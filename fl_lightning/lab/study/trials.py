"""The trials of one method: optuna asks for them, a journal keeps them, which processes and
machines may share.

Every process asks and tells on its own; there is no server. A trial belongs to the process that
holds its lock. One whose process is gone is continued from its runs, and none that has ended is run
again.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, Trial, TrialState

from fl_lightning.configuration.search import Choice, LogRange, Whole
from fl_lightning.foundation.files import Taken, make_folder, take_lock
from fl_lightning.foundation.rng import key
from fl_lightning.lab.study.folder import reading
from fl_lightning.lab.study.grid import place
from fl_lightning.lab.study.space import Dimension

optuna.logging.set_verbosity(optuna.logging.WARNING)

RANDOM = 10
"""Trials that are drawn at random before the sampler goes by scores: optuna's default."""
WHY = "why"
"""The attribute of a refused trial that says why."""


@dataclass(frozen=True)
class EndedTrial:
    """A trial that has ended."""

    number: int
    values: dict[str, Any]
    """By key, as its runs had them."""
    score: float | None
    """Greater is better; None: the method refused the values, failed with them, or came to no
    number."""
    why: str = ""


class ClaimedTrial:
    """A trial that is this process's own until it is told or let go."""

    def __init__(
        self,
        trials: Trials,
        trial: Trial,
        lock: IO[str],
    ) -> None:
        self._study, self._trial, self._lock = trials.study, trial, lock
        self.number: int = trial.number
        self.folder = trials.folder_of(trial.number)
        self.values: dict[str, Any] = {}
        try:
            for dimension in trials.dimensions:
                value = trials.suggested(trial, dimension)
                self.values[dimension.key] = _rounded(dimension, value)
        except BaseException:  # Ctrl-C
            lock.close()
            raise

    def tell(self, score: float) -> None:
        """Record its score; a trial whose score is no number is refused."""
        if math.isnan(score):
            self.refuse("its score is no number")
        else:
            self._study.tell(self._trial, score)

    def refuse(self, why: str) -> None:
        """Record as pruned, and `why`, a trial whose values cannot work: the sampler counts it
        among the worst."""
        self._trial.set_user_attr(WHY, why)
        self._study.tell(self._trial, state=TrialState.PRUNED)

    def let_go(self) -> None:
        """Others may take it up, unless it was told."""
        self._lock.close()


class Trials:
    """The trials of one method.

    Args:
        folder: of the whole search; `journal.log` lies there.
        label: the method's, within the study.
        dimensions: what is searched; the first trial has their starts.
        number: how many trials, those that fail among them.
        seed: of the sampler. What trial k asks for depends on the seed, the label, k, the argument,
            and the trials that have ended.
    """

    def __init__(
        self,
        folder: Path,
        label: str,
        dimensions: Sequence[Dimension],
        number: int,
        seed: int,
    ) -> None:
        self.folder, self.label, self.dimensions = (
            folder,
            label,
            list(dimensions),
        )
        self.number, self.seed = number, seed

    @cached_property
    def study(self) -> optuna.Study:
        """What the journal holds of it, begun where it holds nothing; `BadInput` where it is
        damaged."""
        make_folder(self.folder)
        journal = self.folder / "journal.log"
        with self._reading():
            backend = JournalFileBackend(str(journal), lock_obj=_Lock(journal))
            return optuna.create_study(
                storage=JournalStorage(backend),
                study_name=self.label,
                direction="maximize",
                load_if_exists=True,
            )

    def folder_of(self, number: int) -> Path:
        """Where the runs of a trial are."""
        return self.folder / place(self.label) / f"trial-{number:03d}"

    def claim(self) -> ClaimedTrial | None:
        """A trial that nobody works on, begun before or new; None where all have ended or are
        others'."""
        make_folder(self.folder / place(self.label))
        with _alone(self.folder / "claim.lock"):
            trials = self.study.get_trials(deepcopy=False)
            begun = [trial for trial in trials if trial.state != TrialState.WAITING]
            for trial in begun:
                lock = self._locked(trial.number) if trial.state == TrialState.RUNNING else None
                if lock is not None:
                    return ClaimedTrial(self, Trial(self.study, trial._trial_id), lock)
            if len(begun) >= self.number:
                return None
            if not trials:
                starts = {dimension.key: dimension.start for dimension in self.dimensions}
                self.study.enqueue_trial(starts)
            new = self.study.ask()
            lock = self._locked(new.number)
            assert lock is not None, "nobody has known of it before"
            return ClaimedTrial(self, new, lock)

    def ended(self) -> list[EndedTrial]:
        """The trials that have ended, in order; `BadInput` where the journal is damaged."""
        with self._reading():
            trials = self.study.get_trials(deepcopy=False)
            return [self._ended(trial) for trial in trials if trial.state.is_finished()]

    def _reading(self) -> AbstractContextManager[None]:
        """Raise `BadInput` inside where optuna meets a line of the journal that it has not
        written."""
        problem = f"{self.folder / 'journal.log'} is damaged"
        advice = "restore it, or give this search another --out"
        return reading("out", str(self.folder.parent), problem, advice)

    def _ended(self, trial: FrozenTrial) -> EndedTrial:
        values = {d.key: _rounded(d, trial.params[d.key]) for d in self.dimensions}
        return EndedTrial(
            trial.number,
            values,
            trial.value,
            str(trial.user_attrs.get(WHY, "")),
        )

    def _locked(self, number: int) -> IO[str] | None:
        folder = self.folder_of(number)
        with contextlib.suppress(Taken):
            return take_lock(folder.with_name(f"{folder.name}.lock"))
        return None

    def suggested(self, trial: Trial, dimension: Dimension) -> Any:
        """The trial's value for a dimension, drawn now where it has none.

        It is drawn by a sampler of its own, which replaces the study's: the value does not depend
        on what has been drawn in this process, or before a kill. For a key that all methods have
        (the learning rate) all methods draw the same value while draws are random, in the first
        `RANDOM` trials: else with few trials the luck of the draw is taken for a difference of
        methods.
        """
        name, space = dimension.key, dimension.space
        whose = f"{self.label} " if name.startswith("method.") else ""
        seed = key(self.seed, f"{whose}{name}", trial.number) % 2**32
        self.study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=RANDOM)
        if isinstance(space, Choice):
            return trial.suggest_categorical(name, space.values)
        if isinstance(space, Whole):
            return trial.suggest_int(name, space.low, space.high)
        return trial.suggest_float(name, space.low, space.high, log=isinstance(space, LogRange))


def best(ended: Sequence[EndedTrial]) -> EndedTrial | None:
    """The trial with the greatest score, the first of equals; None where all have failed."""
    scored = [(trial.score, -trial.number, trial) for trial in ended if trial.score is not None]
    return max(scored)[2] if scored else None


def _rounded(dimension: Dimension, value: Any) -> Any:
    """`value` with three digits, which is more than a search can tell; the start stays as it is."""
    is_drawn = isinstance(value, float) and value != dimension.start
    return float(f"{value:.3g}") if is_drawn else value


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait until this process alone is in the block. A process that is gone, however it went, is in
    it no longer."""
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _Lock(JournalFileOpenLock):
    """That of the journal's writers. Optuna's own locks are files that a killed process leaves
    behind."""

    def __init__(self, journal: Path) -> None:
        super().__init__(str(journal))
        self._journal = journal
        self._inside = contextlib.ExitStack()

    def acquire(self) -> bool:
        """Wait for it, and take off the journal what a killed process has written of a line."""
        self._inside.enter_context(_alone(self._journal.with_suffix(".lock")))
        with self._journal.open("r+b") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)
        return True

    def release(self) -> None:
        """Let the next one write."""
        self._inside.close()
