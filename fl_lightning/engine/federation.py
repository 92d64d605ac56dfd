"""The rounds of personalised federated learning, and nothing else. Which method is running, they
never ask."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fl_lightning.callbacks.base import Aggregator
from fl_lightning.core import RoundRecord, RunContext, Server
from fl_lightning.core.protocols import Configured
from fl_lightning.core.run import cohort_of
from fl_lightning.engine.evaluation import Evaluator
from fl_lightning.engine.joining import newcomers
from fl_lightning.engine.pool import Pool
from fl_lightning.engine.probe import try_evaluation
from fl_lightning.engine.record import Timer, gather
from fl_lightning.engine.trainer import choose_executors, count_costs, say_unused
from fl_lightning.engine.worker import Worker
from fl_lightning.foundation.device import seed_all
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.rng import key
from fl_lightning.foundation.signals import raise_swallowed
from fl_lightning.methods.common.adapters import check_ranks, product_error
from fl_lightning.results.summary import merged


class Federation:
    """N clients with models of their own, and the server between them; `reducer` makes one vector
    of many."""

    def __init__(
        self, run: RunContext, pool: Pool, worker: Worker, evaluator: Evaluator, reducer: Aggregator
    ) -> None:
        self.run, self.pool, self.worker, self.evaluator, self.reducer = (
            run,
            pool,
            worker,
            evaluator,
            reducer,
        )

    def fit(self) -> dict[str, Any]:
        """Run all rounds that are still to run; returns the summary (equal on every rank)."""
        run = self.run
        try:
            self.prepare()
            for t in range(run.server.round + 1, run.rounds + 1):
                raise_swallowed()
                self.tell("on_round_end", self.round(t))
            engine: Mapping[str, Any] = self.evaluator.everyone() | newcomers(self.worker)
            parts = [("the engine", engine)]
            parts.append((f"method {run.method_name}", run.method.summary(run)))
            parts += [
                (type(observer).__name__, observer.summarize(run))
                for observer in self.worker.observers
            ]
            summary = merged(parts)
            self.tell("on_fit_end", summary)
        finally:
            self.tell("on_close")
        return summary

    def prepare(self) -> None:
        """Let all parts refuse what they cannot work with, choose executors, and count what
        training costs."""
        self.check(self.run.callbacks)
        if not try_evaluation(self.run, self.worker.trainers):
            self.evaluator.remembered.enabled = False
        choose_executors(self.run, self.worker.trainers)
        say_unused(self.run, self.worker.trainers)
        count_costs(self.run, self.worker.trainers)

    def check(self, callbacks: Iterable[Configured]) -> None:
        """Let the method, its relation and those `callbacks` refuse what they cannot work with."""
        run = self.run
        for transform in self.worker.transforms if run.policy.exchanged else ():
            if (
                transform.changes_upload or transform.changes_download
            ) and not transform.further_vectors:
                allowed = "it changes the model alone, and this method exchanges further vectors"
                raise BadInput(transform.config_key, run.method_name, allowed)
        check_ranks(run)
        run.method.check(run)
        run.relation.on_fit_start(run)
        for callback in callbacks:
            callback.on_fit_start(run)

    def round(self, t: int, cohort: Sequence[int] | None = None) -> RoundRecord:
        """Round `t` of `cohort` (None: as drawn), to the record of what happened."""
        run, method, timer = self.run, self.run.method, Timer()
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

        results = self.worker.visits(t, drawn, server.sent, scored, timer)  # 3. local work

        server.collect(*self.pool.answers(drawn, results))  # 4. who has answered; the server's part
        seed_all(draws ^ 1, run.device)  # every rank draws the same
        method.aggregate(server)
        measured = product_error(server)
        self._check_reduced(server)
        self.pool.forget()
        timer.lap("server")

        if scored:  # 5. models that exist only now: the global one, fine-tuned copies
            self.evaluator.after_aggregation(t, results)
        timer.lap("evaluation")
        record = gather(run, server, results, timer)
        record.metrics |= measured
        run.server.round = t
        run.server.uploaded.update(server.answered)
        return record

    def _check_reduced(self, server: Server) -> None:
        """Raise `BadInput` where a robust aggregator is configured, and the method has passed it
        by."""
        if server.answered and not server.reduced and type(self.reducer) is not Aggregator:
            allowed = "its aggregate takes means of its own, past a robust one"
            raise BadInput(self.reducer.config_key, self.run.method_name, allowed)

    def cohort(self, t: int) -> list[int]:
        """The clients of round `t`, ascending: as drawn, or in the first, where the method asks for
        it, all."""
        first = t == 1 and self.run.method.traits.everyone_first
        return list(range(self.run.clients)) if first else cohort_of(self.run.config, t)

    def tell(self, hook: str, *args: Any) -> None:
        """Run a hook of every observer, in order."""
        for observer in self.worker.observers:
            getattr(observer, hook)(self.run, *args)
