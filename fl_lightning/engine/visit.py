"""Carries out one client's part of a round on its home rank: download, scores, training, scores,
upload.

The client receives and sends a `Payload`, keeps a `ClientState`, and returns a `ClientResult`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property

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
from fl_lightning.engine.scoring import ScoredModel
from fl_lightning.engine.trainer import Trainer
from fl_lightning.foundation.device import seed_all, wide
from fl_lightning.foundation.errors import BadClient, check
from fl_lightning.foundation.rng import key
from fl_lightning.methods.base import Method
from fl_lightning.storage.state import MODEL
from fl_lightning.training.executors.base import LocalJob

Steps = Generator[LocalJob | ScoredModel, Fit | None, None]
"""A part of a visit, a generator that pauses for the executor: it yields a job to train or a model
to score, and is resumed with the `Fit` of the trained job, or with None after scoring."""


@dataclass
class EngineParts:
    """The parts of the engine that visits use on this rank.

    Args:
        transforms: change payloads, in this order.
        reducer: the aggregator callback, which combines a round's uploads into one vector.
    """

    run: RunContext
    pool: Pool
    trainers: Sequence[Trainer]
    guard: Guard
    evaluator: Evaluator
    transforms: Sequence[Transform]
    observers: Sequence[Observer]
    reducer: Aggregator

    @cached_property
    def nonfinite_memory(self) -> set[str]:
        """Return the names of tensors in a client's memory that may contain infinities or NaN: the
        method's tensors whose initial values do, and all tensors of transforms."""
        method = self.run.method
        first = method.init_client(self.run) if method.traits.client_memory else {}
        infinite = {name for name, x in first.items() if not x.isfinite().all()}
        return infinite.union(*(transform.init_client(self.run) for transform in self.transforms))


