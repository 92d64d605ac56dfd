"""Keeps the states of a rank's clients, moves clients between ranks, and gathers who has uploaded.

A client's state lies on its home rank. Clients move if ranks would otherwise wait in a round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fl_lightning.core import RunContext
from fl_lightning.core.client import client_memory
from fl_lightning.engine.record import Results
from fl_lightning.engine.trainer import Trainer
from fl_lightning.foundation.errors import BadClient, RunFailed
from fl_lightning.foundation.parallel import RankGroup
from fl_lightning.storage.state import MODEL, ClientState, privacy_spent
from fl_lightning.storage.store import VectorStore

WORTH = 0.05
"""Least share by which a move must shorten the round; moving itself takes time (ours, not
tuned)."""


@dataclass
class Pool:
    """Keeps clients' states on their home ranks."""

    run: RunContext
    trainers: Sequence[Trainer]
    """One for each architecture; they provide the cost of training a sample."""

    def rebalance(self, cohort: list[int]) -> None:
        """Move clients of `cohort` to other ranks if that shortens the round. No result depends on
        the rank of a client."""
        run = self.run
        if run.world_size == 1:
            return
        costs = [trainer.cost.step for trainer in self.trainers if trainer.cost is not None]
        if len(costs) < len(self.trainers):
            costs = [1.0] * len(self.trainers)
        work = {}
        for c in cohort:
            work[c] = float(run.data.train_sizes[c] * costs[run.group_of(c).index])
        planned = plan_moves(cohort, run.home, work, run.world_size)
        move(
            run.processes,
            run.store,
            run.states,
            run.home,
            planned,
        )

    def state(self, client: int) -> ClientState:
        """Return a client's state; at its first visit a new one with the initial model."""
        if client not in self.run.states:
            self.run.states[client] = self.fresh(client, self.run.group_of(client).initial)
        return self.run.states[client]

    def fresh(self, client: int, model: Tensor) -> ClientState:
        """Make the state of a client that begins with `model` (D,)."""
        run = self.run
        group = run.group_of(client)
        if not group.spare:
            vector = run.store.allocate(model)
        else:
            vector = group.spare.pop()
            if not run.policy.overwritten:  # else the download overwrites the whole vector
                vector.copy_(model)
        vectors = {MODEL: vector}
        received = {MODEL: run.store.allocate(model) if run.policy.keeps_received else vector}
        for name, slot in run.method.slots().items():
            first = slot.first(model)
            vectors[name] = run.store.allocate(first)
            if slot.exchanged:
                received[name] = run.store.allocate(first)
        return ClientState(
            client,
            vectors,
            group.first_buffers(),
            received,
            0,
            client_memory(run),
        )

    def restore(self, client: int, before: ClientState | None) -> None:
        """Restore a client's state after a failed visit. The privacy that the visit has spent stays
        spent, as the server may have received the upload although the visit failed.

        Args:
            before: a copy of the state from before the visit; its values are copied to the client's
                current vectors. None: the client had no state.
        """
        now = self.run.states.pop(client, None)
        spent = privacy_spent(now)
        if before is None:
            if any(bool(tensor.any()) for tensor in spent.values()):
                self.state(client).memory |= spent
            return
        before.memory |= spent
        shapes = {slot: vector.shape for slot, vector in before.vectors.items()}
        if now is not None and shapes == {slot: now.vectors[slot].shape for slot in shapes}:
            shared = [slot for slot, v in before.received.items() if v is before.vectors[slot]]
            for slot, vector in before.vectors.items():
                before.vectors[slot] = now.vectors[slot].copy_(vector)
            for slot, vector in before.received.items():
                if slot in shared:
                    before.received[slot] = before.vectors[slot]
                else:
                    before.received[slot] = now.received[slot].copy_(vector)
        self.run.states[client] = before

    def answers(
        self, cohort: Sequence[int], results: Results
    ) -> tuple[list[int], dict[int, dict[str, Tensor]]]:
        """Return the clients of the cohort, on all ranks, that have not failed, and by client the
        uploaded statistics.

        Raises:
            RunFailed: every client of the cohort has failed.
        """
        run = self.run
        gathers = run.method.traits.statistics
        if not (run.tolerant or gathers):
            return list(cohort), {}
        failures = [failure for failure, outcome in results.failures if outcome == "skipped"]
        uploads = {}
        if gathers:
            uploads = {c: result.statistics for c, result in results.clients.items()}
        failed: dict[int, BadClient] = {}
        statistics: dict[int, dict[str, Tensor]] = {}
        for failures_of_rank, uploads_of_rank in run.processes.gather_objects((failures, uploads)):
            failed |= {failure.client: failure for failure in failures_of_rank}
            statistics |= uploads_of_rank
        if len(failed) == len(cohort):
            first = failed[cohort[0]]
            raise RunFailed(f"every client of round {first.round} failed; the first: {first}")
        return [c for c in cohort if c not in failed], dict(sorted(statistics.items()))

    def forget(self) -> None:
        """Drop the clients' states after aggregation if only the global model is kept."""
        run = self.run
        if not run.policy.keeps_clients:
            for client, state in run.states.items():
                run.group_of(client).spare.append(state.vectors[MODEL])
            run.states.clear()


def plan_moves(
    cohort: Sequence[int],
    home: Sequence[int],
    work: Mapping[int, float],
    ranks: int,
) -> list[tuple[int, int]]:
    """Plan which clients move to which rank, so that ranks have about equal work; returns pairs
    (client, new rank) in the order of the cohort, equal on every rank.

    Each step moves one client from the rank with the most work to the rank with the least: the
    client for which the greater of the two ranks' work becomes smallest. Steps end when the work of
    the busiest rank would fall by less than the share `WORTH`. If all steps together do not lower
    the work of the busiest rank by this share, no client moves.

    Args:
        home: the rank of each client.
        work: the work of each client of the cohort in this round, in any unit.
        ranks: number of ranks.
    """
    load = [0.0] * ranks
    place = {c: home[c] for c in cohort}
    for c in cohort:
        load[place[c]] += work[c]
    longest = max(load)
    for _ in cohort:
        most = load.index(max(load))
        least = load.index(min(load))
        movable = [c for c in cohort if place[c] == most]
        candidates = [(max(load[most] - work[c], load[least] + work[c]), c) for c in movable]
        # without candidates no client of the cohort is on that rank
        after, client = min(candidates, default=(load[most], -1))
        if client < 0 or after > (1 - WORTH) * load[most]:
            break
        load[most] -= work[client]
        load[least] += work[client]
        place[client] = least
    if max(load) > (1 - WORTH) * longest:
        return []
    return [(c, place[c]) for c in cohort if place[c] != home[c]]


def move(
    group: RankGroup,
    store: VectorStore,
    states: dict[int, ClientState],
    home: list[int],
    moved: Sequence[tuple[int, int]],
) -> None:
    """Send the states of moving clients to their new ranks, and update `home`. All ranks call it.

    Args:
        states: this rank's states by client.
        moved: (client, new rank), as from `plan_moves`.
    """
    if not moved:  # the same on all ranks
        return
    here = [c for c, _ in moved if c in states]
    with_state = {c for clients in group.gather_objects(here) for c in clients}
    for client, to in moved:
        if client in with_state:
            if group.rank == home[client]:
                group.send_object(states.pop(client), to)
            elif group.rank == to:
                states[client] = group.receive_object(home[client])
                store.adopt(states[client])
        home[client] = to
