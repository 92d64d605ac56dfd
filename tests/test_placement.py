"""Which clients move between ranks (that nothing else changes, tests/e2e/test_ranks.py sees)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from queue import Queue
from typing import Any, get_args

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from fl_lightning.engine.pool import WORTH, move, moves
from fl_lightning.foundation.parallel import Group
from fl_lightning.storage.state import ClientState
from fl_lightning.storage.store import Place, VectorStore


def loads(cohort: list[int], home: list[int], work: dict[int, float], ranks: int) -> list[float]:
    return [sum(work[c] for c in cohort if home[c] == r) for r in range(ranks)]


def test_a_lopsided_cohort_is_shared_out() -> None:
    home, work = [0, 0, 0, 0, 1, 1], dict.fromkeys(range(6), 10.0)
    assert moves([0, 1, 2, 3], home, work, 2) == [(0, 1), (1, 1)]
    assert moves([0, 1, 4, 5], home, work, 2) == []
    assert moves([0], home, work, 2) == []
    assert moves([0, 1, 4], home, work, 2) == []  # two and one is as good as it gets


def test_the_longest_goes_where_it_helps_most() -> None:
    assert moves([0, 1, 2], [0, 0, 0], {0: 5.0, 1: 3.0, 2: 2.0}, 2) == [(0, 1)]


def test_nobody_moves_from_a_rank_without_clients() -> None:
    """Local work that counts as 0 operations, and a cohort that has its home elsewhere."""
    assert moves([1], [0, 1], {1: 0.0}, 2) == []


def test_one_move_alone_may_be_in_vain() -> None:
    """Two ranks have most: that one of them is relieved helps nobody."""
    home, work = [0, 0, 1, 1], dict.fromkeys(range(4), 20.0)
    assert moves([0, 1, 2, 3], home, work, 3) == []
    assert moves([0, 1, 2, 3], home, work, 4) == [(0, 2), (2, 3)]


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 4), st.floats(0.1, 100)), min_size=1, max_size=12),
)
@example(3, [(0, 39.0), (1, 2.0), (1, 38.0)])
def test_no_move_makes_a_round_longer(ranks: int, clients: list[tuple[int, float]]) -> None:
    home = [h % ranks for h, _ in clients]
    work = {c: w for c, (_, w) in enumerate(clients)}
    cohort = list(range(len(clients)))
    before = max(loads(cohort, home, work, ranks))
    found = moves(cohort, home, work, ranks)
    assert len({c for c, _ in found}) == len(found)
    for client, to in found:
        assert home[client] != to
        home[client] = to
    after = max(loads(cohort, home, work, ranks))
    assert (
        after <= before * (1 - WORTH) + 1e-9
        if found and ranks > 1
        else after == pytest.approx(before)
    )


class Pair:
    """Two ranks that are threads."""

    send_object, receive_object = Group.send_object, Group.receive_object

    def __init__(
        self, rank: int, boxes: list[Queue[Any]], together: threading.Barrier, said: list[Any]
    ) -> None:
        self.device = torch.device("cpu")
        self.rank, self.size, self._boxes, self._together, self._said = (
            rank,
            2,
            boxes,
            together,
            said,
        )

    def gather_objects(self, item: Any) -> list[Any]:
        self._said[self.rank] = item
        self._together.wait(10)
        return list(self._said)

    def send(self, tensor: Tensor, to: int) -> None:
        self._boxes[to].put(tensor.clone())

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        tensor: Tensor = self._boxes[self.rank].get(timeout=10)
        assert (tuple(tensor.shape), tensor.dtype, source) == (tuple(shape), dtype, 1 - self.rank)
        return tensor


def states_of(store: VectorStore, clients: Sequence[int]) -> dict[int, ClientState]:
    found = {}
    for c in clients:
        vectors = {
            name: store.allocate(torch.full((4,), float(10 * c + k)))
            for k, name in enumerate(("model", "control"))
        }
        received = {
            "control": store.allocate(torch.full((4,), 10 * c + 2.0)),
            "model": vectors["model"],
        }
        memory = {"alpha": torch.tensor(c), "seen": torch.ones(2, 3)}
        found[c] = ClientState(
            c, vectors, [torch.tensor(c, dtype=torch.int64)], received, c + 1, memory
        )
    return found


@pytest.mark.parametrize("place", get_args(Place))
def test_a_state_moves_as_it_is(tmp_path: Path, place: Place) -> None:
    """Whatever vectors it has; what the server last received stays the client's own vector where it
    is that."""
    stores = [VectorStore(place, tmp_path, torch.device("cpu")) for _ in range(2)]
    states = [states_of(stores[0], [0, 1, 2]), states_of(stores[1], [3])]
    homes = [[0, 0, 0, 1, 0], [0, 0, 0, 1, 0]]
    boxes: list[Queue[Any]] = [Queue(), Queue()]
    together, said = threading.Barrier(2), [None, None]
    moved = [(1, 1), (3, 0), (4, 1)]  # client 4 has not taken part

    def rank(r: int) -> None:
        move(Pair(r, boxes, together, said), stores[r], states[r], homes[r], moved)  # type: ignore[arg-type]

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert homes == [[0, 1, 0, 0, 1]] * 2
    assert [sorted(s) for s in states] == [[0, 2, 3], [1]]
    for c, here in ((1, states[1]), (3, states[0])):
        [before], now = states_of(stores[0], [c]).values(), here[c]
        assert (now.client, now.rounds) == (c, before.rounds)
        assert (
            now.received["model"] is now.vectors["model"]
            and now.received["control"] is not now.vectors["control"]
        )
        for name in ("vectors", "received", "memory"):
            one, other = getattr(now, name), getattr(before, name)
            assert list(one) == list(other) and all(torch.equal(one[k], other[k]) for k in one)
        assert torch.equal(now.buffers[0], before.buffers[0])
        now.vectors["model"] += 1  # it can be trained on
