"""Visits this rank's clients in a round, as many at a time as the executor trains together."""

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
from fl_lightning.engine.scoring import ScoredModel
from fl_lightning.engine.visit import EngineParts, Visit
from fl_lightning.foundation.log import note
from fl_lightning.training.executors.base import LocalJob, Loop

NOBODY: dict[int, int] = {}


class Worker(EngineParts):
    """Carries out the visits of this rank's clients in this process."""

    def visits(
        self,
        t: int,
        cohort: list[int],
        downloads: dict[int, Payload],
        scored: bool,
        timer: Timer,
    ) -> Results:
        """Visit this rank's clients of `cohort`; returns their results and failures. Arguments are
        those of `Visits.visits`. Entries of `downloads` that transforms change are replaced by the
        changed payloads.

        The state of a client that fails is restored. With `on_bad_client: retry` the client gets a
        second attempt with the same draws, so an error that does not recur changes no result.
        """
        results = Results()
        begin = partial(
            Visit,
            self,
            t,
            scored,
            timer,
        )
        stacks = list(self.stacks(cohort))
        for stack, coming in zip_longest(stacks, stacks[1:], fillvalue=NOBODY):
            self._visit(
                begin,
                stack,
                downloads,
                results,
                coming,
            )
        self.run.store.synchronize()
        if not self.run.tolerant:  # all clients at once, to wait for the device once
            self.guard.check_finite(t, list(results.clients.values()))
        return results

    def scores(self, t: int, results: Results) -> None:
        """Score the models that exist only after aggregation, the new global model and fine-tuned
        copies, and add the scores to each client's entry in `results`."""
        self.evaluator.after_aggregation(t, results)

    def finals(self) -> dict[int, dict[str, Any]]:
        """Score the final models of this rank's clients; returns their `Evaluator.final_scores` by
        client."""
        return self.evaluator.finals()

    def stacks(self, cohort: list[int]) -> Iterator[dict[int, int]]:
        """Divide the cohort into stacks, groups of clients that train together; yields this rank's
        clients of each stack as {client: position in the stack}.

        A stack may contain clients of several ranks, and positions count all of them. So stacks and
        positions are the same for any number of ranks.
        """
        for group in self.run.groups:
            members = [c for c in cohort if self.run.group_of(c) is group]
            size = self.trainers[group.index].executor.at_once
            for first in range(0, len(members), size):
                places = {c: k for k, c in enumerate(members[first : first + size])}
                here = self.run.at_home(places)
                if here:
                    yield {c: places[c] for c in here}

    def _visit(
        self,
        begin: Callable[..., Visit],
        stack: dict[int, int],
        downloads: dict[int, Payload],
        results: Results,
        coming: Iterable[int],
    ) -> None:
        """Visit the clients of one stack. Clients that fail are visited again or skipped, as
        `federation.on_bad_client` says.

        Args:
            begin: makes a client's `Visit` from its number, its position in the stack and its
                download.
            stack: {client: position in the stack}.
            coming: clients of the next stack, whose vectors are fetched ahead.
        """
        run = self.run
        outcomes = ["skipped"]
        if run.config.federation.on_bad_client == "retry":
            outcomes = ["retried", "skipped"]
        for outcome in outcomes:
            before = {c: copy.deepcopy(run.states.get(c)) for c in stack if run.tolerant}
            visits = {}
            for c, place in stack.items():
                # transforms write to a download, and a second attempt must receive the same
                sent = downloads[c].duplicate() if outcome == "retried" else downloads[c]
                visits[c] = begin(c, place, sent)
            self._attempt(visits, self._vectors(coming, downloads))
            failed = {}
            for c, visit in visits.items():
                if visit.failure is None:
                    results.clients[c] = visit.result
                    self._note_changed(visit, downloads)
                else:
                    failed[c] = visit.failure
            if failed:
                run.store.synchronize()
            for c, failure in failed.items():
                self.pool.restore(c, before[c])
                results.failures.append((failure, outcome))
            stack = {c: stack[c] for c in failed}
            if not stack:
                return

    def _note_changed(
        self,
        visit: Visit,
        downloads: dict[int, Payload],
    ) -> None:
        """Replace the client's entry of `downloads` by the download after transforms, which
        `mean(since="sent")` subtracts."""
        download = downloads[visit.id]
        if self.run.policy.one_download:
            downloads[visit.id] = visit.client.payload
        elif visit.changed is not None:
            changed = visit.changed.to(download.vector.device)
            downloads[visit.id] = replace(download, vector=changed)

    def _attempt(
        self,
        visits: dict[int, Visit],
        coming: Iterable[Tensor],
    ) -> None:
        """Carry out visits together, phase by phase. While the first phases train, the store
        fetches the vectors `coming`, which the next visits need."""
        try:
            jobs = self._advance(visits, dict.fromkeys(visits))
            # without free memory, vectors are fetched when their clients are visited
            with contextlib.suppress(torch.OutOfMemoryError):
                self.run.store.fetch(coming)
            while jobs:
                to_train = {c: job for c, job in jobs.items() if isinstance(job, LocalJob)}
                to_score = {c: job for c, job in jobs.items() if isinstance(job, ScoredModel)}
                if to_score:  # first, so that all train at the same time
                    self.evaluator.cache.score_ahead(list(to_score.values()))
                    jobs = {**to_train, **self._advance(visits, dict.fromkeys(to_score))}
                else:
                    jobs = self._advance(visits, self._train(visits, to_train))
        finally:
            for visit in visits.values():
                visit.steps.close()
            self.run.store.release()

    def _advance(
        self, visits: dict[int, Visit], fits: Mapping[int, Fit | None]
    ) -> dict[int, LocalJob | ScoredModel]:
        """Resume visits; returns the job or model that each yields next.

        Args:
            fits: clients whose visits are resumed, with the fit of the job that each yielded last;
                None: it has yielded no job yet, or a model to score.
        """
        jobs = {}
        for c, fit in fits.items():
            visit = visits[c]
            try:
                jobs[c] = visit.steps.send(fit)
            except StopIteration:
                if self.run.tolerant:
                    with self.guard.catch(visit):
                        self.guard.check_finite(visit.t, [visit.result])
            except Exception:
                # enter the guard only on errors: entering takes longer than most steps of a visit
                with self.guard.catch(visit):
                    raise
        return jobs

    def _train(
        self,
        visits: dict[int, Visit],
        jobs: dict[int, LocalJob],
    ) -> dict[int, Fit]:
        """Train clients of one architecture together if the executor can, else one after the other;
        returns the fits of those that did not fail."""
        trainer = visits[next(iter(jobs))].trainer
        executor = trainer.executor
        if len(jobs) > 1 and all(map(executor.can_train, jobs.values())):
            try:
                fits_of_all = executor.train(list(jobs.values()))
                return dict(zip(jobs, fits_of_all, strict=True))
            except torch.OutOfMemoryError:  # a stack needs as much memory for a single client
                executor = trainer.loop
                note(f"{len(jobs)} clients do not fit in memory together: they train in the loop")
            except Exception as error:  # the client that caused it fails again below, alone
                note(f"{len(jobs)} clients failed together, now each trains alone: {error!r}")
        fits = {}
        for c, job in jobs.items():
            with self.guard.catch(visits[c]):
                chosen = executor if executor.can_train(job) else trainer.loop
                metered = job.own and job.private is None and isinstance(chosen, Loop)
                with visits[c].metered() if metered else contextlib.nullcontext():
                    [fits[c]] = chosen.train([job])
        return fits

    def _vectors(
        self,
        clients: Iterable[int],
        downloads: dict[int, Payload],
    ) -> Iterator[Tensor]:
        """Yield the vectors that visits of `clients` will need from the store."""
        for c in clients:
            state = self.run.states.get(c)
            if state is not None:
                yield from state.vectors.values()
                yield from state.received.values()
            if not self.run.policy.one_download:
                yield downloads[c].vector
