"""The round loop of personalised federated learning. It is method-agnostic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from fl_lightning.callbacks.base import Aggregator, Callback
from fl_lightning.core import Payload, RoundRecord, Server
from fl_lightning.core.run import cohort_of
from fl_lightning.engine.probe import scoring_is_pure
from fl_lightning.engine.record import Results, Timer, gather
from fl_lightning.engine.trainer import choose_executors, count_costs, log_unused_hooks
from fl_lightning.engine.worker import Worker
from fl_lightning.foundation.device import seed_all
from fl_lightning.foundation.errors import check
from fl_lightning.foundation.rng import key
from fl_lightning.foundation.signals import raise_swallowed
from fl_lightning.results.summary import merged


class Visits(Protocol):
    """Carries out the visits of a round: in this process (`Worker`), or by messages to sites."""

    def visits(
        self,
        t: int,
        cohort: list[int],
        downloads: dict[int, Payload],
        scored: bool,
        timer: Timer,
    ) -> Results:
        """Visit the clients of `cohort`; returns the results of this rank's visits. Entries of
        `downloads` that transforms change are replaced by the changed payloads.

        Args:
            t: the round.
            downloads: the server's payload for each client.
            scored: whether the clients' models are scored in this round.
            timer: counts the seconds of the round.
        """

    def scores(self, t: int, results: Results) -> None:
        """Score the models that exist only after aggregation, the new global model and fine-tuned
        copies, and add the scores to each client's entry in `results`.

        Args:
            t: the round.
        """

    def finals(self) -> dict[int, dict[str, Any]]:
        """Score the final models of this rank's clients; returns their `Evaluator.final_scores` by
        client."""


class Federation:
    """Runs the rounds of N clients and a server.

    Args:
        worker: the parts of the engine on this rank (pool, trainers, evaluator, callbacks).
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
        """Run the remaining rounds; returns the summary, which is equal on every rank."""
        run = self.run
        try:
            self.prepare()
            for t in range(run.server.round + 1, run.rounds + 1):
                raise_swallowed()  # a Ctrl-C that a library has caught
                self.notify("on_round_end", self.round(t))
            parts: list[tuple[str, Mapping[str, Any]]] = [
                ("the engine", self.evaluator.summary(self.visits.finals())),
                (f"method {run.method_name}", run.method.summary(run)),
            ]
            parts += [(type(o).__name__, o.summarize(run)) for o in self.worker.observers]
            summary = merged(parts)
            self.notify("on_fit_end", summary)
        finally:
            self.notify("on_close")
        return summary

    def prepare(self) -> None:
        """Prepare the first round: check and start method, relation and callbacks (`start`), try
        the models on made-up samples, choose executors, and count the FLOPs of training on one
        sample."""
        run = self.run
        trainers = self.worker.trainers
        self.start(run.callbacks)
        if not scoring_is_pure(run, trainers):
            self.evaluator.cache.enabled = False
        choose_executors(run, trainers)
        log_unused_hooks(run, trainers)
        count_costs(run, trainers)

    def start(self, callbacks: Iterable[Callback]) -> None:
        """Check that method, data and transforms fit together, then call the hook `on_fit_start`
        of the relation and of each of the `callbacks`.

        Raises:
            BadInput: they do not fit together.
        """
        run = self.run
        for transform in self.worker.transforms if run.policy.exchanged else ():
            changes = transform.changes_upload or transform.changes_download
            complete = transform.further_vectors or not changes
            requirement = (
                f"it exchanges further vectors, and {transform.config_key} changes the model "
                "alone: remove the callback, or choose another method"
            )
            check("method", run.method_name, complete, requirement)
        has_classes = not (run.method.traits.classes and run.data.task == "regression")
        requirement = (
            f"{run.method_name} needs classes, and a regression has none: choose another --method"
        )
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
        """Run round `t`; returns its record.

        Args:
            cohort: the clients that take part; None: drawn from seed and round.
        """
        run = self.run
        method = run.method
        timer = Timer()
        run.data.at_round(t)
        # 1. draw the cohort, and move clients between ranks
        drawn = self.cohort(t) if cohort is None else list(cohort)
        scored = t % run.config.evaluation.every == 0 or t == run.rounds
        self.pool.rebalance(drawn)
        self.notify("on_round_start", t, drawn)
        server = Server(run, t, drawn, self.reducer)

        draws = key(run.config.seed, "server", t)
        seed_all(draws, run.device)
        server.sent = method.broadcast(server)  # 2. compose the downloads of this rank's clients
        timer.lap("server")

        results = self.visits.visits(
            t,
            drawn,
            server.sent,
            scored,
            timer,
        )  # 3. local work

        server.collect(*self.pool.answers(drawn, results))  # 4. gather the uploads
        seed_all(draws ^ 1, run.device)  # every rank draws the same
        method.aggregate(server)
        self.notify("on_aggregate", server)
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
        """Raise `BadInput` if the method has not used the configured aggregator."""
        used = server.reduced or not server.answered or type(self.reducer) is Aggregator
        requirement = (
            f"it does not use {self.reducer.config_key} to aggregate: remove the callback, or "
            "choose fedavg"
        )
        check("method", self.run.method_name, used, requirement)

    def cohort(self, t: int) -> list[int]:
        """Return the clients of round `t`, ascending. They are drawn from seed and round; in the
        first round of a method with the trait `everyone_first` they are all clients."""
        if t == 1 and self.run.method.traits.everyone_first:
            return list(range(self.run.clients))
        return cohort_of(self.run.config, t)

    def notify(self, hook: str, *args: Any) -> None:
        """Call the hook of this name of every observer, in order."""
        for observer in self.worker.observers:
            getattr(observer, hook)(self.run, *args)