@dataclass(eq=False, repr=False)
class Visit:
    """Carries out one client's visit in a round.

    Args:
        parts: the engine's parts.
        t: the round.
        scored: whether models are scored in this round.
        timer: counts the seconds of the round.
        id: number of the client.
        place: the client's slot in a stacked pass (`LocalJob.place`).
        payload: the server's download.
        plan: makes the job of each phase from client and phase; if it returns None, the phase is
            skipped (`joining` skips phases in which a newcomer has nothing to train).
    """

    parts: EngineParts
    t: int
    scored: bool
    timer: Timer
    id: int
    place: int
    payload: Payload
    plan: Callable[[Client, Phase], LocalJob | None] = job_of
    stage: str = "data"
    """The current stage, which the message names if the visit fails."""
    failure: BadClient | None = None
    client: Client = field(init=False)
    changed: Tensor | None = None
    """The downloaded vector (D,) as transforms have changed it; None: they have not changed it."""
    flops: Counter[str] = field(default_factory=Counter)
    """FLOPs of the phases by column."""
    _hooks: int = 0
    """Number of hooks of method and transforms that the visit has called so far."""

    def __post_init__(self) -> None:
        self.run = self.parts.run
        self.group = self.run.group_of(self.id)
        self.trainer = self.parts.trainers[self.group.index]
        self.result = ClientResult(self.id, {})
        self.steps = self._steps()

    def _steps(self) -> Steps:
        """Run the visit from download to upload. It yields the job of each phase, and the models
        that executors can score in one pass with others."""
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
        """Apply transforms to the download, call `method.receive`, and train the phases that it
        returns; yields their jobs."""
        run = self.run
        method = run.method
        state = self.parts.pool.state(self.id)
        run.store.acquire(state)
        client = self.client = Client(
            run,
            self.group,
            self.id,
            self.t,
            state,
        )
        data = client.data
        payload = self.payload
        if not run.policy.one_download:
            payload = replace(payload, vector=run.store.borrow(payload.vector))
        client.payload = payload
        self.result.values |= {"train_samples": len(data.train), "test_samples": len(data.test)}

        self.stage = "download"
        # blocks that are not sent would keep another client's values
        if run.policy.overwritten and b"\0" in payload.sent.tobytes():
            raise undeclared(method, "changes_download", "its broadcast changes the sent tensors")
        original = payload.vector
        for part in (payload, *payload.further.values()):
            self.transform("on_download", part)
        if payload.vector is not original:
            self.changed = payload.vector
        if run.policy.starts_from_server:
            state.buffers = self.group.first_buffers()
        with self.hook(method.receive, Method.receive):
            phases = method.receive(client, payload)
        yield from self.train(phases)

    # ---------------------------------------------------------------- training

    def learn(self, phases: Callable[[Client, Payload], Iterable[Phase]]) -> Steps:
        """Carry out the training of the visit: call a hook of the method, train the phases that it
        returns, and record loss and gradient norm in the client's result; yields the phases' jobs.

        Args:
            phases: the hook, `method.phases` or for a newcomer `method.newcomer_phases`.
        """
        client = self.client
        self.stage = "training"
        trained = client.layout.parameters
        start = None
        if self.run.relation.measures:
            start = client[MODEL][trained].clone()
        with self.hook(phases, Method.phases):
            planned = phases(client, client.payload)
        yield from self.train(planned)
        fits = [fit for fit in client.fits if fit.steps]
        if not fits:
            return
        fit = fits[-1]
        self.result.values |= {"train_loss": fit.loss, "coaching_loss": fit.coaching}
        if start is not None:
            distance = torch.linalg.vector_norm(client[MODEL][trained] - start)
            self.result.values["gradient_norm"] = distance / (client.lr * fit.steps)

    def train(self, phases: Iterable[Phase] | None) -> Steps:
        """Train one phase after the other; yields the job of each, and adds its fit to
        `client.fits`. If `phases` is a generator, the method's code after each `yield` runs when
        that phase has ended."""
        self.stage = "training"
        rest = iter(phases or ())
        # a generator may draw numbers and use the model between its phases
        is_generator = not isinstance(phases, list | tuple | None)
        while True:
            with self.seeded() if is_generator else nullcontext():
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

    def count(
        self,
        phase: Phase,
        job: LocalJob,
        fit: Fit,
    ) -> None:
        """Add the FLOPs of a phase to `flops` and to `client.flops`."""
        plain = self.trainer.cost
        cost = self.trainer.cost_of(phase.trains)
        if plain is not None and cost is not None:
            by_column, extra = phase_flops(
                self.client,
                phase,
                job,
                fit,
                plain,
                cost,
            )
            self.flops.update(by_column)
            self.client.flops += extra

    # ---------------------------------------------------------------- upload

    def upload(self) -> None:
        """Have the method compose the upload, apply transforms, and write it to the server's
        copies."""
        self.stage = "upload"
        method = self.run.method
        with self.hook(method.upload, Method.upload):
            upload = method.upload(self.client, self.client.payload)
        self.check_declared(upload)
        self.transform("on_upload", upload)
        self.check_slots(upload)
        self.result.norms = self.norms(upload)
        self.result.count(self.client.payload, upload)
        self.keep(upload)
        self.notify()
        self.count_operations()

    def check_declared(self, upload: Payload) -> None:
        """Raise `BadInput` if the method has made an `upload` of other tensors than usual, or has
        written to the client's memory, without declaring it in its traits."""
        method = self.run.method
        sends_model = upload.vector is self.client[MODEL]
        same = sends_model and upload.sent.tobytes() == self.group.up_mask.tobytes()
        if not (same or method.traits.changes_upload):
            raise undeclared(method, "changes_upload", "its upload changes the sent tensors")
        _check_memory(self.client, method)

    def check_slots(self, upload: Payload) -> None:
        """Raise `BadInput` if the upload holds a vector that the method's slots do not declare as
        exchanged."""
        slots = self.run.method.slots()
        key = f"{type(self.run.method).__name__}.slots"
        requirement = "its upload holds this vector: declare it in slots() as Slot(exchanged=True)"
        for slot in upload.vectors:
            exchanged = slot in slots and slots[slot].exchanged
            check(key, slot, exchanged, requirement)

    def norms(self, upload: Payload) -> dict[str, Tensor]:
        """Return the norms of the client's model, of its other vectors and memory, and of its
        upload if this is not the model itself. A norm is finite only if all numbers are.

        Raises:
            ValueError: the upload has another shape or dtype than the model.
        """
        model = self.client[MODEL]
        vector = upload.vector
        alike = model.shape == vector.shape and model.dtype == vector.dtype
        if not alike or upload.sent.shape != self.group.up_mask.shape:
            raise ValueError(
                f"its upload is {vector.dtype} of shape {tuple(vector.shape)}, not {model.dtype} "
                f"of shape {tuple(model.shape)}"
            )
        norm = torch.linalg.vector_norm
        norms = {"model_norm": norm(model)}
        further = [v for slot, v in self.client.state.vectors.items() if slot != MODEL]
        for name, x in self.client.memory.items():
            if x.is_floating_point() and name not in self.parts.nonfinite_memory:
                further.append(x)
        if further:
            dtype = wide(model.device)
            further_norms = [norm(x).to(model.device, dtype) for x in further]
            norms["kept_norm"] = norm(torch.stack(further_norms))
        parts = [*upload.vectors.values()]
        if vector is not model:
            segments = self.client.layout.segments(upload.sent)
            parts += [vector[segment.columns] for segment in segments]
        if parts:
            norms["upload_norm"] = norm(torch.stack(list(map(norm, parts))))
        return norms

    def keep(self, upload: Payload) -> None:
        """Store the upload: write the uploaded blocks to the server's copy of the client's last
        upload, and add 1 to the number of the client's rounds. In the copy, blocks that were not
        uploaded keep their earlier values (KAPC+BLS, Eq. 33)."""
        state = self.client.state
        if self.run.policy.keeps_received:
            segments = self.client.layout.segments(upload.sent)
            copy_columns(state.received[MODEL], upload.vector, segments)
        for slot, vector in upload.vectors.items():
            state.received[slot].copy_(vector)
        state.rounds += 1

    def notify(self) -> None:
        """Call `on_client_end` of every observer."""
        if self.parts.observers:
            with self.seeded():
                for observer in self.parts.observers:
                    observer.on_client_end(self.run, self.id)

    def count_operations(self) -> None:
        """Write the columns `flops_...` to the client's result. Columns whose FLOPs are unknown are
        left out, and the result's `uncounted` says why."""
        name = self.group.name
        cost = self.trainer.cost
        result = self.result
        if cost is None:
            reason = self.trainer.uncounted
            result.uncounted = f"a training step of {name} could not be counted ({reason})"
            return
        result.values |= cost.by_column(0, 0, 0) | self.flops  # columns without operations are 0
        if math.isfinite(self.client.flops):
            result.values["flops_extra"] += int(self.client.flops)
        else:
            del result.values["flops_extra"]
            result.uncounted = f"a hook changed {name} without a backward pass through the model"

    # ---------------------------------------------------------------- scores and hooks

    def score(self, kind: str) -> Steps:
        """Score the client's personal model if models of this `kind` are scored in the round."""
        evaluator = self.parts.evaluator
        if self.scored and evaluator.wants(kind):
            self.stage = "evaluation"
            vector = self.run.method.personal(self.client)
            ahead = evaluator.cache.can_score_ahead(self.client)
            model = evaluator.cache.model(kind, self.client, vector, ahead)
            if ahead:
                yield model
            self.result.values |= evaluator.scores(model)
            self.timer.lap("evaluation")

    def transform(self, hook: str, payload: Payload) -> None:
        """Call a hook of every transform, in order.

        Args:
            hook: its name, `on_download` or `on_upload`.

        Raises:
            BadInput: a transform has changed the payload or the client's memory without declaring
                it.
        """
        for transform in self.parts.transforms:
            vector = payload.vector
            sent = payload.sent.tobytes()
            method = getattr(transform, hook)
            with self.hook(method, getattr(Transform, hook)):
                method(self.client, payload)
            _check_memory(self.client, transform)
            declares = hook.replace("on_", "changes_")
            changed = payload.vector is not vector or payload.sent.tobytes() != sent
            if changed and not getattr(transform, declares):
                raise undeclared(transform, declares, f"its {hook} changes the sent tensors")

    def metered(self) -> AbstractContextManager[object]:
        """Return a context that counts passes of the bound model as FLOPs outside of the phases."""
        return self.trainer.meter.attach(self.client, self.trainer.cost)

    def hook(
        self, hook: Callable[..., object], inherited: Callable[..., object]
    ) -> AbstractContextManager[object]:
        """Return the context in which to call a hook of the method or of a transform.

        This is `seeded` if the class overrides the hook. The default implementation neither draws
        random numbers nor uses the model; it gets an empty context, which costs less.

        Args:
            hook: the bound hook that will be called.
            inherited: the default implementation in the base class.
        """
        if getattr(hook, "__func__", None) is inherited:
            self._hooks += 1
            return nullcontext()
        return self.seeded()

    def seeded(self) -> AbstractContextManager[object]:
        """Seed random numbers by the run's seed, the client, the round and the number of earlier
        hooks; returns a context that counts passes of the bound model (`metered`)."""
        self._hooks += 1
        seed_all(self._key ^ self._hooks, self.run.device)
        return self.metered()

    @cached_property
    def _key(self) -> int:
        return key(self.run.config.seed, "visit", self.id, self.t)


def _check_memory(client: Client, part: object) -> None:
    """Raise `BadInput` if `part`, the method or a transform, has written to the client's memory
    although the run keeps no client states."""
    if client.memory and not client.run.policy.keeps_clients:
        name = next(iter(client.memory))
        reason = f"it writes client.memory[{name!r}], which would be lost"
        raise undeclared(part, "client_memory", reason)
