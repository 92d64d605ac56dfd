"""The centre: the server's side of a deployment, whose clients train and are scored at their sites.

The engine runs the rounds as in a simulation. `RemoteVisits` sends messages to the sites where the
simulation would train a client (step 3 of `Federation.round`) or score a model on its data.
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
from fl_lightning.engine.evaluation import missing_scores
from fl_lightning.engine.federation import Federation
from fl_lightning.engine.record import ClientResult, Results, Timer
from fl_lightning.engine.worker import Worker
from fl_lightning.foundation.errors import BadClient
from fl_lightning.run import assemble
from fl_lightning.sites import wire
from fl_lightning.sites.data import NotTransmitted, SiteFacts, at_center
from fl_lightning.sites.exchange import MOST_BEYOND, Exchange
from fl_lightning.sites.site import digest_of, visits_of
from fl_lightning.storage.state import MODEL, ClientState


class RemoteVisits:
    """Has sites train their clients and score models on their own test data, by messages; takes the
    place of `Worker` in the engine."""

    def __init__(self, worker: Worker, exchange: Exchange) -> None:
        self.run = worker.run
        self.pool = worker.pool
        self.evaluator = worker.evaluator
        self.transforms = worker.transforms
        self.observers = worker.observers
        self.exchange = exchange
        self.tensor_types: dict[int, dict[str, Counter[wire.TensorType]]] = {
            group.index: defaultdict(Counter) for group in self.run.groups
        }
        """How often each tensor type has arrived, by architecture (index of the model group) and
        by name of the upload's tensor (`Method.beside`)."""

    def state(self, client: int) -> ClientState:
        """Return those parts of a client's state that the server knows.

        The client's own vectors stay at its site and are NaN here. The server's copy of the
        client's last upload exists if the method declares `keeps_received`; before the first upload
        it equals the initial model.
        """
        if client not in self.run.states:
            layout = self.run.group_of(client).layout
            for vector in self.pool.state(client).vectors.values():
                vector.copy_(wire.empty(layout, vector))
        return self.run.states[client]

    def visits(
        self, t: int, cohort: list[int], downloads: dict[int, Payload], scored: bool, timer: Timer
    ) -> Results:
        """Have the sites of `cohort` train in round `t`; return results and failures.

        Args:
            t: the round, from 1.
            cohort: clients of the round.
            downloads: the payload for each client.
            scored: whether models are scored in this round.
            timer: is given the time of all visits together, as `client`.

        Raises:
            BadClient: a client failed, and `federation.on_bad_client` is stop.
        """
        results = Results()
        for client in cohort:
            self._transform_download(t, client, downloads[client])
        pending = list(cohort)
        attempts = 2 if self.run.config.federation.on_bad_client == "retry" else 1
        for attempt in range(1, attempts + 1):
            messages: dict[int, bytes] = {}
            for client in pending:
                message = self.server_state_for(client, with_models=False)
                message |= {
                    "kind": "visit",
                    "round": t,
                    "scored": scored,
                    "payload": wire.of_payload(downloads[client]),
                }
                messages[client] = self.exchange.pack(message, client)
            answers = self.exchange.ask(t, "visit", messages, attempt)
            failures = self._receive(t, answers, downloads, results)
            outcome = "retried" if attempt < attempts else "skipped"
            self._record(failures, outcome, results)
            pending = [failure.client for failure in failures]
            if not pending:
                break
        timer.lap("client")
        return results

    def _transform_download(self, t: int, c: int, download: Payload) -> None:
        """Run the transforms' `on_download` on a client's payload."""
        if self.transforms:
            client = Client(
                self.run,
                self.run.group_of(c),
                c,
                t,
                self.state(c),
            )
            client.payload = download
            for transform in self.transforms:
                transform.on_download(client, download)

    def _record(
        self,
        failures: Sequence[BadClient],
        outcome: str,
        results: Results,
    ) -> None:
        """Add failures with their `outcome` to `results`; raise the first if the run does not go on
        without failed clients."""
        for failure in failures:
            if not self.run.tolerant:
                raise failure
            results.failures.append((failure, outcome))

    def _receive(
        self,
        t: int,
        answers: Mapping[int, wire.Message | None],
        downloads: Mapping[int, Payload],
        results: Results,
    ) -> list[BadClient]:
        """Add the sites' answers to `results` and to the clients' states; return the failures in
        the order of clients."""
        failures: list[BadClient] = []
        uploads: dict[int, tuple[wire.Message, Payload]] = {}
        entries = self.run.method.beside()
        # tensor types of all answers are counted before the first answer is checked
        for c, content in answers.items():
            group = self.run.group_of(c)
            with self.exchange.collecting(t, c, "upload", failures):
                answer = self.exchange.checked(t, c, content)
                upload = wire.to_payload(
                    answer.get("payload"),
                    group.layout,
                    group.initial,
                )
                uploads[c] = answer, upload
                for name, tensor in (upload.statistics | upload.extra).items():
                    if name in entries:
                        tensor_type = wire.tensor_type(tensor, entries[name])
                        self.tensor_types[group.index][name][tensor_type] += 1
        initial_memory: dict[str, Tensor] = {}
        for transform in self.transforms:
            initial_memory |= transform.init_client(self.run)
        for c, (answer, upload) in uploads.items():
            with self.exchange.collecting(t, c, "upload", failures):
                self._check(c, upload)
                memory = wire.check_memory(initial_memory, answer.get("memory"))
                result = ClientResult(c, wire.values_of(answer))
                result.uncounted = str(answer.get("uncounted", ""))
                result.count(downloads[c], upload)
                results.clients[c] = result
                self._keep(c, upload, memory)
        return sorted(failures, key=lambda failure: failure.client)

    def _check(self, c: int, upload: Payload) -> None:
        """Raise `Unreadable` for an upload whose parts are not those that the method declares."""
        run = self.run
        group = run.group_of(c)
        slots = {name for name, slot in run.method.slots().items() if slot.exchanged}
        received_slots = set(upload.vectors)
        further_blocks = (upload.sent & ~group.up_mask).any()
        if further_blocks or upload.further or not received_slots <= slots:
            raise wire.Unreadable("it holds blocks or vectors that the method does not upload")
        parts: list[Any] = [run.method.traits, *self.transforms]
        may_omit_blocks = any(part.changes_upload for part in parts)
        has_blocks = may_omit_blocks or np.array_equal(upload.sent, group.up_mask)
        if received_slots != slots or not has_blocks:
            raise wire.Unreadable("blocks or vectors are missing that the method uploads")
        wire.check_beside(
            upload.statistics | upload.extra,
            run.method.beside(),
            run.data.num_classes,
            self.tensor_types[group.index],
        )
        wire.check_finite(upload)

    def _keep(
        self,
        c: int,
        upload: Payload,
        memory: Mapping[str, Tensor],
    ) -> None:
        """Store an upload as the server's copy, and count the client's round."""
        state = self.state(c)
        layout = upload.layout
        columns = wire.packed(upload.vector, layout, upload.sent)
        wire.unpack_into(state.received[MODEL], layout, upload.sent, columns)
        for slot, vector in upload.vectors.items():
            state.received[slot].copy_(vector)
        state.memory |= memory
        state.rounds += 1
        for observer in self.observers:
            observer.on_client_end(self.run, c)

    # ---------------------------------------------------------------- scores

    def server_state_for(self, c: int, with_models: bool) -> wire.Message:
        """Return the entries of a message that describe the server's state to client `c`.

        - `has_global`: whether the server has a complete model for every client.
        - `uploaded`: whether the client has uploaded before.
        - `visits`: number of the client's visits whose results the server has accepted. The site
          continues from the client's state after the last of them.
        - `global`: the server's complete model for the client, if there is one.
        - `shared`: without a complete model, the blocks that all clients download, if the relation
          gives all clients the same.

        Args:
            c: the client.
            with_models: whether to add `global` or `shared`.
        """
        run = self.run
        group = run.group_of(c)
        evaluator = self.evaluator
        message: wire.Message = {
            "has_global": evaluator.has_global,
            "uploaded": c in run.server.uploaded,
            "visits": visits_of(run, c),
        }
        if not with_models:
            return message
        model = evaluator.global_model(c)
        if model is not None:
            message["global"] = _unknown_blocks(model, group)
        elif run.relation.is_global:
            message["shared"] = {
                "sent": np.flatnonzero(group.down_mask).tolist(),
                "model": wire.packed(
                    group.vectors[MODEL],
                    group.layout,
                    group.down_mask,
                ),
            }
        return message

    def scores(self, t: int, results: Results) -> None:
        """Add scores of the models that exist only after aggregation (global, fine-tuned), by one
        more message to each client of the round."""
        evaluator = self.evaluator
        has_global = evaluator.has_global and evaluator.wants("global")
        if not (has_global or evaluator.wants("finetuned")):
            return
        scores = self._ask(
            t,
            "score",
            list(results.clients),
            results,
            wire.values_of,
        )
        for client, values in scores.items():
            results.clients[client].values |= values

    def finals(self) -> dict[int, dict[str, Any]]:
        """Have every site score its client's final model; return kind of model and scores by
        client."""
        run = self.run
        results = Results()
        finals = self._ask(
            run.server.round,
            "final",
            range(run.clients),
            results,
            wire.final_of,
        )
        return finals | {failure.client: missing_scores(failure) for failure, _ in results.failures}

    def _ask(
        self,
        t: int,
        kind: str,
        clients: Sequence[int],
        results: Results,
        read: Callable[[wire.Message], dict[str, Any]],
    ) -> dict[int, dict[str, Any]]:
        """Ask the sites of `clients` for scores; return them by client, and add failures to
        `results`.

        Args:
            t: the round.
            kind: kind of the messages, `score` or `final`.
            clients: the clients whose sites are asked.
            results: results of the round.
            read: function that returns the scores in an answer.
        """
        messages = {}
        for client in clients:
            message = self.server_state_for(client, with_models=True) | {"kind": kind, "round": t}
            messages[client] = self.exchange.pack(message, client)
        answers = self.exchange.ask(t, kind, messages, 1)
        scores = {}
        failures: list[BadClient] = []
        for client in clients:
            with self.exchange.collecting(t, client, "evaluation", failures):
                scores[client] = read(
                    self.exchange.checked(
                        t,
                        client,
                        answers[client],
                    )
                )
        self._record(failures, "not judged", results)
        return scores


