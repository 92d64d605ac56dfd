"""The centre: a federation whose visits and scores are made by sites. All else of a round is the
engine's.

Only step 3 of `Federation.round`, the visits, and the scores of what sites alone can score are
other than in a simulation: `RemoteVisits` sends messages in place of training and scoring.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning import __version__
from fl_lightning.callbacks.base import Callback, Transform
from fl_lightning.configuration.config import Config, check
from fl_lightning.core import Client, Payload
from fl_lightning.core.run import ModelGroup
from fl_lightning.engine.evaluation import unjudged
from fl_lightning.engine.federation import Federation
from fl_lightning.engine.record import ClientResult, Results, Timer
from fl_lightning.engine.worker import Worker
from fl_lightning.foundation.errors import BadClient
from fl_lightning.run import assemble
from fl_lightning.sites import wire
from fl_lightning.sites.data import Facts, NotHere, at_center
from fl_lightning.sites.exchange import MOST_BEYOND, Exchange
from fl_lightning.sites.site import digest_of, visits_of
from fl_lightning.storage.state import MODEL, ClientState


class RemoteVisits:
    """Sends each client of a cohort what is its, and takes in what comes back: sites train, and
    score every model on their own test data."""

    def __init__(self, worker: Worker, exchange: Exchange) -> None:
        self.run = worker.run
        self.pool = worker.pool
        self.evaluator = worker.evaluator
        self.transforms = worker.transforms
        self.observers = worker.observers
        self.exchange = exchange
        self.forms: dict[int, defaultdict[str, Counter[tuple[tuple[int, ...], torch.dtype]]]] = {
            group.index: defaultdict(Counter) for group in self.run.groups
        }
        """By the model's group: shapes and types of what has come beside vectors."""

    def state(self, client: int) -> ClientState:
        """What the server last received of a site. The client's own vectors are NaN: they never
        arrive.

        Where it has a copy of its own (`keeps_received`), that begins with the first values, as in
        a simulation.
        """
        if client not in self.run.states:
            layout = self.run.group_of(client).layout
            for vector in self.pool.state(client).vectors.values():
                vector.copy_(wire.empty(layout, vector))
        return self.run.states[client]

    def visits(
        self, t: int, cohort: list[int], downloads: dict[int, Payload], scored: bool, timer: Timer
    ) -> Results:
        """A visit by message to every client of `cohort`; which of them failed, and why.

        Raises:
            BadClient: one failed, and the run does not go on without it
                (`federation.on_bad_client`).
        """
        results = Results()
        for c in cohort:
            self._select(t, c, downloads[c])
        left = list(cohort)
        attempts = 2 if self.run.config.federation.on_bad_client == "retry" else 1
        for attempt in range(1, attempts + 1):
            messages: dict[int, bytes] = {}
            for c in left:
                message = self.context(c, with_models=False)
                message |= {"kind": "visit", "round": t, "scored": scored}
                message["payload"] = wire.of_payload(downloads[c])
                messages[c] = self.exchange.pack(message, c)
            answers = self.exchange.ask(t, "visit", messages, attempt)
            failures = self._taken(t, answers, downloads, results)
            for failure in failures:
                if not self.run.tolerant:
                    raise failure
                results.failures.append((failure, "retried" if attempt < attempts else "skipped"))
            left = [failure.client for failure in failures]
            if not left:
                break
        timer.lap("client")
        return results

    def _select(self, t: int, c: int, download: Payload) -> None:
        """Let transforms change what is about to be sent."""
        if self.transforms:
            client = Client(self.run, self.run.group_of(c), c, t, self.state(c))
            client.payload = download
            for transform in self.transforms:
                transform.on_download(client, download)

    def _taken(
        self,
        t: int,
        answers: Mapping[int, wire.Message | None],
        downloads: Mapping[int, Payload],
        results: Results,
    ) -> list[BadClient]:
        """Put answers where the server looks for them; the failures of the others."""
        failures: list[BadClient] = []
        uploads: dict[int, tuple[wire.Message, Payload]] = {}
        for c, content in answers.items():
            group = self.run.group_of(c)
            with self.exchange.naming(t, c, "upload", failures):
                answer = self.exchange.read(t, c, content)
                upload = wire.to_payload(answer.get("payload"), group.layout, group.initial)
                uploads[c] = answer, upload
                for name, tensor in (upload.statistics | upload.extra).items():
                    self.forms[group.index][name][tuple(tensor.shape), tensor.dtype] += 1
        for c, (answer, upload) in uploads.items():
            with self.exchange.naming(t, c, "upload", failures):
                self._check(c, upload)
                kept = {
                    name: tensor
                    for transform in self.transforms
                    for name, tensor in transform.init_client(self.run).items()
                }
                memory = wire.check_memory(kept, answer.get("memory"))
                result = ClientResult(c, wire.values_of(answer))
                result.uncounted = str(answer.get("uncounted", ""))
                result.traffic = np.array((downloads[c].by_layer, upload.by_layer))
                result.sent = np.array((downloads[c].layers_sent, upload.layers_sent))
                result.statistics = upload.statistics | upload.extra
                results.clients[c] = result
                self._keep(c, upload, memory)
        return sorted(failures, key=lambda failure: failure.client)

    def _check(self, c: int, upload: Payload) -> None:
        """Raise `Unreadable` for an upload that the method does not make."""
        run = self.run
        group = self.run.group_of(c)
        slots = {name for name, slot in run.method.slots().items() if slot.exchanged}
        more = (upload.sent & ~group.up_mask).any() or upload.further
        if more or not set(upload.vectors) <= slots:
            raise wire.Unreadable("it holds what the method does not upload")
        parts: list[Any] = [run.method.traits, *self.transforms]
        whole = np.array_equal(upload.sent, group.up_mask)
        if set(upload.vectors) != slots or not (
            whole or any(part.changes_upload for part in parts)
        ):
            raise wire.Unreadable("blocks or vectors are missing that the method uploads")
        beside = upload.statistics | upload.extra
        forms = self.forms[group.index]
        wire.check_beside(beside, run.method.beside(), run.data.num_classes, forms)
        wire.check_finite(upload)

    def _keep(self, c: int, upload: Payload, memory: Mapping[str, Tensor]) -> None:
        """Keep an upload as what the server last received."""
        state = self.state(c)
        layout = self.run.group_of(c).layout
        columns = wire.columns(upload.vector, layout, upload.sent)
        wire.fill(state.received[MODEL], layout, upload.sent, columns)
        for slot, vector in upload.vectors.items():
            state.received[slot].copy_(vector)
        state.memory |= memory
        state.rounds += 1
        for observer in self.observers:
            observer.on_client_end(self.run, c)

    # ---------------------------------------------------------------- scores

    def context(self, c: int, with_models: bool) -> wire.Message:
        """What the server has for a client now: whether there is a global model, and with
        `with_models` that model."""
        run = self.run
        group = self.run.group_of(c)
        evaluator = self.evaluator
        # and how many visits the site's state must have behind it
        message: wire.Message = {
            "has_global": evaluator.has_global,
            "uploaded": c in run.server.uploaded,
            "visits": visits_of(run, c),
        }
        model = evaluator.global_model(c) if with_models else None
        if model is not None:
            message["global"] = _places(model, group)
        elif with_models and run.relation.is_global:
            message["shared"] = {
                "sent": np.flatnonzero(group.down_mask).tolist(),
                "model": wire.columns(group.vectors[MODEL], group.layout, group.down_mask),
            }
        return message

    def scores(self, t: int, results: Results) -> None:
        """Scores of models that exist only now, by one more message to each client of the round."""
        evaluator = self.evaluator
        has_global = evaluator.has_global and evaluator.wants("global")
        if not (has_global or evaluator.wants("finetuned")):
            return
        for c, values in self._ask(
            t, "score", list(results.clients), results, wire.values_of
        ).items():
            results.clients[c].values |= values

    def finals(self) -> dict[int, dict[str, Any]]:
        """Kinds and scores of the final models of all clients, by their sites."""
        run = self.run
        results = Results()
        finals = self._ask(run.server.round, "final", range(run.clients), results, wire.final_of)
        return finals | {failure.client: unjudged(failure) for failure, _ in results.failures}

    def _ask(
        self,
        t: int,
        kind: str,
        clients: Sequence[int],
        results: Results,
        read: Callable[[wire.Message], dict[str, Any]],
    ) -> dict[int, dict[str, Any]]:
        """What `read` finds in the answers of those who have answered."""
        messages = {}
        for c in clients:
            message = self.context(c, with_models=True) | {"kind": kind, "round": t}
            messages[c] = self.exchange.pack(message, c)
        answers = self.exchange.ask(t, kind, messages, 1)
        taken = {}
        failures: list[BadClient] = []
        for c in clients:
            with self.exchange.naming(t, c, "evaluation", failures):
                taken[c] = read(self.exchange.read(t, c, answers.get(c)))
        for failure in failures:
            if not self.run.tolerant:
                raise failure
            results.failures.append((failure, "not judged"))
        return taken


