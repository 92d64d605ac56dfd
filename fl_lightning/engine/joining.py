"""Newcomers, clients that join after the last round: those held out (`newcomers.csv`), and a
further one (`fl-train join`)."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fl_lightning.callbacks.base import Aggregator, Observer
from fl_lightning.configuration.config import check
from fl_lightning.core import Client, ModelGroup, Payload, Phase, Rule, RunContext, Server
from fl_lightning.core.newcomer import ALONE, GLOBAL, MIX, PERSONAL
from fl_lightning.data.federated import ClientData
from fl_lightning.data.newcomers import with_few_labels
from fl_lightning.data.part import Part, ResidentPart
from fl_lightning.engine import scoring
from fl_lightning.engine.phases import job_of
from fl_lightning.engine.pool import Pool
from fl_lightning.engine.record import Timer, require_finite
from fl_lightning.engine.visit import Steps, Visit
from fl_lightning.engine.worker import Worker
from fl_lightning.foundation import log
from fl_lightning.foundation.errors import BadClient, BadInput
from fl_lightning.foundation.metric import PREDICTED
from fl_lightning.storage.state import MODEL, ServerState
from fl_lightning.storage.store import VectorStore
from fl_lightning.training.executors.base import LocalJob

SAMPLES = (0, 1, 5, 20)
"""Numbers of labelled samples of each class if `evaluation.newcomer_samples` is not set."""


class Joined(NamedTuple):
    """A newcomer's model and scores on rank 0. Other ranks get the initial model, no buffers and no
    scores."""

    vector: Tensor
    """The model (D,)."""
    buffers: list[Tensor]
    scores: dict[str, float]
    """Scores on the newcomer's test data, if it has any: `accuracy_received` of the model that it
    receives before it trains, `accuracy` after training (both also by the metrics of
    `evaluation.metrics`), and `loss`, the mean task loss of the model scored last. Scores that are
    not finite are absent."""


def join(
    worker: Worker,
    new: ClientData,
    labelled: bool,
    rounds: int,
    group: ModelGroup | None = None,
) -> Joined:
    """Have a newcomer obtain a model by the method's rule. All ranks call it after a round; the
    states of other clients do not change.

    Args:
        new: the newcomer's data.
        labelled: whether its training samples have true labels; without, they are not used.
        rounds: number of rounds in which the newcomer trains.
        group: the clients of its architecture; None: the first group.

    Raises:
        BadInput: the rule gives such a newcomer no model.
    """
    run = worker.run
    group = group or run.groups[0]
    if not obtains_model(rule_of(run, group), labelled and rounds > 0):
        requirement = (
            f"{run.method_name} gives a new client no model: provide labelled samples and rounds "
            ">= 1, or choose a run of another method"
        )
        raise BadInput("run", str(run.folder), requirement)
    return _Newcomer(worker, new, labelled, group).joined(rounds)


def find_group(run: RunContext, model: str | None) -> ModelGroup:
    """Return the group of the clients with a given architecture.

    Args:
        model: name of the architecture, or its number in `config.models` (from 0); None if there
            is only one.

    Raises:
        BadInput: no architecture or several have this name.
    """
    names = [group.name for group in run.groups]
    if model is None and len(names) == 1:
        return run.groups[0]
    groups = {}
    for k, group in enumerate(run.groups):
        groups[str(k)] = group
        if names.count(group.name) == 1:
            groups[group.name] = group
    requirement = f"choose one of {', '.join(names)}, or its number, from 0"
    check("architecture", model, model in groups, requirement)
    return groups[str(model)]


class HeldOutScores(Observer):
    """Adds the scores of the held-out clients to the summary."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def summarize(self, run: RunContext) -> dict[str, Any]:
        """Have each held-out client join, on every rank."""
        return newcomers(self.worker)


def newcomers(worker: Worker) -> dict[str, Any]:
    """Have each held-out client join the federation; returns the summary: their mean scores, and
    under `newcomers` the rows of `newcomers.csv`."""
    run = worker.run
    rows = []
    counts = run.config.evaluation.newcomer_samples or SAMPLES
    for group in run.groups:
        for place in group.held_out:
            rows += [_row(worker, group, place, count) for count in counts]
    if not rows:
        return {}
    rows.sort(key=lambda row: row["client"])
    rows = run.processes.gather_objects(rows)[0]
    rules = dict.fromkeys(row["rule"] for row in rows)
    summary: dict[str, Any] = {
        "held_out_clients": [client.number for client in run.data.held_out],
        "newcomers": rows,
        "newcomer_rule": "; ".join(rules),
    }
    for metric in (run.data.metric, *scoring.further_metrics(run)):
        for count in counts:
            of_count = [row for row in rows if row["samples_per_class"] == count]
            scores = [row[metric.name] for row in of_count if metric.name in row]
            if scores:
                summary[f"newcomer_{metric.of('mean')}_{count}"] = float(np.mean(scores))
    return summary


