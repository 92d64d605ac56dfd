"""Clients that come after the last round: those held out (`newcomers.csv`), and one more (`fl-train
join`)."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from fl_lightning.callbacks.base import Aggregator, Observer
from fl_lightning.callbacks.relations import Relation
from fl_lightning.configuration.config import check
from fl_lightning.core import Client, ModelGroup, Payload, Phase, Rule, RunContext, Server
from fl_lightning.core.newcomer import ALONE, GLOBAL, MIX, PERSONAL
from fl_lightning.data.federated import ClientData
from fl_lightning.data.newcomers import with_few_labels
from fl_lightning.data.part import Part, ResidentPart
from fl_lightning.engine import scoring
from fl_lightning.engine.phases import job_of
from fl_lightning.engine.pool import Pool
from fl_lightning.engine.record import Timer, finite
from fl_lightning.engine.visit import Steps, Visit
from fl_lightning.engine.worker import Worker
from fl_lightning.foundation import log
from fl_lightning.foundation.errors import BadClient, BadInput
from fl_lightning.foundation.metric import PREDICTED
from fl_lightning.storage.state import MODEL, ServerState
from fl_lightning.storage.store import VectorStore
from fl_lightning.training.executors.base import LocalJob

SAMPLES = (0, 1, 5, 20)
"""Labelled samples of each class, where `evaluation.newcomer_samples` names none."""


class Joined(NamedTuple):
    """What a newcomer came to. On other ranks than 0 it is empty."""

    vector: Tensor
    """Its model (D,)."""
    buffers: list[Tensor]
    scores: dict[str, float]
    """On its test data, where it has any: `accuracy_received` as it begins, where there is a model
    for it then, and after training `accuracy`, by the metrics of `evaluation.metrics` too; `loss`:
    the mean task loss of the last of these. What is not finite is absent."""


def join(
    worker: Worker, new: ClientData, labelled: bool, rounds: int, group: ModelGroup | None = None
) -> Joined:
    """A model for a client that has been in no round, by its method's own rule; nobody else's state
    is touched.

    Args:
        worker: after a round; all ranks call it.
        new: the client's data.
        labelled: whether its labels mean anything.
        rounds: that it takes part in, where it has labels.
        group: the clients of its architecture; None: the first.

    Raises:
        BadInput: there is no model for such a client.
    """
    run = worker.run
    group = group or run.groups[0]
    if not comes_to_a_model(rule_of(run, group), labelled and rounds > 0):
        allowed = (
            f"{run.method_name} gives a new client no model: it can but train its own, with labels"
        )
        raise BadInput("run", str(run.folder), allowed)
    return _Newcomer(worker, new, labelled, group).joined(rounds)


def architecture(run: RunContext, model: str | None) -> ModelGroup:
    """The clients whose architecture is called so, or is at that place; None: the only one.

    Raises:
        BadInput: `architecture`: there is none, or are several.
    """
    names = [group.name for group in run.groups]
    if model is None and len(names) == 1:
        return run.groups[0]
    known = {str(k): group for k, group in enumerate(run.groups)}
    known |= {
        name: group for name, group in zip(names, run.groups, strict=True) if names.count(name) == 1
    }
    allowed = f"clients run {', '.join(names)}: name its own, or give its place from 0"
    check("architecture", model, model in known, allowed)
    return known[str(model)]


class HeldOut(Observer):
    """Adds to the summary how the clients that were held out fare."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def summarize(self, run: RunContext) -> dict[str, Any]:
        """Have each of them join, on every rank."""
        return newcomers(self.worker)


def newcomers(worker: Worker) -> dict[str, Any]:
    """How the clients that were held out fare: for the summary their mean scores, and all rows
    under `newcomers`."""
    run = worker.run
    rows = []
    counts = run.config.evaluation.newcomer_samples or SAMPLES
    for group in run.groups:
        for place in group.held_out:
            rows += [_row(worker, group, place, count) for count in counts]
    if not rows:
        return {}
    rows = run.processes.gather_objects(sorted(rows, key=lambda row: row["client"]))[0]
    summary: dict[str, Any] = {
        "held_out_clients": [who.number for who in run.data.held_out],
        "newcomers": rows,
        "newcomer_rule": "; ".join(dict.fromkeys(row["rule"] for row in rows)),
    }
    for metric in (run.data.metric, *scoring.further_metrics(run)):
        for count in counts:
            of_count = [row for row in rows if row["samples_per_class"] == count]
            scores = [row[metric.name] for row in of_count if metric.name in row]
            if scores:
                summary[f"newcomer_{metric.of('mean')}_{count}"] = float(np.mean(scores))
    return summary


