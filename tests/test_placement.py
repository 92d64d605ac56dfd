"""Which clients move between ranks (that nothing else changes, tests/e2e/test_ranks.py sees)."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fl_lightning.engine.pool import WORTH, plan_moves


def loads(cohort, home, work, ranks):
    return [sum(work[c] for c in cohort if home[c] == r) for r in range(ranks)]


def test_a_lopsided_cohort_is_shared_out():
    home, work = [0, 0, 0, 0, 1, 1], dict.fromkeys(range(6), 10.0)
    assert plan_moves([0, 1, 2, 3], home, work, 2) == [(0, 1), (1, 1)]
    assert plan_moves([0, 1, 4, 5], home, work, 2) == []
    assert plan_moves([0], home, work, 2) == []
    assert plan_moves([0, 1, 4], home, work, 2) == []  # two and one is as good as it gets


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 4), st.floats(0.1, 100)), min_size=1, max_size=12),
)
@example(3, [(0, 39.0), (1, 2.0), (1, 38.0)])
def test_no_move_makes_a_round_longer(ranks, clients):
    home = [h % ranks for h, _ in clients]
    work = {c: w for c, (_, w) in enumerate(clients)}
    cohort = list(range(len(clients)))
    before = max(loads(cohort, home, work, ranks))
    moves = plan_moves(cohort, home, work, ranks)
    assert len({c for c, _ in moves}) == len(moves)
    for client, to in moves:
        assert home[client] != to
        home[client] = to
    after = max(loads(cohort, home, work, ranks))
    assert (
        after <= before * (1 - WORTH) + 1e-9
        if moves and ranks > 1
        else after == pytest.approx(before)
    )
