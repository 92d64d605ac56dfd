"""FEDORA: subspaces, propagation, selective pull and new clients (cards 1.34 and 1.34b)."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from classes import FEDORA, Local
from lines import run_line
from reckoning import seeded
from refusals import refuses
from torch.testing import assert_close
from watching import client_of, payload_of, same, trained

from fl_lightning.callbacks.graphs import random_graph
from fl_lightning.callbacks.propagation import basis, neighbourhood, propagated
from fl_lightning.cli import main
from fl_lightning.data.part import ResidentPart
from fl_lightning.engine.joining import join

VALIDATED = {"data": {"validation": 0.25}}


def part(x, y=None):
    return ResidentPart(x, torch.zeros(len(x), dtype=torch.int64) if y is None else y, None)


def some(seed, n=30, dim=12):
    draws = seeded(seed)
    return torch.rand(n, dim, generator=draws), torch.randint(0, 3, (n,), generator=draws)


# ---------------------------------------------------------------- subspaces


@pytest.mark.parametrize("n", [5, 40])
@pytest.mark.parametrize("p", [1, 3])
def test_a_basis_spans_the_leading_singular_vectors(n, p):
    x, y = some(0, n)
    U = basis(part(x, y), p, 3)
    matrix = torch.cat([x.double(), torch.nn.functional.one_hot(y, 3).double()], 1).T
    want = torch.linalg.svd(matrix, full_matrices=False).U[:, :p]
    assert U.shape == (15, p)
    assert_close(U.T @ U, torch.eye(p, dtype=torch.float64), rtol=0, atol=1e-9)
    assert_close(U @ U.T, want @ want.T, rtol=0, atol=1e-7)


def test_without_labels_none_is_read():
    class Blind(ResidentPart):
        def batches(self, *args, **kwargs):
            for x, _ in super().batches(*args, **kwargs):
                yield x, None

    x, y = some(1)
    assert basis(Blind(x, y, None), 1, 0).shape == (12, 1)


# ---------------------------------------------------------------- propagation


def graph(seed=0, n=6):
    W = torch.rand(n, n, generator=seeded(seed), dtype=torch.float64)
    return W + W.T


@pytest.mark.parametrize("alpha", [0.0, 1.0, 4.0])
def test_the_closed_form_is_the_fixed_point_of_the_iteration(alpha):
    W = graph()
    A, kappa = propagated(W, alpha), alpha / (1 + alpha)
    walk = W / W.sum(1, keepdim=True)
    assert_close(
        A, kappa * walk @ A + (1 - kappa) * torch.eye(6, dtype=torch.float64), rtol=0, atol=1e-9
    )
    assert (A >= 0).all()
    assert_close(A.sum(1), torch.ones(6, dtype=torch.float64))
    errors = [float((propagated(W, alpha, steps) - A).abs().sum(1).max()) for steps in range(6)]
    assert all(later <= kappa * earlier + 1e-9 for earlier, later in pairwise(errors))
    assert_close(propagated(W, alpha, 400), A, rtol=0, atol=1e-6)


def test_the_codes_neighbourhood_keeps_the_closest_others():
    S = torch.tensor(
        [[1.0, 0.9, 0.5, 0.9], [0.9, 1.0, 0.1, 0.2], [0.5, 0.1, 1.0, 0.3], [0.9, 0.2, 0.3, 1.0]]
    ).double()
    W = neighbourhood(S, 10.0, 2)
    assert [row.nonzero()[:, 0].tolist() for row in W] == [[1, 3], [0, 3], [0, 3], [0, 2]]
    assert_close(W[0, 1], (10 * S[0, 1]).exp())
    one = neighbourhood(torch.full((4, 4), 0.5).double(), 10.0, 1)  # ties: the lower number
    assert [row.nonzero()[:, 0].tolist() for row in one] == [[1], [0], [0], [0]]


# ---------------------------------------------------------------- training


def test_the_strength_is_the_gain_on_validation_data(federation):
    fed = federation(FEDORA(), **VALIDATED)
    fed.round(1)
    client = client_of(fed, 0, 2)
    own, part = client["model"].clone(), client.data.validation
    nothing = torch.zeros_like(own)  # a model that knows nothing: the loss is log 10
    assert client.loss(part, nothing) == pytest.approx(np.log(10), rel=1e-5)
    gain = client.loss(part) - client.loss(part, nothing)
    assert gain < 0
    payload = payload_of(client, nothing)
    assert FEDORA().coefficient(client, payload) == 1e-8
    assert FEDORA(selection="code").coefficient(client, payload) == 0
    assert FEDORA(selection="always").coefficient(client, payload) == 1
    client["model"].zero_()
    payload = payload_of(client, own)
    assert FEDORA().coefficient(client, payload) == pytest.approx(-gain)
    assert FEDORA(selection="code").coefficient(client, payload) == pytest.approx(
        0.5 * np.exp(-gain / 2)
    )
    [phase] = FEDORA().phases(client, payload)
    assert set(phase.objective.proximal_weight[client.layout.is_parameter]) == {
        FEDORA().coefficient(client, payload)
    }


def test_constant_lambdas_are_table_5s(federation):
    """`constant` is the number itself, without validation data; at 1 it is `always`, at 0 training
    alone."""
    assert [
        FEDORA(selection="constant", lam=lam).coefficient(None, None) for lam in (0.01, 0.1, 10.0)
    ] == [0.01, 0.1, 10.0]
    constant = [FEDORA(selection="constant", lam=lam) for lam in (1.0, 0.1, 0.0)]
    methods = [*constant, FEDORA(selection="always"), Local()]
    one, tenth, nothing, always, alone = (
        trained(federation, method, rounds=3, **VALIDATED) for method in methods
    )
    assert same(one, always) and not same(one, tenth) and same(nothing, alone)
    with refuses(r"method\.lam=0\.1.*selection constant"):
        FEDORA(lam=0.1)
    with refuses(r"method\.lam=-1"):
        FEDORA(selection="constant", lam=-1.0)


def test_random_similarity_is_table_4s(federation):
    """FedU's graph, and p = 1 to oneself: by the seed alone, and no basis is told."""
    S = random_graph(200, 3)
    assert torch.equal(S, S.T) and not S.diagonal().any()
    others = S[*torch.triu_indices(200, 200, 1)]
    # of two draws, both must be small
    assert float((others == 0).double().mean()) == pytest.approx(0.125, abs=0.01)
    assert float(others[others > 0].mean()) == pytest.approx(0.5476, abs=0.01)
    fed = federation(FEDORA(similarity="random", selection="constant", lam=0.1))
    own = propagated(random_graph(4, 0) + torch.eye(4, dtype=torch.float64), 1.0)
    record = fed.round(1)
    assert not record.traffic[:, 1, -1].any()
    np.testing.assert_allclose(record.relation.rows[:, 0], own.numpy(), rtol=1e-6)
    assert join(fed.worker, fed.run.data.client(0), True, 1).vector.isfinite().all()


