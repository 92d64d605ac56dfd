"""The mixing kernel, on one rank and on pretended ranks that exchange tiles."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from reckoning import seeded

from fl_lightning.core.layout import Segment
from fl_lightning.core.mixing import TILE, Gram, Mixer, mean_of
from fl_lightning.foundation.parallel import RankGroup, assign_homes
from tests.mixes import mixed


class Rank(RankGroup):
    """One of several threads that stand for processes; they exchange through a shared table."""

    def __init__(self, rank, size, table, gate):
        self.rank, self.size, self.device = rank, size, torch.device("cpu")
        self.table, self.gate, self.calls = table, gate, 0

    def _everyones(self, item):
        self.calls += 1
        self.table[self.calls, self.rank] = item
        self.gate.wait(timeout=20)
        return [self.table[self.calls, r] for r in range(self.size)]

    def gather_objects(self, item):
        return self._everyones(item) if self.size > 1 else [item]

    def all_to_all(self, parts, send_sizes, receive_sizes):
        send = torch.cat(parts)
        assert not send_sizes[self.rank]  # models do not travel to where they lie
        came = [p[self.rank] for p in self._everyones(send.split(list(send_sizes)))]
        assert [p.numel() for p in came] == list(receive_sizes)
        return came

    def gather_parts(self, parts, sizes):
        came = self._everyones(torch.cat(parts))
        assert [p.numel() for p in came] == list(sizes)
        return came


def on_ranks(size, job):
    """`job(group)` on every pretended rank; their answers."""
    table = {}
    gate = threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(job, [Rank(r, size, table, gate) for r in range(size)]))


def test_equal_models_stay_equal_bit_for_bit():
    w = torch.randn(1000)
    W = w.expand(7, -1).contiguous()
    A = torch.rand(7, 7, dtype=torch.float64)
    A /= A.sum(1, keepdim=True)
    assert all(torch.equal(row, w) for row in mixed(W, A, range(7)))
    assert torch.equal(mean_of(W, A[0]), w)


def test_the_identity_is_the_identity_bit_for_bit():
    W = torch.randn(7, 1000)
    assert torch.equal(mixed(W, torch.eye(7, dtype=torch.float64), range(7)), W)
    assert torch.equal(mixed(W, torch.eye(7, dtype=torch.float64)[[5, 2]], [5, 2]), W[[5, 2]])


N, D = 7, 2 * TILE + 900
SEGMENTS = [Segment(0, 300, 0), Segment(304, 2 * TILE + 500, 1), Segment(2 * TILE + 600, D, 2)]
SOURCES, RECEIVERS = [0, 1, 3, 4, 6], [1, 3, 6]


@pytest.fixture(scope="module")
def models():
    return torch.randn(N, D, generator=seeded())


@pytest.fixture(scope="module")
def weights():
    A = torch.rand(3, 3, 5, dtype=torch.float64, generator=seeded(1))
    return A / A.sum(-1, keepdim=True)


def server_step(W, A, size, sums_to_one=True):
    """On `size` ranks: the rows that each rank's receivers hear, the shared mean, and the Gram
    matrix."""
    home = assign_homes([5, 1, 2, 9, 3, 3, 1], size)

    def job(group):
        here = [c for c in range(N) if home[c] == group.rank]
        mixer = Mixer(group, home, {c: W[c].clone() for c in here}, SOURCES)
        into = {c: torch.full((D,), -1.0) for c in here if c in RECEIVERS}
        mixer.mix(SEGMENTS, A, RECEIVERS, into, sums_to_one)
        shared = torch.full((D,), -1.0)
        mixer.mean(SEGMENTS, A[:, 0], shared)
        return into, shared, mixer.gram(SEGMENTS, 3)

    return on_ranks(size, job)


def test_every_layer_is_mixed_with_its_own_weights(models, weights):
    into, shared, gram = server_step(models, weights, 1)[0]
    for s in SEGMENTS:
        columns = slice(s.start, s.stop)
        want = weights[s.layer].float() @ models[SOURCES][:, columns]
        for k, c in enumerate(RECEIVERS):
            torch.testing.assert_close(into[c][columns], want[k], rtol=1e-4, atol=1e-5)
        part = models[SOURCES][:, columns].double()
        scale = float(part.square().sum(1).max())  # float32 products, summed in float64
        torch.testing.assert_close(gram.full[s.layer], part @ part.T, rtol=0, atol=3e-6 * scale)
        want = weights[s.layer, 0].float() @ models[SOURCES][:, columns]
        torch.testing.assert_close(shared[columns], want, rtol=1e-4, atol=1e-5)
    assert (into[1][300:304] == -1).all()  # between the segments nothing is touched


@pytest.mark.parametrize("size", [1, 2])
def test_rows_without_sum_one_are_applied_as_they_are(models, weights, size):
    A = 1.3 * weights
    for into, *_ in server_step(models, A, size, sums_to_one=False):
        for c, row in into.items():
            for s in SEGMENTS:
                columns = slice(s.start, s.stop)
                want = A[s.layer, RECEIVERS.index(c)].float() @ models[SOURCES][:, columns]
                torch.testing.assert_close(row[columns], want, rtol=1e-4, atol=1e-5)


def test_distances_survive_float32_when_clients_are_alike(weights):
    """At one per cent of drift the plain float32 product loses them (relative error about 0.7);
    centred it does not."""
    g = seeded(2)
    W = torch.randn(1, D, generator=g) + 0.01 * torch.randn(N, D, generator=g)
    _, _, gram = server_step(W, weights, 1)[0]
    for s in SEGMENTS:
        exact = torch.cdist(
            W[SOURCES][:, s.start : s.stop].double(), W[SOURCES][:, s.start : s.stop].double()
        ).square()
        torch.testing.assert_close(gram.distances[s.layer], exact, rtol=1e-4, atol=0)


@pytest.mark.parametrize("exchange", [1, 1 << 20])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_any_number_of_ranks_gives_the_same_bits(
    models,
    weights,
    size,
    exchange,
    monkeypatch,
):
    """Tiles one by one, and several at a time."""
    monkeypatch.setattr("fl_lightning.core.mixing.EXCHANGE", exchange)
    into, shared, gram = server_step(models, weights, 1)[0]
    answers = server_step(models, weights, size)
    heard = {c: row for part, _, _ in answers for c, row in part.items()}
    assert sorted(heard) == RECEIVERS
    assert all(torch.equal(row, into[c]) for c, row in heard.items())
    for _, other, products in answers:
        assert torch.equal(other, shared)
        assert torch.equal(products.centred, gram.centred)
        assert torch.equal(products.full, gram.full)


def test_work_is_shared_out_largest_first():
    assert assign_homes([1, 9, 5, 4], 2) == [0, 0, 1, 1]  # 9 | 5 | 4 | then 1, a tie, to rank 0
    home = assign_homes([3] * 10, 3)
    assert sorted(home.count(r) for r in range(3)) == [3, 3, 4]


def gram_of(models):
    """The inner products of `models` (n, D) of one layer, centred about their mean."""
    mean = models.mean(0)
    centred = models - mean
    return Gram((centred @ centred.T)[None], (centred @ mean)[None], (mean @ mean)[None])


def test_products_among_some_models_are_those_of_them_alone():
    """Closed form: products of the chosen models, centred about the chosen ones' own mean."""
    models = torch.randn(6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    chosen = torch.tensor([4, 0, 3])
    some = gram_of(models).select(chosen)
    alone = gram_of(models[chosen])
    torch.testing.assert_close(some.centred, alone.centred)
    torch.testing.assert_close(some.full[0], models[chosen] @ models[chosen].T)
    torch.testing.assert_close(some.distances[0], torch.cdist(models[chosen], models[chosen]) ** 2)
