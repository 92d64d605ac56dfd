"""The centre: a federation whose visits and scores are made by sites. All else of a round is the
engine's.

Only step 3 of `Federation.round`, the visits, and the scores of what sites alone can score are
other than in a simulation: a `RemoteWorker` and a `RemoteEvaluator` send messages in place of
training and scoring.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
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
from fl_lightning.engine.evaluation import Evaluator
from fl_lightning.engine.federation import Federation
from fl_lightning.engine.pool import Pool
from fl_lightning.engine.record import ClientResult, Results, Timer
from fl_lightning.engine.worker import Worker
from fl_lightning.foundation.errors import BadClient, BadInput
from fl_lightning.run import assemble
from fl_lightning.sites import wire
from fl_lightning.sites.data import Facts, NotHere, at_center
from fl_lightning.sites.exchange import MOST_BEYOND, Exchange
from fl_lightning.sites.site import Located, digest_of, located, visits_of
from fl_lightning.storage.state import MODEL, ClientState


class RemotePool(Pool):
    """What the server last received of every site. The client's own vectors are NaN: they never
    arrive.

    Where it has a copy of its own (`keeps_received`), that begins with the first values, as in a
    simulation.
    """

    def _fresh(self, client: int) -> ClientState:
        state, layout = super()._fresh(client), self.run.group_of(client).layout
        for vector in state.vectors.values():
            vector.copy_(wire.empty(layout, vector))
        return state


class RemoteWorker(Worker):
    """Sends each client of a cohort what is its, and takes in what comes back."""

    exchange: Exchange
    forms: dict[int, defaultdict[str, Counter[tuple[tuple[int, ...], torch.dtype]]]]
    """By the model's group: shapes and types of what has come beside vectors."""

    def visits(
        self, t: int, cohort: list[int], downloads: dict[int, Payload], scored: bool, timer: Timer
    ) -> Results:
        """A visit by message to every client of `cohort`; which of them failed, and why.

        Raises:
            BadClient: one failed, and the run does not go on without it
                (`federation.on_bad_client`).
        """
        results, evaluator = Results(), self.evaluator
        assert isinstance(evaluator, RemoteEvaluator)
        for c in cohort:
            self._select(t, c, downloads[c])
        left = list(cohort)
        attempts = 2 if self.run.config.federation.on_bad_client == "retry" else 1
        for attempt in range(1, attempts + 1):
            messages: dict[int, bytes] = {}
            for c in left:
                described, tensors = wire.of_payload(downloads[c])
                header, more = evaluator.context(c, with_models=False)
                header |= {"kind": "visit", "round": t, "scored": scored, "payload": described}
                messages[c] = self.exchange.pack(header, tensors | more, c)
            answers = self.exchange.ask(t, "visit", messages, attempt)
            for c in left:
                self._learn_forms(c, answers.get(c))
            failed = [
                f
                for c in left
                if (f := self._take(t, c, answers.get(c), downloads[c], results)) is not None
            ]
            for failure in failed:
                if not self.run.tolerant:
                    raise failure
                results.failures.append((failure, "retried" if attempt < attempts else "skipped"))
            left = [failure.client for failure in failed]
            if not left:
                break
        timer.lap("client")
        return results

    def _select(self, t: int, c: int, download: Payload) -> None:
        """Let transforms change what is about to be sent."""
        if self.transforms:
            client = Client(self.run, self.run.group_of(c), c, t, self.pool.state(c))
            client.payload = download
            for transform in self.transforms:
                transform.on_download(client, download)

    def _learn_forms(self, c: int, answer: Any) -> None:
        """Count the shapes of what a site has sent beside its vectors: most sites are right."""
        forms = self.forms[self.run.group_of(c).index]
        for name, tensor in answer[1].items() if answer is not None else ():
            forms[name.partition(".")[2]][tuple(tensor.shape), tensor.dtype] += 1

    def _take(
        self, t: int, c: int, answer: Any, sent: Payload, results: Results
    ) -> BadClient | None:
        """Put one client's answer where the server looks for it; the failure, where there is no
        answer to take."""
        try:
            header, upload, kept = self._upload(t, c, answer)
            values = wire.values_of(header)
        except wire.Unreadable as error:
            return self.exchange.refused(t, c, "upload", error)
        except BadClient as failure:
            return failure
        state, layout = self.pool.state(c), self.run.group_of(c).layout
        state.received[MODEL].copy_(_over(state.received[MODEL], upload, layout))
        for slot, vector in upload.vectors.items():
            state.received[slot].copy_(vector)
        state.memory |= kept
        state.rounds += 1
        result = ClientResult(c, values, uncounted=str(header.get("uncounted", "")))
        result.traffic = np.array((sent.by_layer, upload.by_layer))
        result.sent = np.array((sent.layers_sent, upload.layers_sent))
        result.statistics = upload.statistics | upload.extra
        results.clients[c] = result
        self.client_ended(c)
        return None

    def _upload(self, t: int, c: int, answer: Any) -> tuple[wire.Header, Payload, wire.Tensors]:
        header, tensors = self.exchange.read(t, c, answer)
        group = self.run.group_of(c)
        upload = wire.to_payload(header.get("payload", {}), tensors, group.layout, group.initial)
        slots = {name for name, slot in self.run.method.slots().items() if slot.exchanged}
        if (
            not set(upload.vectors) <= slots
            or (upload.sent & ~group.up_mask).any()
            or upload.further
        ):
            raise wire.Unreadable("it holds what the method does not upload")
        changes = self.run.method.traits.changes_upload or any(
            transform.changes_upload for transform in self.transforms
        )
        if set(upload.vectors) != slots or not (
            changes or np.array_equal(upload.sent, group.up_mask)
        ):
            raise wire.Unreadable("blocks or vectors are missing that the method uploads")
        beside = upload.statistics | upload.extra
        wire.check_beside(
            beside, self.run.method.beside(), self.run.data.num_classes, self.forms[group.index]
        )
        wire.check_finite(upload)
        known = {
            name: x
            for transform in self.transforms
            for name, x in transform.init_client(self.run).items()
        }
        return header, upload, wire.check_memory(known, tensors)


