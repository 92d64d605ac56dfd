"""Which models are scored, and how: the clients' before and after local training, the global one,
fine-tuned copies."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor

from fl_lightning.core import Client, Phase, RunContext, Server
from fl_lightning.core.layout import copy_columns
from fl_lightning.core.protocols import Reducer
from fl_lightning.engine import scoring
from fl_lightning.engine.phases import job_of
from fl_lightning.engine.record import Guard, Results, finite, means, numbers, spread
from fl_lightning.engine.trainer import Trainer
from fl_lightning.foundation import log
from fl_lightning.foundation.errors import BadClient, BadInput, RunFailed
from fl_lightning.foundation.metric import MODELS, ONE_CLASS, PREDICTED
from fl_lightning.storage.state import MODEL, ClientState

_START = "received."
"""Before the names of what is kept of the model that a client began its last round with."""


class Whole(Protocol):
    """Whole models of the server: whether there is one for every client, and that of a client."""

    @property
    def whole(self) -> bool: ...  # noqa: D102
    def of(self, client: int) -> Tensor | None: ...  # noqa: D102


class ServerModels:
    """What the server has as a round begins, or has aggregated at its end."""

    def __init__(self, run: RunContext, reducer: Reducer) -> None:
        self.server = Server(run, run.server.round, [], reducer)

    @cached_property
    def whole(self) -> bool:
        """Whether the server has a whole model for every client."""
        return all(self.of(group.members[0]) is not None for group in self.server.run.groups)

    def of(self, client: int) -> Tensor | None:
        """What the server has for a client; None: no whole model."""
        run = self.server.run
        return run.method.global_model(self.server.groups[run.group_of(client).index], client)


class Evaluator:
    """Scores models. `run.judge` says by which kind of them the run is judged."""

    def __init__(
        self, run: RunContext, trainers: Sequence[Trainer], guard: Guard, models: Whole
    ) -> None:
        self.run, self.trainers, self.guard, self.models = run, trainers, guard, models
        self.stage = "evaluation"
        self.remembered = scoring.Remembered(run, trainers)
        self._scored: tuple[Tensor | None, Any] = (None, None)
        """The last global model that was scored on the test set of all, and how: several clients
        may share it."""

    @property
    def has_global(self) -> bool:
        """Whether the server has a whole model for every client."""
        return self.models.whole

    def global_model(self, client: int) -> Tensor | None:
        """The server's whole model for a client; None: there is none."""
        return self.models.of(client)

    @cached_property
    def keeps_start(self) -> bool:
        """Whether what a client began its last round with is kept: not where the server itself can
        tell it later."""
        return self.run.policy.keeps_start and (
            self.run.method.traits.starts == "both" or not self.has_global
        )

    def wants(self, kind: str) -> bool:
        """Whether models of this kind are scored in a scored round."""
        chosen = self.run.config.evaluation.models
        return kind == self.run.judge or (kind != "finetuned" if chosen is None else kind in chosen)

    def scores(self, kind: str, client: Client, vector: Tensor) -> dict[str, Tensor]:
        """`accuracy_KIND` of `vector` as a model of `client`; of the judge's kind also its accuracy
        on validation data, and on the test set of all, where there is one."""
        metric, judge, remembered = self.run.data.metric, self.run.judge, self.remembered
        digest = self._ready(kind, client, vector)
        measured = remembered.get(scoring.measured, kind, client, vector, client.data.test, digest)
        scores = {m.by(kind): value for m, value in measured.items() if m is not PREDICTED}
        if kind == judge and len(validation := client.data.validation):
            chosen = self.run.metric
            compute = scoring.score if chosen is metric else scoring.measured
            value: Any = remembered.get(compute, kind, client, vector, validation, digest)
            both = {metric: value} if chosen is metric else value
            scores |= {m.by("validation"): both[m] for m in (metric, chosen)}
        return scores | self._on_global_test(kind, client, vector, digest)

    def _ready(self, kind: str, client: Client, vector: Tensor) -> bytes:
        """The digest of `vector`, to be scored as `kind`. Without one it is bound; with one where
        it must be scored."""
        digest = self.remembered.digest(kind, client, vector)
        if not digest:
            client.ready(kind, vector)
        return digest

    def _on_global_test(
        self, kind: str, client: Client, vector: Tensor, digest: bytes
    ) -> dict[str, Tensor]:
        """`global_test_accuracy_KIND` of `vector`, which is `_ready`, where `data.global_test` asks
        for it."""
        part = self.run.data.global_test(self.run.device, self.run.dtype)
        if part is None or kind not in scoring.kinds_on_common(self.run, self.has_global):
            return {}
        if kind == "global" and self._scored[0] is vector:
            score, recall = self._scored[1]
        else:
            score, recall = self.remembered.get(
                scoring.on_common, kind, client, vector, part, digest
            )
        if kind == "global":
            self._scored = vector, (score, recall)
        return {self.run.data.metric.on_global_test(kind): score} | scoring.on_shares(
            kind, client, recall
        )

    def client(self, id: int, state: ClientState) -> Client:
        """A handle on `state` outside of a visit."""
        group = self.run.group_of(id)
        return Client(self.run, group, id, self.run.server.round, state)

    def at_rest(self, id: int, buffers: list[Tensor] | None = None) -> Client:
        """A client as it is between rounds (with other `buffers`, where some are given), on copies
        of whatever may be written to; its vectors on the device."""
        run, group, state = self.run, self.run.group_of(id), self.run.states.get(id)
        if state is None:
            slots = run.method.slots().items()
            vectors = {MODEL: group.initial} | {n: slot.first(group.initial) for n, slot in slots}
            memory = {k: v.clone() for k, v in run.method.init_client(run).items()}
            state = ClientState(id, vectors, group.initial_buffers, {}, 0, memory)
        vectors = {name: vector.to(run.device) for name, vector in state.vectors.items()}
        copies = [b.clone() for b in buffers or state.buffers]  # a model may write to them
        kept = ClientState(id, vectors, copies, {}, state.rounds, dict(state.memory))
        return self.client(id, kept)

    def beginning(self, id: int) -> tuple[Tensor, list[Tensor]]:
        """What a client begins a round with (home rank), as far as it is known between rounds:
        model and buffers.

        Its own, with what the server has for it now. Where the server mixes for each client anew,
        that mix is made in a round only: then it is the model that the client began its last round
        with.
        """
        run, client = self.run, self.at_rest(id)
        if self.keeps_start and run.took_part(id):
            # a file gives them back in any order
            count = sum(name.startswith(_START) for name in client.memory)
            kept = [client.memory[f"{_START}{k}"].to(run.device) for k in range(count)]
            return kept[0], kept[1:]
        model = self.global_model(id)
        if model is None and run.relation.is_global:
            model = client.group.vectors[MODEL]
        if run.policy.starts_from_server:
            client.state.buffers = client.group.first_buffers()
        # there is no last model to begin with
        first = run.method.traits.starts == "both" and not run.took_part(id)
        if model is not None and (run.method.traits.starts == "server" or first):
            if client.group.down_mask.all():
                client.state.vectors[MODEL] = model
            else:
                client.state.vectors[MODEL] = client[MODEL].clone()
                copy_columns(client[MODEL], model, client.layout.segments(client.group.down_mask))
        return run.method.personal(client), client.state.buffers

    def keep_beginning(self, client: Client) -> None:
        """Before training: keep the model that the client begins with, where the judge will ask for
        it at the end."""
        if self.keeps_start:
            for k, tensor in enumerate([self.run.method.personal(client), *client.state.buffers]):
                client.memory[f"{_START}{k}"] = self.run.store.stow(tensor.clone())

    def finetune(self, t: int, id: int) -> tuple[Tensor, list[Tensor]]:
        """A copy of the global model (else of the client's own), trained on its own data without
        any term: model and buffers, as `final_model` gives them; they are bound. `BadClient`: it is
        not finite."""
        run, model = self.run, self.global_model(id)
        if model is not None:
            vector, buffers = model, run.group_of(id).initial_buffers
        elif run.took_part(id):
            rest = self.at_rest(id)
            vector, buffers = run.method.personal(rest), rest.state.buffers
        else:
            vector, buffers = self.beginning(id)
        state = ClientState(id, {MODEL: vector.clone()}, [b.clone() for b in buffers], {})
        client = self.client(id, state)
        client.lr = run.learning_rate(max(t, 1))
        phase = Phase(epochs=run.config.evaluation.finetune_epochs or None, purpose="finetune")
        job = job_of(client, phase, t)
        job.keep = False
        self.trainers[client.group.index].loop.train([job])
        return finite(run, t, id, client[MODEL], "its fine-tuned copy"), state.buffers

    # ---------------------------------------------------------------- final models

    def final_model(self, id: int) -> tuple[str, Tensor, list[Tensor]]:
        """The model of a client that the judge names, as the run leaves it (home rank), on the
        device, to be read only.

        Returns:
            Its kind (`before`, `after`, `global`, `finetuned`), vector and buffers. The kind is the
            judge's, but for `after` and a client that never took part: what it would begin with,
            `before`, is all there is.

        Raises:
            BadInput: the checkpoint is of a run that was judged otherwise, and has no such model.
        """
        run = self.run
        judge, state = run.judge, run.states[id] if run.took_part(id) else None
        if judge == "finetuned":
            return judge, *self.finetune(run.server.round, id)
        needs_last = judge == "after" or self.keeps_start
        there = state is not None and (judge == "after" or f"{_START}0" in state.memory)
        if needs_last and id in run.server.uploaded and not there:
            allowed = (
                f"of {run.data.called(id)} no such model is kept: only a run that is itself judged "
                f"so keeps them"
            )
            raise BadInput("evaluation.judge", judge, allowed)
        if judge == "after" and state is not None:
            rest = self.at_rest(id)
            return judge, run.method.personal(rest), state.buffers
        if judge == "global" and (model := self.global_model(id)) is not None:
            return judge, model, run.group_of(id).initial_buffers
        return "before", *self.beginning(id)

    def everyone(self) -> dict[str, Any]:
        """Score the final models of all clients; returns their `summary`."""
        return self.summary(self.finals())

    def finals(self) -> dict[int, dict[str, Any]]:
        """Kinds and scores of the final models of this rank's clients, whether they took part or
        not."""
        run = self.run
        self._scored = None, None
        finals: dict[int, dict[str, Any]] = {}
        for id in run.at_home(range(run.clients)):
            try:
                with self.guard.naming(run.server.round, id, self):
                    finals[id] = self.final_scores(id, self.run.config.evaluation.predictions)
            except BadClient as failure:
                if not run.tolerant:
                    raise
                finals[id] = unjudged(failure)
        return finals

    def summary(self, mine: dict[int, dict[str, Any]]) -> dict[str, Any]:
        """What is said of final models, of which this rank has scored those of `mine`.

        All scores are under `final_accuracies`, by other metrics under `final_further`, and which
        kind of model each is of under `final_models`. Where failing clients are tolerated, the
        score of one that cannot be scored is NaN, and in no mean; its kind is empty.
        """
        run = self.run
        numbers([row for final in mine.values() for row in (final, final["further"])])
        gathered = run.processes.gather_by_client(mine)
        everyone = [gathered[c] for c in range(run.clients)]
        scores, models = [c["score"] for c in everyone], [c["kind"] for c in everyone]
        scored = [score for score in scores if not math.isnan(score)]
        if not scored:
            raise RunFailed("no client's final model can be judged")
        names = list(run.config.evaluation.metrics or ())
        further = [scoring.set_apart(c["further"], [*names, ONE_CLASS])[1] for c in everyone]
        scoring.tell_of_finals(run, further, names)
        metric, chosen = run.data.metric, run.metric
        on_all = means(everyone, map(metric.on_global_test, MODELS))
        finals = {metric.of(f"final_{name}"): n for name, n in spread(scored, metric).items()}
        values = [row[chosen.name] for row in further if chosen.name in row]
        if values:
            finals |= {chosen.of(f"final_{name}"): n for name, n in spread(values, chosen).items()}
        for name, value in (on_all | scoring.averaged(further, {n: n for n in names})).items():
            finals[f"final_{name}"] = value
        return {
            "judge": run.judge,
            "final_model": self._final_kind(),
            "final_kinds": dict(sorted(Counter(kind for kind in models if kind).items())),
            **finals,
            "final_accuracies": scores,
            "final_models": models,
            "final_further": further,
            "final_predictions": [c["predictions"] for c in everyone if "predictions" in c],
        }

    def _final_kind(self) -> str:
        """Whether final models are fine-tuned, one global one for all, or personal."""
        run = self.run
        if run.judge == "finetuned":
            return "finetuned"
        starts_global = run.policy.starts_from_server and self.has_global
        begins = run.judge == "before" and starts_global and not run.method.traits.adapts
        if not (run.judge == "global" or begins):
            return "personal"
        for group in run.groups:  # CFL and pFedHN: one for each client
            first = self.global_model(group.members[0])
            if any(self.global_model(c) is not first for c in group.members):
                return "personal"
        return "global"

    def final_scores(self, id: int, predicts: bool = False) -> dict[str, Any]:
        """Kind of a client's final model, its score on the client's test data, and those on the
        test set of all; by `further` what else it is scored by, and if it `predicts` what it says
        of each test sample."""
        kind, vector, buffers = self.final_model(id)
        client = self.at_rest(id, buffers)
        digest = self._ready(kind, client, vector)
        measured = self.remembered.get(
            scoring.measured, kind, client, vector, client.data.test, digest
        )
        values = {m.by(kind): value for m, value in measured.items() if m is not PREDICTED}
        values |= self._on_global_test(kind, client, vector, digest)
        columns = scoring.columns(self.run.config.evaluation.metrics, kind)
        further: dict[str, Any] = {
            n: values.pop(column) for n, column in columns.items() if column in values
        }
        further |= scoring.one_class(client, measured)
        scores = {
            "kind": kind,
            "score": values.pop(self.run.data.metric.by(kind)),
            "further": further,
            **values,
        }
        if predicts:
            scores["predictions"] = scoring.predictions(kind, client, vector)
        on_global = self.run.config.data.global_test and self.has_global and self.wants("global")
        model = self.global_model(id) if on_global else None
        if kind != "global" and model is not None:
            client.state.buffers = client.group.first_buffers()
            digest = self._ready("global", client, model)
            scores |= self._on_global_test("global", client, model, digest)
        return scores

    def after_aggregation(self, t: int, results: Results) -> None:
        """Scores of models that exist only now: the global one, and fine-tuned copies.

        A client that fails here has uploaded already: it only goes without the score.
        """
        self._scored, self.remembered.shared = (None, None), (None, b"")
        if self.has_global and self.wants("global"):
            global_ahead(self, results.clients)
        for id, result in results.clients.items():
            try:
                with self.guard.naming(t, id, self):
                    model = (
                        self.global_model(id) if self.has_global and self.wants("global") else None
                    )
                    if model is not None:
                        client = self.at_rest(id, self.run.group_of(id).initial_buffers)
                        result.values |= self.scores("global", client, model)
                    if self.wants("finetuned"):
                        vector, buffers = self.finetune(t, id)
                        result.values |= self.scores("finetuned", self.at_rest(id, buffers), vector)
            except BadClient as failure:
                if not self.run.tolerant:
                    raise
                results.failures.append((failure.bare(), "not judged"))
        self.remembered.shared = None


def global_ahead(evaluator: Evaluator, ids: Iterable[int]) -> None:
    """Score what the server has for these clients beside each other, where that can be."""
    remembered, models = evaluator.remembered, list[scoring.ToScore]()
    with contextlib.suppress(BadClient):
        for id in ids:
            client = evaluator.at_rest(id, evaluator.run.group_of(id).initial_buffers)
            model = evaluator.global_model(id) if remembered.takes(client) else None
            models += [] if model is None else [scoring.ToScore("global", client, model)]
        remembered.score_ahead(models)


def unjudged(failure: BadClient) -> dict[str, Any]:
    """The final scores of a client that failed."""
    log.say(f"{failure}; its final model is not judged")
    return {"kind": "", "score": math.nan, "further": {}}
