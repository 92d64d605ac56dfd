"""Drives several runs in one process: each run pauses when it has jobs to train or to score, and
the jobs of all runs go through the same stacked passes.

Each run is a greenlet, a call stack that pauses only where it chooses to. So the engine's rounds
remain ordinary functions, and an error ends only its own run (docs/decisions/0028).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from greenlet import getcurrent, greenlet

from fl_lightning.core import Fit
from fl_lightning.training.executors.base import Executor, LocalJob, Scored, ScoreJob
from fl_lightning.training.executors.vmap import Vmap

Work = Callable[[], Any]
"""A function that carries out a whole run."""


@dataclass
class _RunRequest:
    """A run's request to train or to score jobs."""

    executor: Vmap
    action: Literal["train", "score"]
    jobs: Sequence[Any]

    def answer(self, jobs: Sequence[Any] | None = None) -> list[Any]:
        """Train or score `jobs` (None: those of the request); returns the results."""
        if jobs is None:
            jobs = self.jobs
        if self.action == "train":
            return self.executor.train(jobs)
        return self.executor.score(jobs)


class Together:
    """Scheduler of several runs in one process: it collects the jobs of paused runs, and trains or
    scores them together.

    Between two pauses only one run is active. Settings of the process, such as the number of
    threads and determinism, must be the same for all runs; the gradient mode is restored after each
    pause.
    """

    def __init__(self) -> None:
        self._hub = getcurrent()
        self._executors: dict[Hashable, Vmap] = {}
        self._requests: dict[greenlet, _RunRequest] = {}

    def executor(self, key: Hashable, make: Callable[[], Vmap]) -> Vmap:
        """Return the executor shared by all runs with this `key`; the first request makes it."""
        if key not in self._executors:
            self._executors[key] = make()
        return self._executors[key]

    def wait(self, request: _RunRequest) -> list[Any]:
        """Pause the run that calls this until its request is answered; returns the results, or
        raises the error of its jobs."""
        if getcurrent() is self._hub:  # not called from a run that `drive` has started
            return request.answer()
        self._requests[getcurrent()] = request
        graded = torch.is_grad_enabled()
        try:
            results: list[Any] = self._hub.switch()
        finally:
            torch.set_grad_enabled(graded)
        return results

    def drive(self, more: Callable[[bool], tuple[Any, Work] | None]) -> Iterator[tuple[Any, Any]]:
        """Carry out several runs together; yields the name and the result of each when it ends. An
        exception that a run does not catch (Ctrl-C) ends all of them.

        Args:
            more: called as more(idle) before each turn; returns the name and the work of a run to
                begin, and is then called again, or None to begin no further run in this turn.
                `idle` is True if no run is active; if it then returns None, all work is done.
        """
        live: dict[greenlet, Any] = {}
        try:
            while True:
                while (work := more(not live)) is not None:
                    run = greenlet(work[1], self._hub)
                    live[run] = work[0]
                    yield from self._advance(live, {run: ()})
                if not live:
                    return
                yield from self._advance(live, self._answers())
        finally:
            for run in live:
                self._requests.pop(run, None)
            for run in list(live):
                if not run.dead:
                    _ended(run)

    def _advance(
        self, live: dict[greenlet, Any], answers: dict[greenlet, Any]
    ) -> Iterator[tuple[Any, Any]]:
        """Resume runs with the answers to their requests until they pause again; yields the name
        and the result of each run that ends."""
        for run, answer in answers.items():
            graded = torch.is_grad_enabled()
            try:
                if isinstance(answer, Exception):
                    result = run.throw(answer)
                elif answer == ():  # the run has not begun
                    result = run.switch()
                else:
                    result = run.switch(answer)
            finally:
                torch.set_grad_enabled(graded)
            if run.dead:
                yield live.pop(run), result

    def _answers(self) -> dict[greenlet, Any]:
        """Answer the requests of paused runs: those to score first, so that as many runs as
        possible train together."""
        requests = self._requests
        waiting = {run: r for run, r in requests.items() if r.action == "score"} or requests
        of_executor: dict[Vmap, dict[greenlet, _RunRequest]] = {}
        for run, request in waiting.items():
            of_executor.setdefault(request.executor, {})[run] = request
        answers: dict[greenlet, Any] = {}
        for group in of_executor.values():
            try:
                jobs = [job for request in group.values() for job in request.jobs]
                results = iter(next(iter(group.values())).answer(jobs))
                for run, request in group.items():
                    answers[run] = [next(results) for _ in request.jobs]
            except Exception:  # answer each by itself, so that only the one at fault fails
                for run, request in group.items():
                    try:
                        answers[run] = request.answer()
                    except Exception as error:
                        answers[run] = error
        for run in answers:
            del self._requests[run]
        return answers


def _ended(run: greenlet) -> None:
    """End a paused run by a KeyboardInterrupt, so that it closes its files."""
    with contextlib.suppress(BaseException):  # go on to end the other runs
        run.throw(KeyboardInterrupt)


class Shared(Executor):
    """An executor that several runs share: a call pauses its run until the requests of all runs are
    answered together."""

    name = "vmap"

    def __init__(self, executor: Vmap, together: Together) -> None:
        super().__init__(executor.fabric, executor.module, executor.optimizer)
        self.executor = executor
        self.together = together
        self.at_once = executor.at_once
        self.can_train = executor.can_train  # type: ignore[method-assign]
        self.can_score = executor.can_score  # type: ignore[method-assign]

    def train(self, jobs: Sequence[LocalJob]) -> list[Fit]:
        """Train the jobs together with those of all paused runs."""
        return self.together.wait(_RunRequest(self.executor, "train", jobs))

    def score(self, jobs: Sequence[ScoreJob]) -> list[Scored]:
        """Score the models together with those of all paused runs."""
        return self.together.wait(_RunRequest(self.executor, "score", jobs))
