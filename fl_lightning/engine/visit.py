"""One client's part of a round on its home rank: receive, be scored, train, be scored, upload."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fl_lightning.callbacks.base import Observer, Transform
from fl_lightning.core import Client, Fit, Payload, Phase, PureLoss, RunContext
from fl_lightning.core.layout import copy_columns
from fl_lightning.core.traits import undeclared
from fl_lightning.engine.evaluation import Evaluator
from fl_lightning.engine.failures import Guard
from fl_lightning.engine.phases import job_of, keep_optimizer, on_own_data
from fl_lightning.engine.pool import Pool
from fl_lightning.engine.record import ClientResult, Timer
from fl_lightning.engine.scoring import ToScore
from fl_lightning.engine.trainer import Trainer
from fl_lightning.foundation.device import seed_all, wide
from fl_lightning.foundation.errors import BadClient, BadInput
from fl_lightning.foundation.rng import key
from fl_lightning.storage.state import MODEL
from fl_lightning.training.executors.base import LocalJob

Steps = Generator[LocalJob | ToScore, Fit | None, None]
"""It pauses at what others may do at the same time; what is sent back is what a job came to."""


@dataclass
class Parts:
    """What visits are carried out with. `transforms` change what travels, in this order."""

    run: RunContext
    pool: Pool
    trainers: Sequence[Trainer]
    guard: Guard
    evaluator: Evaluator
    transforms: Sequence[Transform]
    observers: Sequence[Observer]

    @cached_property
    def free_memory(self) -> set[str]:
        """What of a client's memory may be infinite or NaN: what the method begins so, and what
        transforms keep."""
        method = self.run.method
        first = method.init_client(self.run) if method.traits.client_memory else {}
        infinite = {name for name, x in first.items() if not x.isfinite().all()}
        return infinite.union(*(transform.init_client(self.run) for transform in self.transforms))

    def client_ended(self, client: int) -> None:
        """A client has uploaded."""
        for observer in self.observers:
            observer.on_client_end(self.run, client)


class Draws:
    """What hooks of a visit draw from torch's, numpy's and Python's generators, whatever else was
    trained or scored."""

    def __init__(self, key: int, device: torch.device) -> None:
        self._key, self._device, self._count = key, device, 0

    def renew(self) -> None:
        """From here on they draw other numbers, which follow from the key and from how often this
        was called."""
        self._count += 1
        seed_all(self._key ^ self._count, self._device)


class Visit:
    """It holds its client, payload and result: the engine keeps no cursor.

    Args:
        parts: what it is carried out with.
        t: the round, and whether it is a `scored` one.
        place: of the client among those that train at once.
        payload: what the server has sent.
    """

    def __init__(
        self,
        parts: Parts,
        t: int,
        scored: bool,
        timer: Timer,
        client: int,
        place: int,
        payload: Payload,
    ) -> None:
        self.parts, self.run, self.t, self.id, self.place = parts, parts.run, t, client, place
        self.payload, self.scored, self.timer = payload, scored, timer
        self.group = self.run.group_of(client)
        self.trainer = parts.trainers[self.group.index]
        self.stage = "data"
        """What it is at, for the message where it fails."""
        self.failure: BadClient | None = None
        self.client: Client
        self.changed: Tensor | None = None
        """What transforms have made of the server's vector (D,); None: they have left it."""
        self.result = ClientResult(client, {})
        self.draws = Draws(key(self.run.config.seed, "visit", client, t), self.run.device)
        self.flops: dict[str, int] = {}
        self.steps = self._steps()

    def _steps(self) -> Steps:
        """From receiving to uploading. It pauses at every phase of training and before scores, so
        that others can come as far."""
        yield from self.receive()
        self.parts.evaluator.keep_beginning(self.client)
        self.timer.lap("client")
        yield from self.score("before")
        yield from self.learn(self.run.method.phases)
        self.timer.lap("client")
        yield from self.score("after")
        self.upload()
        self.timer.lap("client")

    def receive(self) -> Steps:
        """What the server has sent arrives, as transforms leave it, and the client begins with
        it."""
        run, method = self.run, self.run.method
        self.stage = "data"
        state = self.parts.pool.state(self.id)
        run.store.acquire(state)
        client = self.client = Client(run, self.group, self.id, self.t, state)
        data = client.data
        client.payload = self.payload
        if not run.policy.one_download:
            client.payload = replace(self.payload, vector=run.store.borrow(self.payload.vector))
        self.result.values |= {"train_samples": len(data.train), "test_samples": len(data.test)}

        self.stage = "download"
        # what is left out would be another client's
        if run.policy.overwritten and not client.payload.sent.all():
            raise undeclared(method, "changes_download", "its broadcast changes what travels")
        lent = client.payload.vector
        for travels in (client.payload, *client.payload.further.values()):
            self.transform("on_download", travels)
        self.changed = client.payload.vector if client.payload.vector is not lent else None
        if run.policy.starts_from_server:
            state.buffers = self.group.first_buffers()
        with self.hook():
            first = method.receive(client, client.payload)
        yield from self.train(first)

    def learn(self, phases: Callable[[Client, Payload], Iterable[Phase]]) -> Steps:
        """Local training in the `phases` of the method."""
        client = self.client
        start = (
            client[MODEL][client.layout.parameters].clone() if self.run.relation.measures else None
        )
        self.stage = "training"
        with self.hook():
            planned = phases(client, client.payload)
        yield from self.train(planned)
        self.trained(start)

    def train(self, phases: Iterable[Phase] | None) -> Steps:
        """One phase after the other; the method goes on between them."""
        self.stage = "training"
        rest = iter(phases or ())
        # between its phases a generator does what it likes
        runs = not isinstance(phases, list | tuple | None)
        while True:
            with self.hook() if runs else nullcontext():
                phase = next(rest, None)
            if phase is None:
                return
            job = self.job(phase)
            if job is None:
                continue
            fit = yield job
            assert fit is not None
            self.client.fits.append(fit)
            keep_optimizer(self.client, phase, job)
            self.count(phase, job, fit)
            if phase.scores is not None:
                self.timer.lap("client")
                yield from self.score(phase.scores)
                self.stage = "training"

    def job(self, phase: Phase) -> LocalJob | None:
        """What is to be trained for `phase`; None: nothing."""
        job = job_of(self.client, phase, self.t - 1)
        job.place = self.place
        return job

    def trained(self, start: Tensor | None) -> None:
        """What the last phase that took a step came to, and how far the model has moved from
        `start`."""
        client = self.client
        fit = next((fit for fit in reversed(client.fits) if fit.steps), None)
        if fit is None:
            return
        self.result.values |= {"train_loss": fit.loss, "coaching_loss": fit.coaching}
        if start is not None:
            moved = torch.linalg.vector_norm(client[MODEL][client.layout.parameters] - start)
            self.result.values["gradient_norm"] = moved / (client.lr * fit.steps)

    def upload(self) -> None:
        """What the client sends, as transforms leave it, reaches the server's copies."""
        self.stage = "upload"
        run, client, result = self.run, self.client, self.result
        state, download = client.state, client.payload
        with self.hook():
            upload = run.method.upload(client, download)
        same = (
            upload.vector is client[MODEL] and upload.sent.tobytes() == self.group.up_mask.tobytes()
        )
        if not (same or run.method.traits.changes_upload):
            raise undeclared(run.method, "changes_upload", "its upload changes what travels")
        _check_memory(client, run.method)
        self.transform("on_upload", upload)
        for slot in upload.vectors.keys() - {
            name for name, s in run.method.slots().items() if s.exchanged
        }:
            allowed = "its upload holds this vector: give it in slots(), as Slot(exchanged=True)"
            raise BadInput(f"{type(run.method).__name__}.slots", slot, allowed)
        result.values |= self.norms(upload)
        result.traffic = np.array((download.by_layer, upload.by_layer))
        result.sent = np.array((download.layers_sent, upload.layers_sent))
        result.statistics = {k: v.cpu() for k, v in (upload.statistics | upload.extra).items()}
        if run.policy.keeps_received:  # what did not arrive stays stale (KAPC+BLS, Eq. 33)
            copy_columns(state.received[MODEL], upload.vector, client.layout.segments(upload.sent))
        for slot, vector in upload.vectors.items():
            state.received[slot].copy_(vector)
        state.rounds += 1
        if self.parts.observers:
            with self.hook():
                self.parts.client_ended(self.id)
        self.sum_up()

    def norms(self, upload: Payload) -> dict[str, Tensor]:
        """Norms of the client's model, of what else the method keeps with it, and of its upload
        where that is another tensor; not finite if one number is not.

        Raises:
            ValueError: the upload is no vector of this model.
        """
        own = self.client[MODEL]
        expected, given = ((tuple(v.shape), v.dtype) for v in (own, upload.vector))
        if expected != given or upload.sent.shape != self.group.up_mask.shape:
            raise ValueError(
                f"its upload is {given[1]} of shape {given[0]}, not {expected[1]} of shape "
                f"{expected[0]}"
            )
        norms = {"model_norm": torch.linalg.vector_norm(own)}
        kept = [v for slot, v in self.client.state.vectors.items() if slot != MODEL]
        memory = self.client.memory.items()
        kept += [
            x for name, x in memory if x.is_floating_point() and name not in self.parts.free_memory
        ]
        if kept:
            kept = [torch.linalg.vector_norm(v).to(own.device, wide(own.device)) for v in kept]
            norms["kept_norm"] = torch.linalg.vector_norm(torch.stack(kept))
        parts = [torch.linalg.vector_norm(v) for v in upload.vectors.values()]
        if upload.vector is not own:
            segments = self.client.layout.segments(upload.sent)
            parts += [torch.linalg.vector_norm(upload.vector[s.start : s.stop]) for s in segments]
        if parts:
            norms["upload_norm"] = torch.linalg.vector_norm(torch.stack(parts))
        return norms

    def score(self, kind: str) -> Steps:
        """Score the client's personal model, where the round asks for it."""
        evaluator = self.parts.evaluator
        if self.scored and evaluator.wants(kind):
            self.stage = "evaluation"
            vector = self.run.method.personal(self.client)
            if evaluator.remembered.takes(self.client):
                yield ToScore(kind, self.client, vector)
            self.result.values |= evaluator.scores(kind, self.client, vector)
            self.timer.lap("evaluation")

    def transform(self, hook: str, payload: Payload) -> None:
        """Run a hook of every transform, in order.

        Raises:
            BadInput: one has changed what travels or what is kept, and its class does not declare
                it: it might be lost.
        """
        for transform in self.parts.transforms:
            vector, sent = payload.vector, payload.sent.tobytes()
            with self.hook():
                getattr(transform, hook)(self.client, payload)
            _check_memory(self.client, transform)
            declares = hook.replace("on_", "changes_")
            if not getattr(transform, declares) and (
                payload.vector is not vector or payload.sent.tobytes() != sent
            ):
                raise undeclared(transform, declares, f"its {hook} changes what travels")

    # ---------------------------------------------------------------- operations

    def metered(self) -> AbstractContextManager[object]:
        """Passes of the bound model within count as the client's operations beside its phases."""
        return self.trainer.meter.of(self.client, self.trainer.cost)

    def hook(self) -> AbstractContextManager[object]:
        """As `metered`, for a hook: what it draws follows from seed, client and round."""
        self.draws.renew()
        return self.metered()

    def count(self, phase: Phase, job: LocalJob, fit: Fit) -> None:
        """Count what a phase has cost: on other data than the client's own as `flops_extra`.

        Own steps and own losses have been metered: of a loss only what goes beyond one pass for
        each sample is extra.
        """
        plain, cost = self.trainer.cost, self.trainer.cost_of(phase.trains)
        if plain is None or cost is None:
            return
        if job.passes is not None:  # of what was stacked, where no hook sees a pass
            self.client.flops += (
                plain.passes(*job.passes) if job.passes[1] or not fit.steps else math.nan
            )
        if phase.step is not None:
            return
        once, loss = plain.passes(fit.samples, fit.samples), phase.objective.loss
        metered = loss is not None
        if isinstance(loss, PureLoss):
            self.client.flops += loss.flops * fit.samples
        if not on_own_data(self.client, phase):
            self.client.flops += 0 if metered else once
            return
        self.client.flops -= once if metered else 0
        linear = 0 if phase.objective.linear is None else self.client.layout.parameters.stop
        for name, value in cost.of(fit.samples, fit.steps, job.proximal_numbers, linear).items():
            self.flops[name] = self.flops.get(name, 0) + value

    def sum_up(self) -> None:
        """`flops_...` of the visit; what is not known is absent, and `uncounted` says why."""
        name, cost, result = self.group.name, self.trainer.cost, self.result
        if cost is None:
            result.uncounted = (
                f"a training step of {name} could not be counted ({self.trainer.uncounted})"
            )
            return
        result.values |= cost.of(0, 0, 0) | self.flops
        if math.isfinite(self.client.flops):
            result.values["flops_extra"] += int(self.client.flops)
            return
        del result.values["flops_extra"]
        result.uncounted = f"a hook trained {name} past its classifier, unseen"


def _check_memory(client: Client, part: object) -> None:
    """Raise `BadInput` where `part` has written to the client's memory, and nothing is kept of
    clients."""
    if client.memory and not client.run.policy.keeps_clients:
        name = next(iter(client.memory))
        raise undeclared(
            part, "client_memory", f"it writes client.memory[{name!r}], which would be lost"
        )
