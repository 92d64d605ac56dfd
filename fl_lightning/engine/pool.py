"""The clients of a rank: their states, who trains where, and who has answered."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fl_lightning.callbacks.base import client_memory
from fl_lightning.core.run import RunContext
from fl_lightning.engine.placement import move, moves
from fl_lightning.engine.record import Results
from fl_lightning.engine.trainer import Trainer
from fl_lightning.foundation.errors import RunFailed
from fl_lightning.storage.state import MODEL, ClientState, spent_by


class Pool:
    """Client states on their home ranks. The `trainers` tell what training costs."""

    def __init__(self, run: RunContext, trainers: Sequence[Trainer]) -> None:
        self.run, self.trainers = run, trainers

    def rebalance(self, cohort: list[int]) -> None:
        """Let clients of `cohort` move to another rank, where that shortens the round: no number
        depends on homes."""
        run = self.run
        if run.world_size == 1:
            return
        steps = [trainer.cost.step for trainer in self.trainers if trainer.cost is not None]
        known = len(steps) == len(self.trainers)
        cost = {c: steps[run.group_of(c).index] if known else 1 for c in cohort}
        work = {c: float(run.data.train_sizes[c] * cost[c]) for c in cohort}
        move(
            run.processes,
            run.store,
            run.states,
            run.home,
            moves(cohort, run.home, work, run.world_size),
        )

    def state(self, client: int) -> ClientState:
        """A client's state; made of the initial model at its first visit."""
        if client not in self.run.states:
            self.run.states[client] = self._fresh(client)
        return self.run.states[client]

    def _fresh(self, client: int) -> ClientState:
        run, group = self.run, self.run.group_of(client)
        model = self._model(client)
        vectors = {MODEL: model}
        received = {MODEL: run.store.allocate(model) if run.policy.keeps_received else model}
        for name, slot in run.method.slots().items():
            first = slot.first(group.initial)
            vectors[name] = run.store.allocate(first)
            if slot.exchanged:
                received[name] = run.store.allocate(first)
        return ClientState(client, vectors, group.first_buffers(), received, 0, client_memory(run))

    def _model(self, client: int) -> Tensor:
        """A vector (D,) with the initial model (or anything, if it will be written over), used or
        new."""
        group = self.run.group_of(client)
        if not group.spare:
            return self.run.store.allocate(group.initial)
        vector = group.spare.pop()
        return vector if self.run.policy.overwritten else vector.copy_(group.initial)

    def restore(self, client: int, before: ClientState | None) -> None:
        """Leave a client as it was `before` a visit that failed, in the memory (of the store) that
        it has now.

        What it has spent of its privacy stays spent: an upload that was refused has left it.
        """
        now = self.run.states.pop(client, None)
        spent = spent_by(now)
        if before is None:
            if any(bool(x.any()) for x in spent.values()):
                self.state(client).memory |= spent
            return
        before.memory |= spent
        if now is not None and all(
            v.shape == now.vectors[s].shape for s, v in before.vectors.items()
        ):
            shared = {s for s, v in before.received.items() if v is before.vectors[s]}
            for slot, vector in before.vectors.items():
                before.vectors[slot] = now.vectors[slot].copy_(vector)
            for slot, vector in before.received.items():
                before.received[slot] = (
                    before.vectors[slot] if slot in shared else now.received[slot].copy_(vector)
                )
        self.run.states[client] = before

    def answers(
        self, cohort: Sequence[int], results: Results
    ) -> tuple[list[int], dict[int, dict[str, Tensor]]]:
        """The clients of the cohort, on all ranks, that have not failed, and what they uploaded
        beside vectors.

        Raises:
            RunFailed: all of them have failed.
        """
        run = self.run
        if not (run.tolerant or run.method.traits.statistics):
            return list(cohort), {}
        lost_here = [failure for failure, outcome in results.failures if outcome == "skipped"]
        told_here = (
            {c: r.statistics for c, r in results.clients.items()}
            if run.method.traits.statistics
            else {}
        )
        parts = run.processes.gather_objects((lost_here, told_here))
        lost = {f.client: f for part, _ in parts for f in part}
        if len(lost) == len(cohort):
            raise RunFailed(
                f"every client of round {lost[cohort[0]].round} failed; the first: "
                f"{lost[cohort[0]]}"
            )
        statistics = {c: s for _, part in parts for c, s in part.items()}
        return [c for c in cohort if c not in lost], dict(sorted(statistics.items()))

    def forget(self) -> None:
        """After aggregation: where one global model is all that is kept, the clients' states go."""
        run = self.run
        if not run.policy.keeps_clients:
            for client, state in run.states.items():
                run.group_of(client).spare.append(state.vectors[MODEL])
            run.states.clear()