def _unknown_blocks(model: Tensor, group: ModelGroup) -> wire.Message:
    """Return the blocks of the server's model for a client that its site must be sent.

    `sent` lists blocks that are downloaded in each round or differ from the initial model; `model`
    holds their numbers. `own` lists blocks that are NaN at the server: the site has its own.
    """
    sent = group.down_mask.copy()
    own_blocks = []
    for k, block in enumerate(group.layout.blocks):
        numbers = model[block.start : block.stop]
        initial = group.initial[block.start : block.stop]
        if block.size and bool(numbers.isnan().all()):
            own_blocks.append(k)
            sent[k] = False
        elif not torch.equal(numbers, initial):
            sent[k] = True
    return {
        "sent": np.flatnonzero(sent).tolist(),
        "own": own_blocks,
        "model": wire.packed(model, group.layout, sent),
    }


# ---------------------------------------------------------------- putting it together


def federation_of(
    exchange: Exchange,
    facts: SiteFacts,
    public: Path | None,
    fabric: Fabric,
    config: Config,
    folder: Path,
    callbacks: Sequence[Callback],
) -> Federation:
    """Wait until all sites are connected; return the `Federation` that trains at them.

    Args:
        exchange: exchange of messages with the sites.
        facts: the app's facts about the data.
        public: file with public samples at the centre; None: there is none.
        fabric: this process's Fabric.
        config: the app's configuration.
        folder: the run folder.
        callbacks: the run's callbacks.

    Raises:
        BadInput: a setting or the method cannot be deployed; the message names the hook that reads
            data which stay at sites.
        RunFailed: sites are missing, and `federation.on_bad_client` is stop.
    """
    check_deployable(config, callbacks)
    exchange.tolerant = config.federation.on_bad_client != "stop"
    sizes = exchange.wait_for_sites(config.clients)
    try:
        data = at_center(facts, config, sizes, public)
        fed = assemble(fabric, config, folder, list(callbacks), data)
    except NotTransmitted as error:
        name = config.method.class_path.rpartition(".")[2].lower()
        raise error.as_bad_input(name) from error
    exchange.check_equal_start(digest_of(fed), __version__)
    run = fed.run
    exchange.method = run.method_name
    vectors = 1 + sum(slot.exchanged for slot in run.method.slots().values())
    largest = max(group.initial.nbytes for group in run.groups)
    exchange.most = MOST_BEYOND + 2 * vectors * largest
    return Federation(fed.worker, RemoteVisits(fed.worker, exchange))


def check_deployable(config: Config, callbacks: Sequence[Callback]) -> None:
    """Raise `BadInput` for an executor, a callback or a `data` key that cannot be used when every
    client is a site of its own."""
    for callback in callbacks:
        is_deployable = not isinstance(callback, Transform) or callback.deployed
        requirement = "it must be null: sites cannot run it"
        check(callback.config_key, type(callback).__name__, is_deployable, requirement)
    later = "fl-train join gives a later client its model"
    requirements = {
        "held_out_clients": f"it must be 0: {later}",
        "held_out": f"it must be null: {later}",
        "global_test": "it must be false: no site has all test data",
        "drift_every": "it must be null: a site's task is its own data",
    }
    for key, requirement in requirements.items():
        value = getattr(config.data, key)
        check(f"data.{key}", value, not value, requirement)
    executor = config.fabric.executor
    requirement = "it must be auto or loop: a site has one client"
    check("fabric.executor", executor, executor in ("auto", "loop"), requirement)