def _places(model: Tensor, group: ModelGroup) -> wire.Message:
    """A server's model for a client: the blocks that are sent, and which are the client's own."""
    sent = group.down_mask.copy()
    own = []
    for k, block in enumerate(group.layout.blocks):
        numbers = model[block.start : block.stop]
        if bool(numbers.isnan().all()) and block.size:
            own.append(k)
            sent[k] = False
        elif not torch.equal(numbers, group.initial[block.start : block.stop]):
            sent[k] = True
    columns = wire.columns(model, group.layout, sent)
    return {"sent": np.flatnonzero(sent).tolist(), "own": own, "model": columns}


# ---------------------------------------------------------------- putting it together


def federation_of(
    exchange: Exchange,
    facts: Facts,
    public: Path | None,
    fabric: Fabric,
    config: Config,
    folder: Path,
    callbacks: Sequence[Callback],
) -> Federation:
    """The federation at the centre, once all sites have told how many samples they have.

    Raises:
        BadInput: it cannot be deployed; a line says what reads what does not travel.
    """
    check_deployable(config, callbacks)
    exchange.tolerant = config.federation.on_bad_client != "stop"
    sizes = exchange.gathered(config.clients)
    parts = {
        part: {c: size[k] for c, size in sizes.items()}
        for k, part in enumerate(("train", "validation", "test"))
    }
    try:
        fed = assemble(
            fabric, config, folder, list(callbacks), at_center(facts, config, parts, public)
        )
    except NotHere as error:
        name = config.method.class_path.rpartition(".")[2].lower()
        raise error.refusal(name) from error
    exchange.check_beginnings(digest_of(fed), __version__)
    return remote(fed, exchange)


