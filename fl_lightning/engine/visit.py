"""One client's part of a round on its home rank: receive, be scored, train, be scored, upload.

What travels is a `Payload`, what is kept a `ClientState`, and what is counted a `ClientResult`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fl_lightning.callbacks.base import Aggregator, Observer, Transform
from fl_lightning.core import Client, Fit, Payload, Phase, RunContext
from fl_lightning.core.layout import copy_columns
from fl_lightning.core.traits import undeclared
from fl_lightning.engine.evaluation import Evaluator
from fl_lightning.engine.phases import job_of, keep_optimizer, phase_flops
from fl_lightning.engine.pool import Pool
from fl_lightning.engine.record import ClientResult, Guard, Timer
from fl_lightning.engine.scoring import ToScore
from fl_lightning.engine.trainer import Trainer
from fl_lightning.foundation.device import seed_all, wide
from fl_lightning.foundation.errors import BadClient, BadInput
from fl_lightning.foundation.rng import key
from fl_lightning.methods.base import Method
from fl_lightning.storage.state import MODEL
from fl_lightning.training.executors.base import LocalJob

Steps = Generator[LocalJob | ToScore, Fit | None, None]
"""Yields what several visits may do at the same time; a training job's `Fit` is sent back."""


@dataclass
class Parts:
    """What visits are carried out with. `transforms` change what travels, in this order; `reducer`
    makes one vector of many."""

    run: RunContext
    pool: Pool
    trainers: Sequence[Trainer]
    guard: Guard
    evaluator: Evaluator
    transforms: Sequence[Transform]
    observers: Sequence[Observer]
    reducer: Aggregator

    @cached_property
    def free_memory(self) -> set[str]:
        """Names in a client's memory that may be infinite or NaN: those that the method begins so,
        and all that transforms keep."""
        method = self.run.method
        first = method.init_client(self.run) if method.traits.client_memory else {}
        infinite = {name for name, x in first.items() if not x.isfinite().all()}
        return infinite.union(*(transform.init_client(self.run) for transform in self.transforms))