def _row(worker: Worker, group: ModelGroup, place: int, count: int) -> dict[str, Any]:
    """How the client at a place of `data.held_out` fares with `count` labelled samples of each
    class (rank 0)."""
    run = worker.run
    config = worker.run.config
    who = run.data.held_out[place]
    rule = rule_of(run, group)
    new, labelled = with_few_labels(
        run.data, who, count, config.data.validation, config.seed, run.device, run.dtype
    )
    used = (len(new.train) + len(new.validation)) * labelled
    names = run.data.reading.client_names
    name = {"name": names[who.number]} if names else {}
    row: dict[str, Any] = {"client": who.number} | name
    row |= {"samples_per_class": count, "samples": used, "test_samples": len(new.test)}
    scores: dict[str, float] = {}
    if comes_to_a_model(rule, labelled):
        try:
            scores = join(worker, new, labelled, config.evaluation.newcomer_rounds, group).scores
        except BadClient as failure:
            called = f"held-out client {who.number}" + "".join(f" ({n})" for n in name.values())
            named = BadClient(who.number, run.server.round, failure.stage, failure.reason, called)
            if not run.tolerant:
                raise named from None
            if run.is_main:
                log.say(f"{named}; with {count} samples of each class it has no score")
    metrics = [run.data.metric, *scoring.further_metrics(run)]
    for metric in metrics:  # who trains nothing keeps what it had
        if metric.by("received") in scores:
            scores.setdefault(metric.name, scores[metric.by("received")])
    columns = [column for m in metrics for column in (m.by("received"), m.name)]
    columns.insert(2, "loss")
    return row | {"rule": rule.says} | {name: scores[name] for name in columns if name in scores}


def rule_of(run: RunContext, group: ModelGroup) -> Rule:
    """The method's own, or what follows from what travels and who receives whose model."""
    rule: Rule | None = run.method.traits.newcomers
    if rule is not None:
        return rule
    shared = group.down_mask[group.layout.is_parameter]
    if not shared.any():
        return ALONE
    return MIX if not run.relation.is_global else GLOBAL if shared.all() else PERSONAL


def comes_to_a_model(rule: Rule, labelled: bool) -> bool:
    """Whether a newcomer has a model in the end."""
    return rule.gives or rule.unlabelled or labelled