class RemoteEvaluator(Evaluator):
    """Has sites score what they alone can: every model is scored on a client's own test data."""

    exchange: Exchange
    _finals: dict[int, dict[str, Any]]

    def context(self, c: int, with_models: bool) -> tuple[wire.Header, wire.Tensors]:
        """What the server has for a client now: whether there is a global model, and with
        `with_models` that model."""
        run, group = self.run, self.run.group_of(c)
        header: wire.Header = {"has_global": self.has_global, "uploaded": c in run.server.uploaded}
        header["visits"] = visits_of(run, c)  # that the site's state must have behind it
        tensors: wire.Tensors = {}
        model = self.global_model(c) if with_models else None
        if model is not None:
            header["global"], tensors["global"] = _places(model, group)
        elif with_models and run.relation.is_global:
            header["shared"] = np.flatnonzero(group.down_mask).tolist()
            tensors["shared"] = wire.columns(group.vectors[MODEL], group.layout, group.down_mask)
        return header, tensors

    def after_aggregation(self, t: int, results: Results) -> None:
        """Scores of models that exist only now, by one more message to each client of the round."""
        if not ((self.has_global and self.wants("global")) or self.wants("finetuned")):
            return
        for c, values in self._ask(
            t, "score", list(results.clients), results, wire.values_of
        ).items():
            results.clients[c].values |= values

    def everyone(self) -> dict[str, Any]:
        """The final models of all clients, by their sites."""
        results = Results()
        self._finals = self._ask(
            self.run.server.round, "final", range(self.run.clients), results, wire.final_of
        )
        self._lost = {failure.client: failure for failure, _ in results.failures}
        return super().everyone()

    def _final_scores(self, id: int) -> dict[str, Any]:
        if id in self._lost:
            raise self._lost[id]
        return self._finals[id]

    def _ask(
        self,
        t: int,
        kind: str,
        clients: Sequence[int],
        results: Results,
        read: Callable[[wire.Header], dict[str, Any]],
    ) -> dict[int, dict[str, Any]]:
        """What `read` finds in the answers of those who have answered."""
        messages = {}
        for c in clients:
            header, tensors = self.context(c, with_models=True)
            messages[c] = self.exchange.pack(header | {"kind": kind, "round": t}, tensors, c)
        answers, taken = self.exchange.ask(t, kind, messages, 1), {}
        for c in clients:
            try:
                taken[c] = read(self.exchange.read(t, c, answers.get(c))[0])
            except (BadClient, wire.Unreadable) as error:
                failure = (
                    error
                    if isinstance(error, BadClient)
                    else self.exchange.refused(t, c, "evaluation", error)
                )
                if not self.run.tolerant:
                    raise failure from None
                results.failures.append((failure, "not judged"))
        return taken