def _row(
    worker: Worker,
    group: ModelGroup,
    place: int,
    count: int,
) -> dict[str, Any]:
    """Return the row of `newcomers.csv` for the client `data.held_out[place]` with `count` labelled
    samples of each class (rank 0)."""
    run = worker.run
    config = run.config
    client = run.data.held_out[place]
    number = client.number
    rule = rule_of(run, group)
    new, labelled = with_few_labels(
        run.data,
        client,
        count,
        config.data.validation,
        config.seed,
        run.device,
        run.dtype,
    )
    samples = (len(new.train) + len(new.validation)) * labelled
    names = run.data.reading.client_names
    row: dict[str, Any] = {"client": number}
    if names:
        row["name"] = names[number]
    row |= {"samples_per_class": count, "samples": samples, "test_samples": len(new.test)}
    row["rule"] = rule.description
    scores: dict[str, float] = {}
    if obtains_model(rule, labelled):
        try:
            scores = join(
                worker,
                new,
                labelled,
                config.evaluation.newcomer_rounds,
                group,
            ).scores
        except BadClient as failure:
            called = f"held-out client {number}"
            if names:
                called += f" ({names[number]})"
            named = BadClient(
                number,
                run.server.round,
                failure.stage,
                failure.reason,
                called,
            )
            if not run.tolerant:
                raise named from None
            if run.is_main:
                log.say(f"{named}; with {count} samples of each class it has no score")
    for metric in (run.data.metric, *scoring.further_metrics(run)):
        received = metric.by("received")
        if received in scores:
            row[received] = scores[received]
            # a client that trains nothing keeps its score
            scores.setdefault(metric.name, scores[received])
        if metric.name in scores:
            row[metric.name] = scores[metric.name]
        if metric is run.data.metric and "loss" in scores:
            row["loss"] = scores["loss"]
    return row


def rule_of(run: RunContext, group: ModelGroup) -> Rule:
    """Return the rule by which a newcomer to `group` obtains its model: the method's own, or else
    the one that follows from the shared blocks and the relation."""
    rule: Rule | None = run.method.traits.newcomers
    if rule is not None:
        return rule
    shared = group.down_mask[group.layout.is_parameter]
    if not shared.any():
        return ALONE
    if not run.relation.is_global:
        return MIX
    if shared.all():
        return GLOBAL
    return PERSONAL


def obtains_model(rule: Rule, labelled: bool) -> bool:
    """Whether a newcomer obtains a model by this rule.

    Args:
        labelled: whether the newcomer has training samples with labels.
    """
    return rule.gives or rule.unlabelled or labelled


