"""Scores clients' models before and after local training, the global model and fine-tuned
copies."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor

from fl_lightning.callbacks.base import Aggregator
from fl_lightning.core import Client, Phase, RunContext, Server
from fl_lightning.core.layout import copy_columns
from fl_lightning.engine import scoring
from fl_lightning.engine.phases import job_of
from fl_lightning.engine.record import Guard, Results, means, numbers, require_finite, spread
from fl_lightning.engine.trainer import Trainer
from fl_lightning.foundation import log
from fl_lightning.foundation.errors import BadClient, BadInput, RunFailed
from fl_lightning.foundation.metric import MODELS, ONE_CLASS, PREDICTED, Metric
from fl_lightning.storage.state import MODEL, ClientState

_START = "received."
"""Prefix of the tensors of the model with which a client began its last round."""


class GlobalModels(Protocol):
    """Provides the server's global models, complete with all blocks."""

    @property
    def has_global(self) -> bool:
        """Whether the server has a complete model for every client."""

    def global_model(self, client: int) -> Tensor | None:
        """Return the server's complete model (D,) for a client, or None."""


class ServerModels:
    """Provides global models from this process's copy of the server."""

    def __init__(self, run: RunContext, reducer: Aggregator) -> None:
        self.server = Server(run, run.server.round, [], reducer)

    @cached_property
    def has_global(self) -> bool:
        """Whether the server has a complete model for every client."""
        groups = self.server.run.groups
        return all(self.global_model(group.members[0]) is not None for group in groups)

    def global_model(self, client: int) -> Tensor | None:
        """Return the server's complete model (D,) for a client, or None."""
        run = self.server.run
        return run.method.global_model(self.server.groups[run.group_of(client).index], client)


