"""The clients of a rank: their states, who trains where, and who has answered.

Clients live on a home rank, and move where a round's cohort would leave ranks waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from fl_lightning.core.client import client_memory
from fl_lightning.core.run import RunContext
from fl_lightning.engine.record import Results
from fl_lightning.engine.trainer import Trainer
from fl_lightning.foundation.errors import RunFailed
from fl_lightning.foundation.parallel import Group
from fl_lightning.storage.state import MODEL, ClientState, spent_by
from fl_lightning.storage.store import VectorStore

WORTH = 0.05
"""A move must shorten the round by this share, or what it saves is lost in moving (ours, not
tuned)."""


class Pool:
    """Client states on their home ranks. The `trainers` tell what training costs."""

    def __init__(self, run: RunContext, trainers: Sequence[Trainer]) -> None:
        self.run = run
        self.trainers = trainers

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
            self.run.states[client] = self.fresh(client, self.run.group_of(client).initial)
        return self.run.states[client]

    def fresh(self, client: int, model: Tensor) -> ClientState:
        """The state of a client that begins with `model` (D,)."""
        run = self.run
        group = self.run.group_of(client)
        if not group.spare:
            vector = run.store.allocate(model)
        else:  # whatever is in it, if it will be written over
            vector = group.spare.pop()
            if not run.policy.overwritten:
                vector.copy_(model)
        vectors = {MODEL: vector}
        received = {MODEL: run.store.allocate(model) if run.policy.keeps_received else vector}
        for name, slot in run.method.slots().items():
            first = slot.first(model)
            vectors[name] = run.store.allocate(first)
            if slot.exchanged:
                received[name] = run.store.allocate(first)
        return ClientState(client, vectors, group.first_buffers(), received, 0, client_memory(run))

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
        shapes = {slot: v.shape for slot, v in before.vectors.items()}
        if now is not None and shapes == {slot: now.vectors[slot].shape for slot in shapes}:
            shared = {slot for slot, v in before.received.items() if v is before.vectors[slot]}
            before.vectors = {s: now.vectors[s].copy_(v) for s, v in before.vectors.items()}
            before.received = {
                s: before.vectors[s] if s in shared else now.received[s].copy_(v)
                for s, v in before.received.items()
            }
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


def moves(
    cohort: Sequence[int], home: Sequence[int], work: Mapping[int, float], ranks: int
) -> list[tuple[int, int]]:
    """Who of `cohort` moves, and where to: (client, rank), in order. The same on every rank.

    One client at a time, from the rank with most of the round's `work` to the one with least: the
    client that leaves the greater of the two least, as long as that is less by `WORTH`. Of these
    moves the first few are made that leave the shortest round, if it is shorter by `WORTH`: where
    other ranks have as much to do, all of them may be in vain.
    """
    load = [0.0] * ranks
    place = {c: home[c] for c in cohort}
    for c in cohort:
        load[place[c]] += work[c]
    moved: list[tuple[int, int]] = []
    rounds = [max(load)]
    while len(moved) < len(cohort):
        most = max(range(ranks), key=lambda r: (load[r], -r))
        least = min(range(ranks), key=lambda r: (load[r], r))
        candidates = [
            (max(load[most] - work[c], load[least] + work[c]), c)
            for c in cohort
            if place[c] == most
        ]
        after, client = min(candidates, default=(load[most], -1))
        # none there: local work counts as 0 operations
        if client < 0 or after > (1 - WORTH) * load[most]:
            break
        load[most] -= work[client]
        load[least] += work[client]
        place[client] = least
        moved.append((client, least))
        rounds.append(max(load))
    if min(rounds) > (1 - WORTH) * rounds[0]:
        return []
    # of a client that moves twice, the last counts
    place = dict(moved[: rounds.index(min(rounds))])
    return [(c, place[c]) for c in cohort if place.get(c, home[c]) != home[c]]


def move(
    group: Group,
    store: VectorStore,
    states: dict[int, ClientState],
    home: list[int],
    moved: Sequence[tuple[int, int]],
) -> None:
    """Send the states of the clients that move to their new home, and write it into `home`. All
    ranks call it."""
    if not moved:  # so all ranks say
        return
    known = {c for here in group.gather_objects([c for c, _ in moved if c in states]) for c in here}
    for client, to in moved:
        if client in known:
            if group.rank == home[client]:
                group.send_object(states.pop(client), to)
            elif group.rank == to:
                states[client] = group.receive_object(home[client])
                store.adopt(states[client])
        home[client] = to