class _Newcomer:
    """Runs a newcomer's rounds, on rank 0, in a copy of the federation; arguments as in `join`."""

    def __init__(
        self,
        worker: Worker,
        new: ClientData,
        labelled: bool,
        group: ModelGroup,
    ) -> None:
        run = worker.run
        self.old = run
        self.labelled = labelled
        self.rule = rule_of(run, group)
        self.id = run.clients
        weights = run.relation.newcomer(run, new.train, labelled)
        first = self._first(group, weights)
        self.run = self._with(self._usable(new, group), group, grows=weights is None)
        pool = Pool(self.run, worker.trainers)
        self.worker = replace(worker, run=self.run, pool=pool, observers=[])
        self.group = self.run.groups[group.index]
        self.run.states[self.id] = pool.fresh(self.id, first)
        self.sent: dict[int, Payload] = {}
        """The newcomer's download, if it is the same in each round; else empty."""
        if weights is not None:
            self.sent[self.id] = Payload(group.layout, first, group.down_mask.copy())
        from_global = run.relation.is_global and run.policy.starts_from_server
        self.receives_each_round = weights is None and (self.rule.remembers or not from_global)
        """Whether a round begins with a download; else with the newcomer's own model."""
        self.visit: Visit
        """The current visit (rank 0); several rounds may share one."""
        self.index = 0
        """Number of rounds before the current one."""

    def joined(self, rounds: int) -> Joined:
        """Run this number of rounds; returns the newcomer's model and scores."""
        scores: dict[str, float] = {}
        trainable = (self.labelled or self.rule.unlabelled) and self.rule.trains != "nothing"
        trains = rounds > 0 and trainable
        for k in range(rounds if trains else 1):
            self.index = k
            server = Server(self.run, self.old.server.round + 1, [self.id], Aggregator())
            if k == 0 or self.receives_each_round:
                self._receive(server)
            self._on_rank_0(partial(self._take_part, trains, scores))
            if trains and self.receives_each_round and k + 1 < rounds:
                self._upload(server)
        if not self.run.is_main:
            return Joined(self.group.initial, [], {})
        if trains:
            scores |= self._scores("after", received=False)
        client = self.visit.client
        return Joined(self.run.method.personal(client), client.state.buffers, scores)

    def _take_part(
        self,
        trains: bool,
        scores: dict[str, float],
    ) -> None:
        """Carry out the newcomer's local part of a round (rank 0): before its first training, add
        the scores of the received model to `scores`; then train if `trains` is True."""
        if self.index == 0 and self.rule.gives:
            scores |= self._scores("before", received=True)
        if trains:
            self._carry_out(self.visit.learn(self.run.method.newcomer_phases))

    def _plan(self, client: Client, phase: Phase) -> LocalJob | None:
        """Return the job of a phase for the blocks that the rule lets the newcomer train, or None
        if there are no samples or no such blocks. Its draws differ from those of clients."""
        trains = phase.trains
        if self.rule.trains == "personal":
            personal = ~self.group.down_mask
            trains = personal if trains is None else personal & trains
        part = client.data.train if phase.part is None else phase.part
        if not len(part):
            return None
        if trains is not None and not (trains & self.group.layout.is_parameter).any():
            return None
        purpose = "join" if phase.purpose == "train" else f"join {phase.purpose}"
        job = job_of(client, replace(phase, trains=trains), self.index, purpose)
        job.keep = False
        return job

    def _carry_out(self, steps: Steps) -> None:
        """Run the steps of a visit, and train each of its phases in the loop."""
        visit = self.visit
        fit = None
        with (
            self.worker.guard.naming(visit.t, self.id, visit),
            contextlib.suppress(StopIteration),
        ):
            while True:
                job = steps.send(fit)
                fit = None
                if isinstance(job, LocalJob):
                    client = visit.client
                    [fit] = visit.trainer.loop.train([job])
                    # running statistics of shared blocks change although these do not train
                    if self.rule.trains == "personal":
                        client.overwrite(client.payload)
                    require_finite(
                        self.run,
                        visit.t,
                        self.id,
                        client[MODEL],
                        "its model",
                    )

    def _on_rank_0(self, work: Callable[[], None]) -> None:
        """Do `work` on rank 0, and raise its error on every rank."""
        failure: BadClient | None = None
        if self.run.is_main:
            try:
                work()
            except BadClient as error:
                failure = error.bare()
        failure = self.run.processes.gather_objects(failure)[0]
        if failure is not None:
            raise failure

    # ------------------------------------------------------- a federation with one more client

    def _first(self, group: ModelGroup, weights: Tensor | None) -> Tensor:
        """Return the newcomer's first model (D,).

        If the relation is global, this is the global model. Else it is a weighted mean of last
        uploads: of all clients by `weights`, or without weights of the clients that have uploaded,
        by their numbers of samples. If none has uploaded or no block is shared, it is the initial
        model.

        Args:
            weights: the newcomer's weight on each client, (N,); None: the relation gives none.
        """
        run = self.old
        if run.relation.is_global:
            return group.vectors[MODEL]
        sources = list(range(run.clients))
        if weights is None:
            sources = [c for c in group.members if c in run.server.uploaded]
        if not sources or not group.down_mask.any():
            return group.initial
        server = Server(run, run.server.round, [], Aggregator())
        shares = server.shares(sources) if weights is None else weights.to(torch.float64)
        return server.groups[group.index].mean(shares, sources, like=group.vectors[MODEL])

    def _usable(self, new: ClientData, group: ModelGroup) -> ClientData:
        """Return the newcomer's data, without training and validation samples if these are
        unlabelled."""
        if not self.labelled:
            return replace(new, train=_empty(new.train), validation=_empty(new.validation))
        # BatchNorm cannot train on one sample: it counts twice
        if group.whole_last and len(new.train) == 1:
            [(x, y)] = new.train.batches(1)
            return replace(
                new, train=self.old.data.newcomer_part(torch.cat([x, x]), torch.cat([y, y]))
            )
        return new

    def _with(
        self,
        new: ClientData,
        group: ModelGroup,
        *,
        grows: bool,
    ) -> RunContext:
        """Return a copy of the run with a further client, whose data are `new`. If `grows`, the
        copies of the server's tensors have entries for the newcomer."""
        run = self.old
        relation = copy.copy(run.relation)
        if not relation.is_global and relation.sources == "cohort":
            relation.sources = "known"  # the newcomer is the only client of the cohort
        groups = [replace(g, vectors=dict(g.vectors), buffers={}, spare=[]) for g in run.groups]
        groups[group.index].members = [*group.members, self.id]
        memory = {name: tensor.clone() for name, tensor in run.server.memory.items()}
        grown = replace(
            run,
            data=run.data.with_newcomer(new),
            relation=relation,
            groups=groups,
            home=[*run.home, 0],
            server=ServerState(run.server.round, set(run.server.uploaded), memory),
            states=dict(run.states),
            store=VectorStore("memory", run.folder, run.device),
            warned={"initial"},
        )
        if grows:
            initial = relation.init_server(grown) | run.method.init_server(grown)
            for name, tensor in initial.items():
                if name not in memory:
                    memory[name] = tensor.clone()
                elif is_larger(tensor, memory[name]):
                    memory[name] = overwrite_start(tensor.clone(), memory[name])
        return grown

    # ---------------------------------------------------------------- a round

    def _receive(self, server: Server) -> None:
        """Compose the newcomer's download, and have the newcomer receive it."""
        run = self.run
        if self.index == 0:
            client = Client(
                run,
                self.group,
                self.id,
                server.round,
                run.states[self.id],
            )
            run.method.admit(server, client)
        server.sent = self.sent or run.method.broadcast(server)
        self._on_rank_0(partial(self._begin, server))

    def _begin(self, server: Server) -> None:
        """Begin a visit of the newcomer with its download (rank 0)."""
        t = server.round
        payload = server.sent[self.id]
        self.visit = Visit(
            self.worker,
            t,
            False,
            Timer(),
            self.id,
            0,
            payload,
            self._plan,
        )
        self._carry_out(self.visit.receive())

    def _finish(self, server: Server) -> None:
        """End the newcomer's visit with its upload (rank 0)."""
        with self.worker.guard.naming(server.round, self.id, self.visit):
            self.visit.upload()

    def _upload(self, server: Server) -> None:
        """Upload the newcomer's model, and aggregate if the rule asks for it."""
        run = self.run
        self._on_rank_0(partial(self._finish, server))
        run.server.uploaded.add(self.id)
        if self.rule.remembers:
            statistics = self.visit.result.statistics if run.is_main else {}
            statistics = run.processes.gather_objects(statistics)[0]
            server.collect([self.id], {self.id: statistics})
            run.method.aggregate(server)
            self._restore_old()

    def _restore_old(self) -> None:
        """Restore the server's memory and vectors, except the newcomer's entries."""
        memory = self.run.server.memory
        for name, tensor in self.old.server.memory.items():
            if is_larger(memory[name], tensor):
                memory[name] = overwrite_start(memory[name], tensor)
            else:
                memory[name] = tensor.clone()
        for group, before in zip(self.run.groups, self.old.groups, strict=True):
            group.vectors |= before.vectors

    # ---------------------------------------------------------------- scores

    def _scores(self, kind: str, received: bool) -> dict[str, float]:
        """Score the newcomer's model as `kind`: by all metrics, under their names for the
        `received` or for the trained model, and by the task loss."""
        client = self.visit.client
        test = client.data.test
        client.ready(kind, self.run.method.personal(client))
        if not len(test):
            return {}
        pairs: scoring.ScoredBatches = []
        values = scoring.measured(kind, client, test, pairs)
        values.pop(PREDICTED, None)
        scores = {}
        for metric, value in values.items():
            scores[metric.by("received") if received else metric.name] = float(value)
        loss = self.run.data.metric.loss
        total = sum(float(loss(outputs.float(), y, "sum")) for outputs, y in pairs)
        scores["loss"] = total / len(test)
        return {name: value for name, value in scores.items() if math.isfinite(value)}


def is_larger(tensor: Tensor, old: Tensor) -> bool:
    """Whether the shape of `tensor` is greater than that of `old` in some dimension and smaller in
    none, as if a tensor of the server's memory has got an entry for a newcomer."""
    if tensor.ndim != old.ndim or tensor.shape == old.shape:
        return False
    return all(size >= before for size, before in zip(tensor.shape, old.shape, strict=True))


def overwrite_start(tensor: Tensor, old: Tensor) -> Tensor:
    """Copy `old` into the first entries of `tensor` along each dimension, which in the server's
    memory belong to the clients before a newcomer; returns `tensor`."""
    tensor[tuple(slice(size) for size in old.shape)] = old
    return tensor


def _empty(part: Part) -> Part:
    """Return a part with no samples, which have the shapes of those in `part`."""
    for x, y in part.batches(1):
        return ResidentPart(x[:0], y[:0], None)
    return part