@dataclass(eq=False)
class Evaluator:
    """Scores models in scored rounds and at the end of the run. The scores of models of the kind
    `run.judge` count as the run's."""

    run: RunContext
    trainers: Sequence[Trainer]
    guard: Guard
    models: GlobalModels
    stage = "evaluation"
    _on_global: tuple[Tensor | None, Any] = None, None
    """The last global model scored on the global test set, with its result. Clients that share the
    model share the result."""

    def __post_init__(self) -> None:
        self.cache = scoring.ScoreCache(self.run, self.trainers)

    @property
    def has_global(self) -> bool:
        """Whether the server has a complete model for every client."""
        return self.models.has_global

    def global_model(self, client: int) -> Tensor | None:
        """Return the server's complete model (D,) for a client, or None."""
        return self.models.global_model(client)

    @cached_property
    def keeps_start(self) -> bool:
        """Whether each client stores the model with which it began its last round.

        It does if the judge is `before`, so that this model is scored at the end of the run, and
        the server cannot compute the model again by then.
        """
        client_decides = self.run.method.traits.starts == "both" or not self.has_global
        return self.run.policy.keeps_start and client_decides

    def wants(self, kind: str) -> bool:
        """Whether models of this kind are scored in a scored round."""
        kinds = self.run.config.evaluation.models
        if kinds is None:
            return kind == self.run.judge or kind != "finetuned"
        return kind == self.run.judge or kind in kinds

    def scores(self, model: scoring.ScoredModel) -> dict[str, Tensor]:
        """Score a model on its client's test data; returns the scores by column.

        A model of the judge's kind is also scored on validation data, and a model of
        `scoring.kinds_on_global_test` also on the global test set.
        """
        kind = model.kind
        data = model.client.data
        scores = by_column(kind, model.get(scoring.measured, data.test))
        validation = data.validation
        if kind == self.run.judge and len(validation):
            metric = self.run.data.metric
            chosen = self.run.metric
            if chosen is metric:
                scores[metric.by("validation")] = model.get(scoring.score, validation)
            else:
                values = model.get(scoring.measured, validation)
                scores[metric.by("validation")] = values[metric]
                scores[chosen.by("validation")] = values[chosen]
        return scores | self._on_global_test(model)

    def _on_global_test(self, model: scoring.ScoredModel) -> dict[str, Tensor]:
        """Score a model on the global test set if there is one and models of this kind are scored
        on it; returns the scores by column (such as `global_test_accuracy_global`), else {}."""
        kind = model.kind
        part = self.run.data.global_test(self.run.device, self.run.dtype)
        if part is None or kind not in scoring.kinds_on_global_test(self.run, self.has_global):
            return {}
        last, result = self._on_global
        if kind != "global" or last is not model.vector:
            result = model.get(scoring.on_global_test, part)
        if kind == "global":
            self._on_global = model.vector, result
        score, recall = result
        scores = {self.run.data.metric.on_global_test(kind): score}
        return scores | scoring.class_share_score(kind, model.client, recall)

    def client(self, id: int, state: ClientState) -> Client:
        """Make a handle on a client with this `state`, outside of a visit."""
        group = self.run.group_of(id)
        return Client(
            self.run,
            group,
            id,
            self.run.server.round,
            state,
        )

    def at_rest(
        self,
        id: int,
        buffers: list[Tensor] | None = None,
    ) -> Client:
        """Make a handle on a client between rounds, on the client's home rank. Its vectors are on
        the device. Models may write to the handle's buffers, which are copies; nothing may write
        to its vectors, which may be the stored ones.

        Args:
            buffers: buffers to copy; None: the client's stored buffers.
        """
        run = self.run
        group = run.group_of(id)
        state = run.states.get(id)
        if state is None:
            vectors = {MODEL: group.initial}
            for name, slot in run.method.slots().items():
                vectors[name] = slot.first(group.initial)
            memory = {name: tensor.clone() for name, tensor in run.method.init_client(run).items()}
            state = ClientState(
                id,
                vectors,
                group.initial_buffers,
                {},
                0,
                memory,
            )
        vectors = {name: vector.to(run.device) for name, vector in state.vectors.items()}
        copies = [b.clone() for b in buffers or state.buffers]  # a model may write to them
        copy = ClientState(
            id,
            vectors,
            copies,
            {},
            state.rounds,
            dict(state.memory),
        )
        return self.client(id, copy)

    def beginning(self, id: int) -> tuple[Tensor, list[Tensor]]:
        """Return the model (D,) and buffers with which a client would begin the next round. Only
        the client's home rank can compute them.

        The shared blocks are those of the server's current model. If the server mixes a model for
        each client during a round, the model for the next round does not exist yet; then this is
        the model with which the client began its last round.
        """
        run = self.run
        starts = run.method.traits.starts
        client = self.at_rest(id)
        group = client.group
        if self.keeps_start and run.took_part(id):
            # a file gives them back in any order
            count = sum(name.startswith(_START) for name in client.memory)
            tensors = [client.memory[f"{_START}{k}"].to(run.device) for k in range(count)]
            return tensors[0], tensors[1:]
        model = self.global_model(id)
        if model is None and run.relation.is_global:
            model = group.vectors[MODEL]
        if run.policy.starts_from_server:
            client.state.buffers = group.first_buffers()
        # in its first round a client has no last model to begin with
        receives = starts == "server" or (starts == "both" and not run.took_part(id))
        if model is not None and receives:
            if not group.down_mask.all():
                composed = client[MODEL].clone()
                copy_columns(composed, model, client.layout.segments(group.down_mask))
                model = composed
            client.state.vectors[MODEL] = model
        return run.method.personal(client), client.state.buffers

    def keep_beginning(self, client: Client) -> None:
        """Store the model and buffers with which a client begins its training in its memory, if
        `keeps_start` is True."""
        if self.keeps_start:
            for k, tensor in enumerate([self.run.method.personal(client), *client.state.buffers]):
                client.memory[f"{_START}{k}"] = self.run.store.stow(tensor.clone())

    def finetune(self, t: int, id: int) -> tuple[Tensor, list[Tensor]]:
        """Train a copy of the global model on the client's data, with the task loss alone; without
        a global model, a copy of the client's own.

        Args:
            t: the round, which decides on the batches and the learning rate.

        Returns:
            The model (D,) and its buffers. The client's module stays bound to them.

        Raises:
            BadClient: the trained model is not finite.
        """
        run = self.run
        vector = self.global_model(id)
        if vector is not None:
            buffers = run.group_of(id).initial_buffers
        elif run.took_part(id):
            rest = self.at_rest(id)
            vector = run.method.personal(rest)
            buffers = rest.state.buffers
        else:
            vector, buffers = self.beginning(id)
        state = ClientState(id, {MODEL: vector.clone()}, [b.clone() for b in buffers], {})
        client = self.client(id, state)
        client.lr = run.learning_rate(max(t, 1))
        phase = Phase(epochs=run.config.evaluation.finetune_epochs or None, purpose="finetune")
        job = job_of(client, phase, t)
        job.keep = False
        self.trainers[client.group.index].loop.train([job])
        require_finite(
            run,
            t,
            id,
            client[MODEL],
            "its fine-tuned copy",
        )
        return client[MODEL], state.buffers

    # ---------------------------------------------------------------- final models

    def final_model(self, id: int) -> tuple[str, Tensor, list[Tensor]]:
        """Return the client's final model, of the judge's kind. Only the client's home rank can
        compute it.

        Returns:
            The kind (`before`, `after`, `global` or `finetuned`), the vector (D,) and the buffers,
            on the device; do not write to them. If the judge is `after`, a client that never took
            part has only a model of the kind `before`.

        Raises:
            BadInput: the checkpoint comes from a run with another judge, and lacks this model.
        """
        run = self.run
        judge = run.judge
        state = None
        if run.took_part(id):
            state = run.states[id]
        if judge == "finetuned":
            return judge, *self.finetune(run.server.round, id)
        needs_last = judge == "after" or self.keeps_start
        has_last = state is not None and (judge == "after" or f"{_START}0" in state.memory)
        if needs_last and id in run.server.uploaded and not has_last:
            requirement = (
                f"the run has stored no such model of {run.data.client_label(id)}: use the judge "
                "of the run, or train a run with this judge"
            )
            raise BadInput("evaluation.judge", judge, requirement)
        if judge == "after" and state is not None:
            rest = self.at_rest(id)
            return judge, run.method.personal(rest), state.buffers
        model = None
        if judge == "global":
            model = self.global_model(id)
        if model is not None:
            return judge, model, run.group_of(id).initial_buffers
        return "before", *self.beginning(id)

    def everyone(self) -> dict[str, Any]:
        """Score the final models of all clients on all ranks; returns their `summary`. The same as
        `summary(finals())`."""
        return self.summary(self.finals())

    def finals(self) -> dict[int, dict[str, Any]]:
        """Score the final model of each of this rank's clients, also of those that never took part;
        returns their `final_scores` by client."""
        run = self.run
        self._on_global = None, None
        finals = {}
        for id in run.at_home(range(run.clients)):
            try:
                with self.guard.naming(run.server.round, id, self):
                    finals[id] = self.final_scores(id, self.run.config.evaluation.predictions)
            except BadClient as failure:
                if not run.tolerant:
                    raise
                finals[id] = missing_scores(failure)
        return finals

    def summary(self, finals_here: dict[int, dict[str, Any]]) -> dict[str, Any]:
        """Return the summary of all clients' final models.

        `final_accuracies` holds the scores, `final_further` those by further metrics, and
        `final_models` the kinds. A client that failed has the score NaN, which counts in no mean,
        and an empty kind.

        Args:
            finals_here: this rank's `finals`.

        Raises:
            RunFailed: every client failed.
        """
        run = self.run
        numbers([row for final in finals_here.values() for row in (final, final["further"])])
        gathered = run.processes.gather_by_client(finals_here)
        everyone = [gathered[c] for c in range(run.clients)]
        scores = [final["score"] for final in everyone]
        kinds = [final["kind"] for final in everyone]
        scored = [score for score in scores if not math.isnan(score)]
        if not scored:
            raise RunFailed(
                "no client's final model could be scored: every client failed; see failure.txt"
            )
        names = list(run.config.evaluation.metrics or ())
        further = []
        for final in everyone:
            _, values = scoring.split_columns(final["further"], [*names, ONE_CLASS])
            further.append(values)
        if run.is_main:
            scoring.log_caveats(run, further, names)
        metric = run.data.metric
        summary: dict[str, Any] = {
            "judge": run.judge,
            "final_model": self._final_kind(),
            "final_kinds": dict(sorted(Counter(filter(None, kinds)).items())),
        }
        chosen = [row[run.metric.name] for row in further if run.metric.name in row]
        for of_metric, values_of_all in ((metric, scored), (run.metric, chosen)):
            if values_of_all:
                for statistic, value in spread(values_of_all, of_metric).items():
                    summary[of_metric.of(f"final_{statistic}")] = value
        averages = means(everyone, map(metric.on_global_test, MODELS))
        averages |= scoring.averaged(further, {name: name for name in names})
        for name, value in averages.items():
            summary[f"final_{name}"] = value
        predictions = [final["predictions"] for final in everyone if "predictions" in final]
        return summary | {
            "final_accuracies": scores,
            "final_models": kinds,
            "final_further": further,
            "final_predictions": predictions,
        }

    def _final_kind(self) -> str:
        """Return `finetuned`, `global` (all clients share one final model) or `personal`."""
        run = self.run
        if run.judge == "finetuned":
            return "finetuned"
        starts_global = run.policy.starts_from_server and self.has_global
        is_global = run.judge == "before" and starts_global and not run.method.traits.adapts
        if not (run.judge == "global" or is_global):
            return "personal"
        for group in run.groups:  # CFL and pFedHN have a global model for each client
            first = self.global_model(group.members[0])
            if any(self.global_model(c) is not first for c in group.members):
                return "personal"
        return "global"

    def final_scores(
        self,
        id: int,
        predicts: bool = False,
    ) -> dict[str, Any]:
        """Score a client's final model.

        Args:
            predicts: whether to return the predictions for the test samples, too.

        Returns:
            `kind`; `score` by the main metric; `further`, a dict of scores by the metrics of
            `evaluation.metrics`; columns of scores on the global test set; `predictions`.
        """
        kind, vector, buffers = self.final_model(id)
        client = self.at_rest(id, buffers)
        scored = self.cache.model(kind, client, vector)
        measured = scored.get(scoring.measured, client.data.test)
        values = by_column(kind, measured) | self._on_global_test(scored)
        further: dict[str, Any] = {}
        for name, column in scoring.columns(self.run.config.evaluation.metrics, kind).items():
            if column in values:
                further[name] = values.pop(column)
        further |= scoring.one_class(client, measured)
        score = values.pop(self.run.data.metric.by(kind))
        scores = {"kind": kind, "score": score, "further": further, **values}
        if predicts:
            scores["predictions"] = scoring.predictions(kind, client, vector)
        if kind != "global" and self.run.config.data.global_test:
            model = self._wanted_global(id)
            if model is not None:
                client.state.buffers = client.group.first_buffers()
                scores |= self._on_global_test(self.cache.model("global", client, model))
        return scores

    def _wanted_global(self, id: int) -> Tensor | None:
        """Return the server's model for a client; None if there is none or it is not scored."""
        if self.has_global and self.wants("global"):
            return self.global_model(id)
        return None

    def after_aggregation(self, t: int, results: Results) -> None:
        """Score the models that exist only after aggregation, the new global model and fine-tuned
        copies, and add the scores to each client's entry in `results`.

        If a client fails here, only its scores are missing: its upload has been aggregated.
        """
        self._on_global = None, None
        with self.cache.sharing():
            if self.has_global and self.wants("global"):
                self._score_global_ahead(results.clients)
            for id, result in results.clients.items():
                try:
                    with self.guard.naming(t, id, self):
                        model = self._wanted_global(id)
                        if model is not None:
                            client = self.at_rest(id, self.run.group_of(id).initial_buffers)
                            result.values |= self.scores(self.cache.model("global", client, model))
                        if self.wants("finetuned"):
                            vector, buffers = self.finetune(t, id)
                            client = self.at_rest(id, buffers)
                            result.values |= self.scores(
                                self.cache.model("finetuned", client, vector)
                            )
                except BadClient as failure:
                    if not self.run.tolerant:
                        raise
                    results.failures.append((failure.bare(), "not judged"))

    def _score_global_ahead(self, ids: Iterable[int]) -> None:
        """Score the server's models for these clients in stacked passes, if the executor can."""
        models = []
        with contextlib.suppress(BadClient):
            for id in ids:
                client = self.at_rest(id, self.run.group_of(id).initial_buffers)
                model = None
                if self.cache.can_score_ahead(client):
                    model = self.global_model(id)
                if model is not None:
                    models.append(self.cache.model("global", client, model))
            self.cache.score_ahead(models)


def by_column(kind: str, measured: Mapping[Metric, Tensor]) -> dict[str, Tensor]:
    """Return a model's scores by column (such as `accuracy_after`) instead of by metric; the
    predicted classes are left out.

    Args:
        kind: the kind of model, which is part of the columns' names.
        measured: scores by metric, as from `scoring.measured`.
    """
    return {m.by(kind): value for m, value in measured.items() if m is not PREDICTED}


def missing_scores(failure: BadClient) -> dict[str, Any]:
    """Return the entry of a failed client in `Evaluator.finals`, with the score NaN; logs the
    failure."""
    log.say(f"{failure}; its final model is not judged")
    return {"kind": "", "score": math.nan, "further": {}}