class Visit:
    """Holds its client, payload and result: the engine keeps no cursor.

    Args:
        parts: what it is carried out with.
        t: the round, and whether it is a `scored` one.
        place: of the client among those that train at once.
        payload: what the server has sent.
        plan: makes a training job of a phase; None: nothing trains in it.
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
        plan: Callable[[Client, Phase], LocalJob | None] = job_of,
    ) -> None:
        self.parts, self.run, self.t, self.id, self.place = parts, parts.run, t, client, place
        self.payload, self.scored, self.timer, self.plan = payload, scored, timer, plan
        self.group = self.run.group_of(client)
        self.trainer = parts.trainers[self.group.index]
        self.stage = "data"
        """What it is at, for the message where it fails."""
        self.failure: BadClient | None = None
        self.client: Client
        self.changed: Tensor | None = None
        """What transforms have made of the server's vector (D,); None: they have left it."""
        self.result = ClientResult(client, {})
        self.flops = Counter[str]()
        self._hooks = 0
        self.steps = self._steps()

    def _steps(self) -> Steps:
        """From receiving to uploading, with a stop at every phase of training and before scores."""
        yield from self.receive()
        self.parts.evaluator.keep_beginning(self.client)
        self.timer.lap("client")
        yield from self.score("before")
        yield from self.learn(self.run.method.phases)
        self.timer.lap("client")
        yield from self.score("after")
        self.upload()
        self.timer.lap("client")

    # ---------------------------------------------------------------- download

    def receive(self) -> Steps:
        """Take in what the server has sent, as transforms leave it, and begin with it."""
        run, method = self.run, self.run.method
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
        if run.policy.overwritten and b"\0" in client.payload.sent.tobytes():
            raise undeclared(method, "changes_download", "its broadcast changes what travels")
        lent = client.payload.vector
        for travels in (client.payload, *client.payload.further.values()):
            self.transform("on_download", travels)
        self.changed = client.payload.vector if client.payload.vector is not lent else None
        if run.policy.starts_from_server:
            state.buffers = self.group.first_buffers()
        with self.hook(method.receive, Method.receive):
            first = method.receive(client, client.payload)
        yield from self.train(first)

    # ---------------------------------------------------------------- training

    def learn(self, phases: Callable[[Client, Payload], Iterable[Phase]]) -> Steps:
        """Train in the `phases` of the method."""
        client = self.client
        self.stage = "training"
        trained = client.layout.parameters
        start = client[MODEL][trained].clone() if self.run.relation.measures else None
        with self.hook(phases, Method.phases):
            planned = phases(client, client.payload)
        yield from self.train(planned)
        fit = next((fit for fit in reversed(client.fits) if fit.steps), None)
        if fit is not None:
            self.result.values |= {"train_loss": fit.loss, "coaching_loss": fit.coaching}
        if fit is not None and start is not None:
            moved = torch.linalg.vector_norm(client[MODEL][trained] - start)
            self.result.values["gradient_norm"] = moved / (client.lr * fit.steps)

    def train(self, phases: Iterable[Phase] | None) -> Steps:
        """Train one phase after the other; the method goes on between them."""
        self.stage = "training"
        rest = iter(phases or ())
        # between its phases a generator does what it likes
        runs = not isinstance(phases, list | tuple | None)
        while True:
            with self.seeded() if runs else nullcontext():
                phase = next(rest, None)
            if phase is None:
                return
            job = self.plan(self.client, phase)
            if job is None:
                continue
            job.place = self.place
            for transform in self.parts.transforms:
                job.private = transform.on_phase(self.client, phase) or job.private
            fit = yield job
            assert fit is not None
            self.client.fits.append(fit)
            keep_optimizer(self.client, phase, job)
            self.count(phase, job, fit)
            if phase.scores is not None:
                self.timer.lap("client")
                yield from self.score(phase.scores)
                self.stage = "training"

    def count(self, phase: Phase, job: LocalJob, fit: Fit) -> None:
        """Count the operations of a phase."""
        plain, cost = self.trainer.cost, self.trainer.cost_of(phase.trains)
        if plain is not None and cost is not None:
            of_training, extra = phase_flops(self.client, phase, job, fit, plain, cost)
            self.flops.update(of_training)
            self.client.flops += extra

    # ---------------------------------------------------------------- upload

    def upload(self) -> None:
        """Send what the client has learned to the server's copies, as transforms leave it."""
        self.stage = "upload"
        send = self.run.method.upload
        with self.hook(send, Method.upload):
            upload = send(self.client, self.client.payload)
        self.check_declared(upload)
        self.transform("on_upload", upload)
        self.check_slots(upload)
        self.result.norms = self.norms(upload)
        self.count_bytes(upload)
        self.keep(upload)
        self.tell()
        self.count_operations()

    def check_declared(self, upload: Payload) -> None:
        """Raise `BadInput` where the method does not declare what it changes or keeps."""
        method = self.run.method
        sends_model = upload.vector is self.client[MODEL]
        same = sends_model and upload.sent.tobytes() == self.group.up_mask.tobytes()
        if not (same or method.traits.changes_upload):
            raise undeclared(method, "changes_upload", "its upload changes what travels")
        _check_memory(self.client, method)

    def check_slots(self, upload: Payload) -> None:
        """Raise `BadInput` for a vector of which the server keeps nothing."""
        slots = self.run.method.slots()
        for slot in upload.vectors:
            if slot not in slots or not slots[slot].exchanged:
                allowed = (
                    "its upload holds this vector: give it in slots(), as Slot(exchanged=True)"
                )
                raise BadInput(f"{type(self.run.method).__name__}.slots", slot, allowed)

    def norms(self, upload: Payload) -> dict[str, Tensor]:
        """Norms of the client's model, of what else the method keeps with it, and of its upload
        where that is another tensor; not finite if one number is not.

        Raises:
            ValueError: the upload is no vector of this model.
        """
        model = self.client[MODEL]
        expected, given = ((tuple(v.shape), v.dtype) for v in (model, upload.vector))
        if expected != given or upload.sent.shape != self.group.up_mask.shape:
            raise ValueError(
                f"its upload is {given[1]} of shape {given[0]}, not {expected[1]} of shape "
                f"{expected[0]}"
            )
        norm = torch.linalg.vector_norm
        norms = {"model_norm": norm(model)}
        kept = [v for slot, v in self.client.state.vectors.items() if slot != MODEL]
        for name, x in self.client.memory.items():
            if x.is_floating_point() and name not in self.parts.free_memory:
                kept.append(x)
        if kept:
            exact = wide(model.device)
            norms["kept_norm"] = norm(torch.stack([norm(v).to(model.device, exact) for v in kept]))
        parts = [*upload.vectors.values()]
        if upload.vector is not model:
            segments = self.client.layout.segments(upload.sent)
            parts += [upload.vector[s.start : s.stop] for s in segments]
        if parts:
            norms["upload_norm"] = norm(torch.stack([norm(v) for v in parts]))
        return norms

    def count_bytes(self, upload: Payload) -> None:
        """Count what has travelled, and hand over what the server reads beside vectors."""
        result, download = self.result, self.client.payload
        result.traffic = np.array((download.by_layer, upload.by_layer))
        result.sent = np.array((download.layers_sent, upload.layers_sent))
        result.statistics = {k: v.cpu() for k, v in (upload.statistics | upload.extra).items()}

    def keep(self, upload: Payload) -> None:
        """Keep what the server has received; what did not arrive stays stale (KAPC+BLS, Eq. 33)."""
        state = self.client.state
        if self.run.policy.keeps_received:
            segments = self.client.layout.segments(upload.sent)
            copy_columns(state.received[MODEL], upload.vector, segments)
        for slot, vector in upload.vectors.items():
            state.received[slot].copy_(vector)
        state.rounds += 1

    def tell(self) -> None:
        """Tell observers that the client has uploaded."""
        if self.parts.observers:
            with self.seeded():
                for observer in self.parts.observers:
                    observer.on_client_end(self.run, self.id)

    def count_operations(self) -> None:
        """Give the result its `flops_...`; unknown ones are absent, and `uncounted` says why."""
        name, cost, result = self.group.name, self.trainer.cost, self.result
        if cost is None:
            result.uncounted = (
                f"a training step of {name} could not be counted ({self.trainer.uncounted})"
            )
            return
        result.values |= {**cost.of(0, 0, 0), **self.flops}
        if math.isfinite(self.client.flops):
            result.values["flops_extra"] += int(self.client.flops)
            return
        del result.values["flops_extra"]
        result.uncounted = f"a hook trained {name} past its classifier, unseen"

    # ---------------------------------------------------------------- scores and hooks

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
            change = getattr(transform, hook)
            with self.hook(change, getattr(Transform, hook)):
                change(self.client, payload)
            _check_memory(self.client, transform)
            declares = hook.replace("on_", "changes_")
            changed = payload.vector is not vector or payload.sent.tobytes() != sent
            if changed and not getattr(transform, declares):
                raise undeclared(transform, declares, f"its {hook} changes what travels")

    def metered(self) -> AbstractContextManager[object]:
        """Count passes of the bound model within as operations beside the client's phases."""
        return self.trainer.meter.of(self.client, self.trainer.cost)

    def hook(
        self, hook: Callable[..., object], inherited: Callable[..., object]
    ) -> AbstractContextManager[object]:
        """As `seeded`; nothing where a `hook` is the `inherited` one, which neither draws nor sends
        anything through the model."""
        if getattr(hook, "__func__", None) is inherited:
            self._hooks += 1
            return nullcontext()
        return self.seeded()

    def seeded(self) -> AbstractContextManager[object]:
        """As `metered`: what is drawn follows from seed, client, round, and how many hooks were
        before it."""
        self._hooks += 1
        seed_all(self._key ^ self._hooks, self.run.device)
        return self.metered()

    @cached_property
    def _key(self) -> int:
        return key(self.run.config.seed, "visit", self.id, self.t)


def _check_memory(client: Client, part: object) -> None:
    """Raise `BadInput` where `part` has written to the client's memory, and nothing is kept of
    clients."""
    if client.memory and not client.run.policy.keeps_clients:
        name = next(iter(client.memory))
        raise undeclared(
            part, "client_memory", f"it writes client.memory[{name!r}], which would be lost"
        )
