"""The trials of one method's search. Optuna proposes values, and a journal file keeps the trials,
which several processes and machines may share.

There is no server: each process reads and writes the journal itself. A trial belongs to the process
that holds its lock. A trial whose process has died is continued from its runs; a trial that has
ended is not run again.
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
from fl_lightning.lab.study.folder import explaining_damage
from fl_lightning.lab.study.grid import label_folder
from fl_lightning.lab.study.space import Dimension

optuna.logging.set_verbosity(optuna.logging.WARNING)

RANDOM = 10
"""Trials that are drawn at random before the sampler uses scores: optuna's default."""
WHY = "why"
"""Attribute of a refused trial that holds the reason."""


@dataclass(frozen=True)
class EndedTrial:
    """A trial that has ended."""

    number: int
    values: dict[str, Any]
    """Hyperparameters by config key, as its runs had them."""
    score: float | None
    """The score, greater is better; None if the method refused the values, failed with them, or
    scored NaN."""
    why: str = ""
    """Reason of a trial without a score."""


class ClaimedTrial:
    """A trial that this process works on until it records a result or releases the trial."""

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
                value = trials.suggest(trial, dimension)
                self.values[dimension.key] = _rounded(dimension, value)
        except BaseException:  # Ctrl-C
            lock.close()
            raise

    def tell(self, score: float) -> None:
        """Record the score, greater is better, and end the trial; NaN is recorded as a refusal
        (`refuse`)."""
        if math.isnan(score):
            self.refuse("its score is no number")
        else:
            self._study.tell(self._trial, score)

    def refuse(self, why: str) -> None:
        """Record that the values cannot work, and why. Optuna counts the trial as pruned, among the
        worst."""
        self._trial.set_user_attr(WHY, why)
        self._study.tell(self._trial, state=TrialState.PRUNED)

    def release(self) -> None:
        """Release the lock; a trial without a result can then be claimed by other processes."""
        self._lock.close()


@dataclass
class Trials:
    """The trials of one method.

    A hyperparameter's value in a trial depends on the sampler's seed, the method's label, the
    hyperparameter's config key, the trial's number, and the trials that have ended (`suggest`).
    """

    folder: Path
    """Folder of the search of all methods; `journal.log` lies there."""
    label: str
    """The method's label in the study."""
    dimensions: Sequence[Dimension]
    """The hyperparameters; the first trial has their start values."""
    number: int
    """Number of trials, including those that fail."""
    seed: int
    """Seed of the sampler."""

    @cached_property
    def study(self) -> optuna.Study:
        """The optuna study of the journal, created if the journal has none. Raises `BadInput` if
        the journal is damaged."""
        make_folder(self.folder)
        journal = self.folder / "journal.log"
        with self._explaining_damage():
            backend = JournalFileBackend(str(journal), lock_obj=_Lock(journal))
            return optuna.create_study(
                storage=JournalStorage(backend),
                study_name=self.label,
                direction="maximize",
                load_if_exists=True,
            )

    def folder_of(self, number: int) -> Path:
        """The folder of a trial's runs."""
        return self.folder / label_folder(self.label) / f"trial-{number:03d}"

    def claim(self) -> ClaimedTrial | None:
        """Claim a trial that no process works on, begun or new; None if all trials have ended or
        are claimed."""
        make_folder(self.folder / label_folder(self.label))
        with _exclusive(self.folder / "claim.lock"):
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
        """The trials that have ended, in order. Raises `BadInput` if the journal is damaged."""
        with self._explaining_damage():
            trials = self.study.get_trials(deepcopy=False)
            return [self._ended(trial) for trial in trials if trial.state.is_finished()]

    def _explaining_damage(self) -> AbstractContextManager[None]:
        """Context manager: raise `BadInput` if optuna meets a damaged line of the journal
        inside."""
        problem = f"{self.folder / 'journal.log'} is damaged"
        advice = "restore it, or give this search another --out"
        return explaining_damage("out", str(self.folder.parent), problem, advice)

    def _ended(self, trial: FrozenTrial) -> EndedTrial:
        values = {d.key: _rounded(d, trial.params[d.key]) for d in self.dimensions}
        return EndedTrial(
            trial.number,
            values,
            trial.value,
            str(trial.user_attrs.get(WHY, "")),
        )

    def _locked(self, number: int) -> IO[str] | None:
        """Take the lock of a trial; None if another process has it."""
        folder = self.folder_of(number)
        with contextlib.suppress(Taken):
            return take_lock(folder.with_name(f"{folder.name}.lock"))
        return None

    def suggest(self, trial: Trial, dimension: Dimension) -> Any:
        """The trial's value of a hyperparameter, drawn if it has none.

        The value is drawn by a new sampler with a seed of its own, so that it does not depend on
        earlier draws of this process. For a key that all methods share (the learning rate), all
        methods draw the same values in the first `RANDOM` trials; otherwise, with few trials, the
        luck of the draw would look like a difference between methods.
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
    """The trial with the greatest score, the first of equals; None if none has a score."""
    scored = [(trial.score, -trial.number, trial) for trial in ended if trial.score is not None]
    return max(scored)[2] if scored else None


def _rounded(dimension: Dimension, value: Any) -> Any:
    """Round a drawn value to three digits, which is finer than a search resolves; return the start
    value and values that are no floats unchanged."""
    is_drawn = isinstance(value, float) and value != dimension.start
    return float(f"{value:.3g}") if is_drawn else value


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Context manager: wait until no other process is inside. The lock of a process that died is
    free."""
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _Lock(JournalFileOpenLock):
    """Lock of the journal's writers. A lock of optuna's is a file, which stays after its process
    was killed."""

    def __init__(self, journal: Path) -> None:
        super().__init__(str(journal))
        self._journal = journal
        self._inside = contextlib.ExitStack()

    def acquire(self) -> bool:
        """Wait for the lock, and remove an incomplete last line, which a killed process has
        left."""
        self._inside.enter_context(_exclusive(self._journal.with_suffix(".lock")))
        with self._journal.open("r+b") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)
        return True

    def release(self) -> None:
        """Release the lock."""
        self._inside.close()
