"""Which rank trains whom: clients live on a home rank, and move where a round's cohort would leave
ranks waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fl_lightning.foundation.parallel import Group
from fl_lightning.storage.state import ClientState
from fl_lightning.storage.store import VectorStore

WORTH = 0.05
"""A move must shorten the round by this share, or what it saves is lost in moving (ours, not
tuned)."""


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