def remote(fed: Federation, exchange: Exchange) -> Federation:
    """`fed` with its visits and scores made by sites."""
    run = fed.run
    exchange.method = run.method_name
    vectors = 1 + sum(slot.exchanged for slot in run.method.slots().values())
    exchange.most = MOST_BEYOND + 2 * vectors * max(group.initial.nbytes for group in run.groups)
    return Federation(fed.worker, RemoteVisits(fed.worker, exchange))


def check_deployable(config: Config, callbacks: Sequence[Callback]) -> None:
    """Raise `BadInput` for what has no meaning, or another one, where every client is a site of its
    own."""
    for callback in callbacks:
        runs_there = not isinstance(callback, Transform) or callback.deployed
        allowed = "it must be null: sites cannot run it"
        check(callback.config_key, type(callback).__name__, runs_there, allowed)
    later = "fl-train join gives a later client its model"
    data = config.data
    task = "it must be null: sites have own tasks"
    everyone = "it must be false: no site has all"
    for key, value, allowed in (
        ("held_out_clients", data.held_out_clients, f"it must be 0: {later}"),
        ("held_out", data.held_out, f"it must be null: {later}"),
        ("global_test", data.global_test, f"{everyone} test data"),
        ("drift_every", data.drift_every, task),
    ):
        check(f"data.{key}", value, not value, allowed)
    executor = config.fabric.executor
    alone = executor in ("auto", "loop")
    check("fabric.executor", executor, alone, "it must be auto or loop: a site has one client")