def test_validation_data_are_asked_for(federation):
    with refuses(r"data\.validation"):
        federation(FEDORA()).fit()
    federation(FEDORA(selection="always")).fit()
    federation(FEDORA(selection="constant", lam=0.1)).fit()


# ---------------------------------------------------------------- new clients


def contents(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run."""
    runs = tmp_path_factory.mktemp("runs")
    flags = (
        f"fit --config kapc_exact_digits --method fedora --data.validation 0.2 --loggers null "
        f"--callbacks.heatmaps null --federation.rounds 2 --federation.clients 4 --out {runs} --name a"
    )
    assert run_line(flags) == 0
    return runs / "a"


@pytest.mark.sampled("False")
@pytest.mark.parametrize("labelled", [True, False])
def test_join_writes_a_model_and_touches_nobody_else(
    labelled, finished, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    before = contents(finished)
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = (digits.images * 15.9).astype(np.uint8)
    arrays = {"x_train": x[:100], "x_test": x[100:160], "y_test": digits.target[100:160]}
    np.savez("new.npz", **arrays, **({"y_train": digits.target[:100]} if labelled else {}))
    capsys.readouterr()
    line = f"join --run {finished} --data new.npz --out new.safetensors".split()
    assert main(line) == 0
    said = capsys.readouterr().out
    assert contents(finished) == before
    assert f"# labelled: {labelled}" in said
    assert ("# accuracy: " in said) == labelled
    assert (
        f"# rounds of local training before this score: {2 * labelled} (--rounds); the run had 2"
        in said
    )
    scope = {}
    exec((tmp_path / "new.py").read_text(), scope)
    assert scope["model"](torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert main(line) == 2  # it is not written over


@pytest.mark.parametrize(
    "arrays, said",
    [
        ({"x_train": np.zeros((5, 9, 9), np.uint8)}, "shape"),
        ({"y_train": np.arange(5)}, "x_train"),
    ],
)
def test_join_refuses_what_does_not_fit(arrays, said, finished, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("new.npz", **arrays)
    capsys.readouterr()
    assert run_line(f"join --run {finished} --data new.npz --out new.safetensors") == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and said in error[0]
    assert not (tmp_path / "new.safetensors").exists()


def test_a_newcomer_asks_anew_how_strongly_it_is_pulled(federation, monkeypatch):
    """Before its first round it is what it has heard, and gains nothing; afterwards FEDORA's lambda
    is the gain."""
    fed = federation(FEDORA(), rounds=1, data={"validation": 0.3})
    fed.round(1)
    asked = []
    strength = FEDORA.coefficient

    def watched(self, client, payload):
        asked.append((strength(self, client, payload), client["model"].clone()))
        return asked[-1][0] if len(asked) < 3 else 5.0

    monkeypatch.setattr(FEDORA, "coefficient", watched)
    new = fed.run.data.client(0)
    model, *_ = join(fed.worker, new, True, 3)
    assert [round(s, 8) for s, _ in asked[:1]] == [1e-8]
    assert len(asked) == 3 and len({float(model.norm()) for _, model in asked}) == 3
    pulled = float((model - asked[0][1]).norm())
    monkeypatch.setattr(FEDORA, "coefficient", lambda *_: 0.0)
    free, *_ = join(fed.worker, new, True, 3)
    assert pulled < 0.5 * float((free - asked[0][1]).norm())  # the third round's strength came in