def _places(model: Tensor, group: Any) -> tuple[dict[str, list[int]], Tensor]:
    """Of a server's model for a client: which blocks are sent, and which are the client's own, and
    the former."""
    sent, own = group.down_mask.copy(), []
    for k, block in enumerate(group.layout.blocks):
        numbers = model[block.start : block.stop]
        if bool(numbers.isnan().all()) and block.size:
            own.append(k)
            sent[k] = False
        elif not sent[k] and not torch.equal(numbers, group.initial[block.start : block.stop]):
            sent[k] = True
    return {"sent": np.flatnonzero(sent).tolist(), "own": own}, wire.columns(
        model, group.layout, sent
    )


def _over(old: Tensor, upload: Payload, layout: Any) -> Tensor:
    """What the server has received of a client so far, with this upload in it."""
    new = old.clone()
    return wire.fill(
        new, layout, upload.sent, wire.columns(upload.vector, layout, upload.sent), "it"
    )


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
        raise refusal(config, located(error)) from error
    exchange.check_beginnings(digest_of(fed), __version__)
    return remote(fed, exchange)


def remote(fed: Federation, exchange: Exchange) -> Federation:
    """`fed` with its visits and scores made by sites."""
    old, run = fed.worker, fed.run
    pool = RemotePool(run, old.trainers)
    evaluator = RemoteEvaluator(run, old.trainers, old.guard, fed.reducer)
    worker = RemoteWorker(
        run, pool, old.trainers, old.guard, evaluator, old.transforms, old.observers
    )
    worker.exchange = evaluator.exchange = exchange
    worker.forms = {group.index: defaultdict(Counter) for group in run.groups}
    exchange.method = run.method_name
    vectors = 1 + sum(slot.exchanged for slot in run.method.slots().values())
    exchange.most = MOST_BEYOND + 2 * vectors * max(group.initial.nbytes for group in run.groups)
    return Federation(run, pool, worker, evaluator, fed.reducer)


def check_deployable(config: Config, callbacks: Sequence[Callback]) -> None:
    """Raise `BadInput` for what has no meaning, or another one, where every client is a site of its
    own."""
    for callback in callbacks:
        fine = not isinstance(callback, Transform) or callback.deployed
        allowed = "it must be null: sites cannot run it"
        check(callback.config_key, type(callback).__name__, fine, allowed)
    data, executor = config.data, config.fabric.executor
    later = "fl-train join gives a later client its model"
    check(
        "data.held_out_clients",
        data.held_out_clients,
        not data.held_out_clients,
        f"it must be 0: {later}",
    )
    check("data.held_out", data.held_out, not data.held_out, f"it must be null: {later}")
    check(
        "data.global_test",
        True,
        not data.global_test,
        "it must be false: no site has all test data",
    )
    check(
        "data.drift_every",
        data.drift_every,
        data.drift_every is None,
        "it must be null: sites have own tasks",
    )
    check(
        "fabric.executor",
        executor,
        executor in ("auto", "loop"),
        "it must be auto or loop: a site has one client",
    )


def refusal(config: Config, error: Located) -> BadInput:
    """The line for a method that reads what does not travel."""
    name = config.method.class_path.rpartition(".")[2].lower()
    return BadInput(
        "method",
        name,
        f"{error.hook} reads {error.what}, which does not travel: it cannot be deployed",
    )
