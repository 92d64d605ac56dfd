"""Visits this rank's clients in a round: as many at a time as train at once."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from fl_lightning.core import Fit, Payload
from fl_lightning.engine.record import Results, Timer
from fl_lightning.engine.scoring import ToScore
from fl_lightning.engine.visit import Parts, Visit
from fl_lightning.training.executors.base import LocalJob, Loop

NOBODY: dict[int, int] = {}


class Worker(Parts):
    """Carries out visits here."""

    def visits(
        self, t: int, cohort: list[int], downloads: dict[int, Payload], scored: bool, timer: Timer
    ) -> Results:
        """Visit this rank's clients of `cohort`; returns the result of each, and the failures.

        A client that failed is left as it was before. With `retry` it has a second attempt with the
        same draws: what was no fault of its own then leaves no trace in any number.
        """
        results = Results()
        begin = partial(Visit, self, t, scored, timer)
        batches = list(self.batches(cohort))
        for batch, coming in zip_longest(batches, batches[1:], fillvalue=NOBODY):
            self._visit(begin, batch, downloads, results, coming)
        self.run.store.synchronize()
        if not self.run.tolerant:  # all at once: the device is waited for but once
            self.guard.check_finite(t, list(results.clients.values()))
        return results

    def scores(self, t: int, results: Results) -> None:
        """Score models that exist only after aggregation."""
        self.evaluator.after_aggregation(t, results)

    def finals(self) -> dict[int, dict[str, Any]]:
        """Kinds and scores of the final models of this rank's clients."""
        return self.evaluator.finals()

    def batches(self, cohort: list[int]) -> Iterator[dict[int, int]]:
        """This rank's clients, with their places, in the batches that train together.

        They are cut from the cohort, and places counted there: they are the same on any number of
        ranks.
        """
        for group in self.run.groups:
            members = [c for c in cohort if self.run.group_of(c) is group]
            size = self.trainers[group.index].executor.at_once
            for first in range(0, len(members), size):
                places = {c: k for k, c in enumerate(members[first : first + size])}
                mine = self.run.at_home(places)
                if mine:
                    yield {c: places[c] for c in mine}

    def _visit(
        self,
        begin: Callable[..., Visit],
        batch: dict[int, int],
        downloads: dict[int, Payload],
        results: Results,
        coming: Iterable[int],
    ) -> None:
        """Carry out one batch of visits, clients with their places; those that fail are tried
        again, or left out, as the configuration says."""
        run = self.run
        attempts = 2 if run.config.federation.on_bad_client == "retry" else 1
        for left in reversed(range(attempts)):
            before = {c: copy.deepcopy(run.states.get(c)) for c in batch if run.tolerant}
            # Transforms write to what was sent, and a next attempt must receive the same.
            sent = {c: downloads[c].again() if left else downloads[c] for c in batch}
            visits = {c: begin(c, place, sent[c]) for c, place in batch.items()}
            self._attempt(visits, self._vectors(coming, downloads))
            failed = {c: visit.failure for c, visit in visits.items() if visit.failure is not None}
            for c in [c for c in visits if c not in failed]:
                visit = visits[c]
                download = downloads[c]
                results.clients[c] = visit.result
                # what the client has learned is its change from what transforms have left
                if run.policy.one_download:
                    downloads[c] = visit.client.payload
                elif visit.changed is not None:
                    changed = visit.changed.to(download.vector.device)
                    downloads[c] = replace(download, vector=changed)
            if failed:
                run.store.synchronize()
            for client, failure in failed.items():
                self.pool.restore(client, before[client])
                results.failures.append((failure, "retried" if left else "skipped"))
            batch = {c: batch[c] for c in failed}
            if not batch:
                return

    def _attempt(self, visits: dict[int, Visit], coming: Iterable[Tensor]) -> None:
        """Carry out visits side by side, phase by phase. While the first of them train, the store
        fetches what is `coming`."""
        try:
            jobs = self._advance(visits, dict.fromkeys(visits))
            # then they come when they are visited
            with contextlib.suppress(torch.OutOfMemoryError):
                self.run.store.fetch(coming)
            while jobs:
                to_train = {c: job for c, job in jobs.items() if isinstance(job, LocalJob)}
                to_score = {c: job for c, job in jobs.items() if isinstance(job, ToScore)}
                if to_score:  # first, so that all train at the same time
                    self.evaluator.remembered.score_ahead(list(to_score.values()))
                    jobs = {**to_train, **self._advance(visits, dict.fromkeys(to_score))}
                else:
                    jobs = self._advance(visits, self._train(visits, to_train))
        finally:
            for visit in visits.values():
                visit.steps.close()
            self.run.store.release()

    def _advance(
        self, visits: dict[int, Visit], fits: Mapping[int, Fit | None]
    ) -> dict[int, LocalJob | ToScore]:
        """Let each visit go on with its last fit; returns the jobs that they stop at."""
        jobs: dict[int, LocalJob | ToScore] = {}
        for c, fit in fits.items():
            visit = visits[c]
            try:
                jobs[c] = visit.steps.send(fit)
            except StopIteration:
                if self.run.tolerant:
                    with self.guard.catch(visit):
                        self.guard.check_finite(visit.t, [visit.result])
            except Exception:
                # only now: to enter it takes longer than most of what a visit does
                with self.guard.catch(visit):
                    raise
        return jobs

    def _train(self, visits: dict[int, Visit], jobs: dict[int, LocalJob]) -> dict[int, Fit]:
        """Train clients of one group; those that it failed for are left out."""
        trainer = visits[next(iter(jobs))].trainer
        executor = trainer.executor
        if len(jobs) > 1 and all(map(executor.takes, jobs.values())):
            try:
                return dict(zip(jobs, executor.train(list(jobs.values())), strict=True))
            except torch.OutOfMemoryError:  # alone, a client takes that executor as much room
                executor = trainer.loop
            except Exception:  # whose fault it is shows when each trains alone
                pass
        fits: dict[int, Fit] = {}
        for c, job in jobs.items():
            with self.guard.catch(visits[c]):
                kind = executor if executor.takes(job) else trainer.loop
                metered = job.own and job.private is None and isinstance(kind, Loop)
                with visits[c].metered() if metered else contextlib.nullcontext():
                    [fits[c]] = kind.train([job])
        return fits

    def _vectors(self, clients: Iterable[int], downloads: dict[int, Payload]) -> Iterator[Tensor]:
        """The vectors that visits to `clients` will ask the store for."""
        for c in clients:
            state = self.run.states.get(c)
            if state is not None:
                yield from (*state.vectors.values(), *state.received.values())
            if not self.run.policy.one_download:
                yield downloads[c].vector