class _Newcomer:
    """One client more, in a copy of the federation that otherwise does not change. Its home is rank
    0.

    Args: as `join`.
    """

    def __init__(self, worker: Worker, new: ClientData, labelled: bool, group: ModelGroup) -> None:
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
        """What it is sent in each round, where that is known already."""
        if weights is not None:
            self.sent[self.id] = Payload(group.layout, first, group.down_mask.copy())
        changes = self.rule.remembers or not (
            run.relation.is_global and run.policy.starts_from_server
        )
        self.again = weights is None and changes
        """Whether it receives anew in each round; else it goes on from what it has."""
        self.visit: Visit
        """On rank 0; several rounds may share one."""
        self.index = 0
        """Rounds that it has taken part in."""

    def joined(self, rounds: int) -> Joined:
        """After so many rounds."""
        scores: dict[str, float] = {}
        trains = (
            rounds > 0 and (self.labelled or self.rule.unlabelled) and self.rule.trains != "nothing"
        )
        for k in range(rounds if trains else 1):
            server = Server(self.run, self.old.server.round + 1, [self.id], Aggregator())
            if k == 0 or self.again:
                self._receive(server, k)
            self._here(partial(self._take_part, k, trains, scores))
            if trains and self.again and k + 1 < rounds:
                self._upload(server)
        if not self.run.is_main:
            return Joined(self.group.initial, [], {})
        if trains:
            scores |= self._scores("after", received=False)
        client = self.visit.client
        return Joined(self.run.method.personal(client), client.state.buffers, scores)

    def _take_part(self, k: int, trains: bool, scores: dict[str, float]) -> None:
        self.index = k
        if k == 0 and self.rule.gives:
            scores |= self._scores("before", received=True)
        if trains:
            self._carry_out(self.visit.learn(self.run.method.newcomer_phases))

    def _plan(self, client: Client, phase: Phase) -> LocalJob | None:
        """Train what the rule lets it, on other draws than clients do; None: without data, and
        where all that would train stays as it is."""
        trains = phase.trains
        personal = ~self.group.down_mask
        if self.rule.trains == "personal":
            trains = personal if trains is None else personal & trains
        part = client.data.train if phase.part is None else phase.part
        stays = trains is not None and not (trains & self.group.layout.is_parameter).any()
        if stays or not len(part):
            return None
        purpose = "join" if phase.purpose == "train" else f"join {phase.purpose}"
        job = job_of(client, replace(phase, trains=trains), self.index, purpose)
        job.keep = False
        return job

    def _carry_out(self, steps: Steps) -> None:
        """Train one phase after the other."""
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
                    [fit] = visit.trainer.loop.train([job])
                    if self.rule.trains == "personal":  # statistics move whatever trains
                        visit.client.overwrite(visit.client.payload)
                    finite(self.run, visit.t, self.id, visit.client[MODEL], "its model")

    def _here(self, work: Callable[[], None]) -> None:
        """Do its `work` at home; if it fails, that is raised on every rank."""
        failure: BadClient | None = None
        if self.run.is_main:
            try:
                work()
            except BadClient as error:
                failure = error.bare()
        if (known := self.run.processes.gather_objects(failure)[0]) is not None:
            raise known

    # ------------------------------------------------------------ a federation with one client more

    def _first(self, group: ModelGroup, weights: Tensor | None) -> Tensor:
        """The model (D,) that it comes with: the global one, or else the mean of all that have
        uploaded."""
        run = self.old
        if run.relation.is_global:
            return group.vectors[MODEL]
        who = (
            [c for c in group.members if c in run.server.uploaded]
            if weights is None
            else list(range(run.clients))
        )
        if not who or not group.down_mask.any():
            return group.initial
        server = Server(run, run.server.round, [], Aggregator())
        shares = server.shares(who) if weights is None else weights.to(torch.float64)
        return server.groups[group.index].mean(shares, who, like=group.vectors[MODEL])

    def _usable(self, new: ClientData, group: ModelGroup) -> ClientData:
        """Its data, without labels that mean nothing: nobody may adapt to them."""
        if not self.labelled:
            return replace(new, train=_nothing(new.train), validation=_nothing(new.validation))
        # BatchNorm cannot train on one sample: it counts twice
        if group.whole_last and len(new.train) == 1:
            [(x, y)] = new.train.batches(1)
            return replace(
                new, train=self.old.data.newcomer_part(torch.cat([x, x]), torch.cat([y, y]))
            )
        return new

    def _with(self, new: ClientData, group: ModelGroup, *, grows: bool) -> RunContext:
        """The run with a client more, whose data are `new`. What the server keeps is copied, with
        room for it."""
        run = self.old
        relation = cast(Relation, copy.copy(self.old.relation))
        if not relation.is_global and relation.sources == "cohort":
            relation.sources = "known"  # it is the cohort
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
            for name, tensor in (
                relation.init_server(grown) | run.method.init_server(grown)
            ).items():
                if name not in memory or grew(tensor, memory[name]):
                    memory[name] = with_old(tensor.clone(), memory.get(name))
        return grown

    # ---------------------------------------------------------------- a round

    def _receive(self, server: Server, k: int) -> None:
        """What it is sent, and what it makes of it."""
        run = self.run
        if k == 0:
            run.method.admit(
                server, Client(run, self.group, self.id, server.round, run.states[self.id])
            )
        server.sent = self.sent or run.method.broadcast(server)
        self._here(partial(self._begin, server, k))

    def _begin(self, server: Server, k: int) -> None:
        t = server.round
        payload = server.sent[self.id]
        self.visit = Visit(self.worker, t, False, Timer(), self.id, 0, payload, self._plan)
        self.index = k
        self._carry_out(self.visit.receive())

    def _finish(self, server: Server) -> None:
        with self.worker.guard.naming(server.round, self.id, self.visit):
            self.visit.upload()

    def _upload(self, server: Server) -> None:
        """The server has its model, and what is kept of it where the method asks for that."""
        run = self.run
        self._here(partial(self._finish, server))
        run.server.uploaded.add(self.id)
        if self.rule.remembers:
            statistics = run.processes.gather_objects(
                self.visit.result.statistics if run.is_main else {}
            )[0]
            server.collect([self.id], {self.id: statistics})
            run.method.aggregate(server)
            self._stand_still()

    def _stand_still(self) -> None:
        """All that the server keeps is as it was, but for what it keeps of the newcomer."""
        memory = self.run.server.memory
        old = self.old.server.memory
        for name, tensor in old.items():
            memory[name] = (
                with_old(memory[name], tensor) if grew(memory[name], tensor) else tensor.clone()
            )
        for group, before in zip(self.run.groups, self.old.groups, strict=True):
            group.vectors |= before.vectors

    # ---------------------------------------------------------------- scores

    def _scores(self, kind: str, received: bool) -> dict[str, float]:
        """Of its model, bound as `kind`: all metrics (`received`: of what it was given), and the
        loss."""
        client = self.visit.client
        test = self.visit.client.data.test
        client.ready(kind, self.run.method.personal(client))
        if not len(test):
            return {}
        seen: scoring.Seen = []
        values = scoring.measured(kind, client, test, seen)
        values.pop(PREDICTED, None)
        scores = {
            m.by("received") if received else m.name: float(value) for m, value in values.items()
        }
        loss = client.run.data.metric.loss
        scores["loss"] = sum(float(loss(outputs.float(), y, "sum")) for outputs, y in seen) / len(
            test
        )
        return {name: value for name, value in scores.items() if math.isfinite(value)}


def grew(tensor: Tensor, old: Tensor) -> bool:
    """Whether `tensor` has room for more than `old` in some dimension, and for no less in any."""
    sizes = list(zip(tensor.shape, old.shape, strict=False))
    return (
        tensor.ndim == old.ndim
        and tensor.shape != old.shape
        and all(new >= had for new, had in sizes)
    )


def with_old(tensor: Tensor, old: Tensor | None) -> Tensor:
    """`tensor` with `old` at the beginning of every dimension, in place."""
    if old is not None:
        tensor[tuple(slice(size) for size in old.shape)] = old
    return tensor


def _nothing(part: Part) -> Part:
    """A part like `part` without a sample."""
    some = next(iter(part.batches(1)), None)
    return part if some is None else ResidentPart(some[0][:0], some[1][:0], None)
