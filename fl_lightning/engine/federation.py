"""The rounds of personalised federated learning, and nothing else. They are method-agnostic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from fl_lightning.callbacks.base import Aggregator, Callback
from fl_lightning.core import Payload, RoundRecord, Server
from fl_lightning.core.run import cohort_of
from fl_lightning.engine.probe import try_evaluation
from fl_lightning.engine.record import Results, Timer, gather
from fl_lightning.engine.trainer import choose_executors, count_costs, say_unused
from fl_lightning.engine.worker import Worker
from fl_lightning.foundation.device import seed_all
from fl_lightning.foundation.errors import check
from fl_lightning.foundation.rng import key
from fl_lightning.foundation.signals import raise_swallowed
from fl_lightning.results.summary import merged


class Visits(Protocol):
    """Carries out the visits of a round: here (`Worker`), or by messages to sites."""

    def visits(
        self,
        t: int,
        cohort: list[int],
        downloads: dict[int, Payload],
        scored: bool,
        timer: Timer,
    ) -> Results:
        """Visit the clients of `cohort`; writes to `downloads` what transforms have left of
        them."""

    def scores(self, t: int, results: Results) -> None:
        """Add to `results` scores of models that exist only after aggregation."""

    def finals(self) -> dict[int, dict[str, Any]]:
        """Kinds and scores of final models, of this rank's clients."""


class Federation:
    """N clients with models of their own, and the server between them.

    Args:
        worker: the engine's parts, which carry out visits on this rank.
        visits: carries out visits; None: the worker does.
    """

    def __init__(self, worker: Worker, visits: Visits | None = None) -> None:
        self.worker = worker
        self.visits = visits or worker
        self.run = worker.run
        self.pool = worker.pool
        self.evaluator = worker.evaluator
        self.reducer = worker.reducer

    def fit(self) -> dict[str, Any]:
        """Run all rounds that are still to run; returns the summary (equal on every rank)."""
        run = self.run
        try:
            self.prepare()
            for t in range(run.server.round + 1, run.rounds + 1):
                raise_swallowed()  # a Ctrl-C that a library has caught
                self.tell("on_round_end", self.round(t))
            parts: list[tuple[str, Mapping[str, Any]]] = [
                ("the engine", self.evaluator.summary(self.visits.finals())),
                (f"method {run.method_name}", run.method.summary(run)),
            ]
            parts += [(type(o).__name__, o.summarize(run)) for o in self.worker.observers]
            summary = merged(parts)
            self.tell("on_fit_end", summary)
        finally:
            self.tell("on_close")
        return summary

    def prepare(self) -> None:
        """Start all parts, choose executors, and count the cost of training."""
        run = self.run
        trainers = self.worker.trainers
        self.check(run.callbacks)
        if not try_evaluation(run, trainers):
            self.evaluator.remembered.enabled = False
        choose_executors(run, trainers)
        say_unused(run, trainers)
        count_costs(run, trainers)

    def check(self, callbacks: Iterable[Callback]) -> None:
        """Refuse what does not fit together, then start method, relation and `callbacks`: the
        writer's `on_fit_start` drops rows of later rounds than the checkpoint's."""
        run = self.run
        requirement = (
            "it changes the model alone, and this method exchanges further vectors: drop the "
            "callback"
        )
        for transform in self.worker.transforms if run.policy.exchanged else ():
            changes = transform.changes_upload or transform.changes_download
            complete = transform.further_vectors or not changes
            check(transform.config_key, run.method_name, complete, requirement)
        has_classes = not (run.method.traits.classes and run.data.task == "regression")
        requirement = f"{run.method_name} works with classes, and a regression has none"
        check("data.task", run.data.task, has_classes, requirement)
        run.method.check(run)
        run.relation.on_fit_start(run)
        for callback in callbacks:
            callback.on_fit_start(run)

    def round(
        self,
        t: int,
        cohort: Sequence[int] | None = None,
    ) -> RoundRecord:
        """Round `t` of `cohort` (None: as drawn); returns the record of what happened."""
        run = self.run
        method = run.method
        timer = Timer()
        run.data.at_round(t)
        # 1. who takes part, and on which rank
        drawn = self.cohort(t) if cohort is None else list(cohort)
        scored = t % run.config.evaluation.every == 0 or t == run.rounds
        self.pool.rebalance(drawn)
        self.tell("on_round_start", t, drawn)
        server = Server(run, t, drawn, self.reducer)

        draws = key(run.config.seed, "server", t)
        seed_all(draws, run.device)
        server.sent = method.broadcast(server)  # 2. what each of this rank's clients is sent
        timer.lap("server")

        results = self.visits.visits(
            t,
            drawn,
            server.sent,
            scored,
            timer,
        )  # 3. local work

        server.collect(*self.pool.answers(drawn, results))  # 4. who has answered; the server's part
        seed_all(draws ^ 1, run.device)  # every rank draws the same
        method.aggregate(server)
        self.tell("on_aggregate", server)
        self._check_reduced(server)
        self.pool.forget()
        timer.lap("server")

        if scored:  # 5. models that exist only now: the global one, fine-tuned copies
            self.visits.scores(t, results)
        timer.lap("evaluation")
        record = gather(run, server, results, timer)
        run.server.round = t
        run.server.uploaded.update(server.answered)
        return record

    def _check_reduced(self, server: Server) -> None:
        """Raise `BadInput` where the method has not used the configured aggregator."""
        used = server.reduced or not server.answered or type(self.reducer) is Aggregator
        requirement = (
            "its aggregate takes means of its own, past a robust one: drop the callback, or take "
            "fedavg"
        )
        check(self.reducer.config_key, self.run.method_name, used, requirement)

    def cohort(self, t: int) -> list[int]:
        """The clients of round `t`, ascending: as drawn, or all in a first round of a method with
        `everyone_first`."""
        if t == 1 and self.run.method.traits.everyone_first:
            return list(range(self.run.clients))
        return cohort_of(self.run.config, t)

    def tell(self, hook: str, *args: Any) -> None:
        """Run a hook of every observer, in order."""
        for observer in self.worker.observers:
            getattr(observer, hook)(self.run, *args)
