"""Runs of one process that train together: each stops where it has jobs to train or to score, and
the jobs of all runs go through the same passes.

Every run is a greenlet: a call stack of its own that only stops where it says so. So the engine's
rounds stay plain functions, and a run's failures stay its own (docs/decisions/0028).
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
"""A run from start to end."""


@dataclass
class _RunRequest:
    """Jobs that a run has an executor train or score."""

    executor: Vmap
    action: Literal["train", "score"]
    jobs: Sequence[Any]

    def answer(self, jobs: Sequence[Any] | None = None) -> list[Any]:
        """The results of its own jobs, or of other `jobs` of its kind."""
        if jobs is None:
            jobs = self.jobs
        if self.action == "train":
            return self.executor.train(jobs)
        return self.executor.score(jobs)


class Together:
    """Drives several runs, and pools what they train and score.

    Between two stops a run has the process to itself. What is global to the process must be the
    same for all of them (number of threads, determinism); the gradient mode is put back at every
    stop.
    """

    def __init__(self) -> None:
        self._hub = getcurrent()
        self._executors: dict[Hashable, Vmap] = {}
        self._requests: dict[greenlet, _RunRequest] = {}

    def executor(self, key: Hashable, make: Callable[[], Vmap]) -> Vmap:
        """The executor for all models of this `key`, made by the first run that asks for it."""
        if key not in self._executors:
            self._executors[key] = make()
        return self._executors[key]

    def wait(self, request: _RunRequest) -> list[Any]:
        """Stop the run that calls this until its request is answered; raises the error of its
        jobs."""
        if getcurrent() is self._hub:  # no run is being driven
            return request.answer()
        self._requests[getcurrent()] = request
        graded = torch.is_grad_enabled()
        try:
            results: list[Any] = self._hub.switch()
        finally:
            torch.set_grad_enabled(graded)
        return results

    def drive(self, more: Callable[[bool], tuple[Any, Work] | None]) -> Iterator[tuple[Any, Any]]:
        """Run works, as many at a time as `more` gives; yields the name and the result of each as
        it ends.

        Args:
            more: called with whether all works so far have ended; returns the next (name, work).
                None: there is none now or, if all have ended, none at all.

        An exception that a work does not catch (Ctrl-C) ends all of them.
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
        """Let runs go on with their answers, up to where they stop next."""
        for run, answer in answers.items():
            graded = torch.is_grad_enabled()
            try:
                if isinstance(answer, Exception):
                    result = run.throw(answer)
                elif answer == ():  # it has not begun
                    result = run.switch()
                else:
                    result = run.switch(answer)
            finally:
                torch.set_grad_enabled(graded)
            if run.dead:
                yield live.pop(run), result

    def _answers(self) -> dict[greenlet, Any]:
        """Answer the runs that wait: scores first, so that as many as possible train at the same
        time."""
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
            except Exception:  # alone, each shows whether it is at fault
                for run, request in group.items():
                    try:
                        answers[run] = request.answer()
                    except Exception as error:
                        answers[run] = error
        for run in answers:
            del self._requests[run]
        return answers


def _ended(run: greenlet) -> None:
    """End a run that waits, as Ctrl-C would: it closes what is open."""
    with contextlib.suppress(BaseException):  # the other runs must be ended, too
        run.throw(KeyboardInterrupt)


class Shared(Executor):
    """An executor that several runs train with: it stops the run until all others have come as
    far."""

    name = "vmap"

    def __init__(self, executor: Vmap, together: Together) -> None:
        super().__init__(executor.fabric, executor.module, executor.optimizer)
        self.executor = executor
        self.together = together
        self.at_once = executor.at_once
        self.takes = executor.takes  # type: ignore[method-assign]
        self.scores = executor.scores  # type: ignore[method-assign]

    def train(self, jobs: Sequence[LocalJob]) -> list[Fit]:
        """Train the jobs with those of all runs that wait."""
        return self.together.wait(_RunRequest(self.executor, "train", jobs))

    def score(self, jobs: Sequence[ScoreJob]) -> list[Scored]:
        """Score the models with those of all runs that wait."""
        return self.together.wait(_RunRequest(self.executor, "score", jobs))
