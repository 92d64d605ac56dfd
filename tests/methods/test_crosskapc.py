"""crosskapc: groups by steps, their trial by held-out losses, the rows that follow, and shrunk
steps."""

import math

import numpy as np
import pytest
import torch
from lines import run_line
from numpy.testing import assert_allclose
from reckoning import seeded
from torch import Tensor, nn
from torch.testing import assert_close
from watching import Watch, client_of, run_all

from fl_lightning.callbacks.crossfitted import (
    COMPARED,
    EVERYWHERE,
    FIRST,
    HEAD,
    LAST,
    candidates,
    class_gaps,
    client_groups,
    gains,
    split,
)
from fl_lightning.cli import main
from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import prepare
from fl_lightning.methods.crosskapc import CrossKAPC, class_table
from fl_lightning.results.folder import RunFolder

N = 6
GROUPS = [0, 1, 0, 1, 0, 1]
CONFLICT = {
    "clients": N,
    "rounds": LAST + 2,
    "local_epochs": 3,
    "data": {
        "source": "digits",
        "partition": "iid",
        "planted": "labels",
        "groups": 2,
        "fraction": 0.5,
    },
    "optimizer": {"lr": 0.2},
}
ALIKE = CONFLICT | {"data": {"source": "digits", "partition": "iid", "fraction": 0.5}}


# ---------------------------------------------------------------- the pieces


def test_the_split_by_hand():
    """Means 0.1 and 0.8, within them deviations of 0.1: seven of them."""
    threshold, distance = split(torch.tensor([0.0, 0.2, 0.7, 0.9]))
    assert threshold == pytest.approx(0.45) and distance == pytest.approx(7.0)


def test_a_normal_sample_does_not_split():
    """Halved at its mean it has 2 (2 / pi)^1/2 / (1 - 2 / pi)^1/2 = 2.65."""
    draws = torch.randn(20_000, generator=seeded(0))
    assert split(draws)[1] == pytest.approx(2.65, abs=0.05)


@pytest.mark.parametrize("values", [[0.3] * 6, [0.3, 0.3 + 1e-9, 0.3, 0.3], [0.5]])
def test_equal_values_do_not_split(values):
    assert split(torch.tensor(values, dtype=torch.float64))[1] == 0


def test_groups_without_noise_are_exact():
    """Cosines of 0.4 within them and of 0.1 between."""
    truth = torch.tensor(GROUPS)[:, None] == torch.tensor(GROUPS)
    cosines = 0.1 + 0.3 * truth.double()
    upper = torch.triu_indices(N, N, 1)
    threshold, distance = split(cosines[upper[0], upper[1]])
    assert distance > 1e4 and client_groups(cosines > threshold) == [[0, 2, 4], [1, 3, 5]]


def test_a_wrong_pair_joins_no_two_groups():
    """Of 40 clients in two groups a pair is wrong, and another is missed."""
    truth = (torch.arange(40)[:, None] % 2 == torch.arange(40) % 2).long()
    for pair, value in (((0, 1), 1), ((2, 4), 0)):
        truth[pair] = truth[pair[::-1]] = value
    assert client_groups(truth) == [list(range(0, 40, 2)), list(range(1, 40, 2))]


def test_class_gaps_by_hand():
    """Variance within (1 + 1) / (1 + 1); class 0: 2 * 2 / 4 * 3^2; class 1: only two have it."""
    tables = torch.zeros(3, 2, 2 + 2)
    tables[0] = torch.tensor([[2.0, 1.0, 0.0, 0.0], [1.0, 0.0, 5.0, 0.0]])
    tables[1] = torch.tensor([[2.0, 1.0, 0.0, 3.0], [1.0, 0.0, 5.0, 2.0]])
    tables[2, 1] = torch.tensor([1.0, 0.0, 5.0, 0.0])
    gaps = class_gaps(tables)
    assert gaps[0, 1] == gaps[1, 0] == pytest.approx((9 + 0.5 * 4) / 2)
    assert gaps[0, 2] == 0 and gaps[1, 2] == pytest.approx(0.5 * 4)


def test_class_gaps_of_noise_are_one():
    """Whatever the shares of classes."""
    draws = torch.Generator().manual_seed(0)
    counts = torch.randint(2, 9, (30, 10, 1), generator=draws).double()
    means = torch.randn(30, 10, 16, dtype=torch.float64, generator=draws) / counts.sqrt()
    gaps = class_gaps(torch.cat([counts, 16 * (counts - 1), means], 2))
    assert gaps[~torch.eye(30, dtype=torch.bool)].mean() == pytest.approx(1, abs=0.05)


def test_clients_without_a_common_class_are_not_compared():
    tables = torch.zeros(2, 2, 3)
    tables[0, 0] = tables[1, 1] = torch.tensor([2.0, 1.0, 0.0])
    assert not class_gaps(tables)[0, 1].isfinite()


def planted(effects, noise=0.0):
    """Losses (3, 8) of a trial: of the client, of the round and of the candidate."""
    clients, rounds = torch.arange(8), torch.arange(3)
    drawn = torch.randn(3, 8, dtype=torch.float64, generator=seeded(1))
    tried = torch.stack([candidates(clients, COMPARED + 1 + int(t)) for t in rounds])
    return (
        1
        + 0.1 * clients
        + 0.2 * rounds[:, None]
        + torch.tensor(effects).double()[tried]
        + noise * drawn
    )


def test_gains_are_those_of_least_squares():
    """Against numpy's solution and the covariance by hand, with one loss missing."""
    losses = planted((0.0, -0.3, 0.1), 0.2)
    losses[1, 5] = math.inf
    rows = [(t, c) for t in range(3) for c in range(8) if (t, c) != (1, 5)]
    X, y = np.zeros((len(rows), 12)), np.array([float(losses[r]) for r in rows])
    for k, (t, c) in enumerate(rows):
        X[k, c] = 1
        if t:
            X[k, 7 + t] = 1
        if which := (c + t + COMPARED + 1) % 3:
            X[k, 9 + which] = 1
    beta, *_ = np.linalg.lstsq(X, y, rcond=None)
    cov = np.linalg.inv(X.T @ X) * ((y - X @ beta) ** 2).sum() / (len(rows) - 12)
    z = gains(losses, COMPARED)
    assert z[HEAD, EVERYWHERE] == pytest.approx(-beta[10] / cov[10, 10] ** 0.5)
    assert z[FIRST, EVERYWHERE] == pytest.approx(-beta[11] / cov[11, 11] ** 0.5)
    over = (cov[10, 10] + cov[11, 11] - 2 * cov[10, 11]) ** 0.5
    assert z[FIRST, HEAD] == pytest.approx((beta[10] - beta[11]) / over)


def test_too_few_losses_decide_nothing():
    assert gains(torch.full((3, 8), math.inf), COMPARED) == {}
    losses = planted((0.0, 1.0, 2.0))
    losses[:, 1:] = math.inf
    assert gains(losses, COMPARED) == {}


# ---------------------------------------------------------------- in a federation


def test_planted_groups_are_found(federation, capsys):
    """By the steps of three rounds, exactly; one layer is mixed within them, the other among
    all."""
    fed = federation(CrossKAPC(), **CONFLICT)
    fed.prepare()
    records = [fed.round(t) for t in range(1, fed.run.rounds + 1)]
    near = fed.run.server.memory["cross.near"]
    truth = torch.tensor(GROUPS)[:, None] == torch.tensor(GROUPS)
    assert torch.equal(near | torch.eye(N, dtype=torch.int64), truth.long())
    assert capsys.readouterr().err.count(": 0, 2, 4 | 1, 3, 5\n") == 1
    summary = fed.run.method.summary(fed.run)
    assert summary["client_groups"] == [[0, 2, 4], [1, 3, 5]]
    [name] = summary["grouped_layers"]
    n, grouped = np.array(fed.run.data.train_sizes), fed.run.layer_names.index(name)
    rows = records[-1].relation.rows
    for c in range(N):
        inside = np.array(GROUPS) == GROUPS[c]
        assert_allclose(rows[c, grouped], inside * n / n[inside].sum(), atol=1e-6)
        assert_allclose(rows[c, 1 - grouped], n / n.sum(), atol=1e-6)
    metrics = records[-1].metrics
    assert metrics["groups_separation"] > 4
    assert max(metrics["groups_z_last"], metrics["groups_z_first"]) > 2


def test_class_means_that_conflict_need_no_losses(federation, monkeypatch):
    monkeypatch.setattr("fl_lightning.callbacks.crossfitted.gains", lambda *_: {})
    fed = federation(CrossKAPC(), **CONFLICT)
    fed.prepare()
    run_all(fed)
    summary = fed.run.method.summary(fed.run)
    assert summary["client_groups"] == [[0, 2, 4], [1, 3, 5]]
    assert summary["grouped_layers"] == [fed.run.layer_names[-1]]


def test_conflict_beside_label_skew_is_found(federation):
    """Steps alone do not tell the groups."""
    data = CONFLICT["data"] | {"partition": "hsu", "alpha": 2.0}
    fed = federation(CrossKAPC(), **(CONFLICT | {"data": data}))
    fed.prepare()
    run_all(fed)
    sums, count = fed.run.server.memory["cross.cosines"]
    _, distance = split((sums / count)[tuple(torch.triu_indices(N, N, 1))])
    assert distance < 4
    assert fed.run.method.summary(fed.run)["client_groups"] == [[0, 2, 4], [1, 3, 5]]


def test_a_table_of_classes(federation):
    """Counts, and with the features of a plain pass means and squared distances from them."""
    fed = run_all(federation(CrossKAPC(), **(ALIKE | {"rounds": 1})))
    client = client_of(fed, 2)
    [(x, y)] = client.data.train.batches(1000)
    features = client.bind().model.body(x).detach()
    table = class_table(client)
    for c in range(10):
        of_class = features[y == c]
        assert_close(table[c, 2:], of_class.mean(0))
        assert_close(table[c, 1], (of_class - of_class.mean(0)).square().sum())
        assert table[c, 0] == len(of_class)


def test_a_regression_goes_by_steps_alone(federation, tmp_path):
    x = np.random.default_rng(0).normal(size=(200, 64)).astype(np.float32)
    file = tmp_path / "numbers.npz"
    np.savez(file, x_train=x, y_train=x[:, 0], x_test=x, y_test=x[:, 0])
    data = {"root": str(file), "task": "regression", "partition": "iid"}
    changes = {"data": data, "rounds": COMPARED, "optimizer": {"lr": 0.01}}
    fed = run_all(federation(CrossKAPC(), **(ALIKE | changes)))
    assert fed.run.server.memory["cross.gaps"].isinf().all()


def test_without_conflict_it_is_fedavg(federation, capsys):
    """From the second round on all receive what FedAvg would send: the mean of uploads, to the bit,
    one for all."""
    watch, after = Watch(), list[Tensor]()
    fed = federation(CrossKAPC(), callbacks=[watch], **ALIKE)
    fed.prepare()
    for t in range(1, fed.run.rounds + 1):
        fed.round(t)
        after.append(fed.run.groups[0].vectors["model"].clone())
    assert "all receive FedAvg's model" in capsys.readouterr().err
    downloads = [watch.downloads[t * N : (t + 1) * N] for t in range(fed.run.rounds)]
    for t, mean in enumerate(after[:-1]):
        assert all(torch.equal(vector, mean) for _, vector, _ in downloads[t + 1])


def test_the_judged_step_is_shrunk_by_its_noise(federation):
    """start + (1 - share)^1/2 (model - start) by layer; share = s^2 / n_i, s^2 from the halves of
    round 1."""
    fed = run_all(federation(CrossKAPC(), **(ALIKE | {"rounds": 2})))
    sums, count = fed.run.server.memory["cross.noise"]
    client, layout = client_of(fed, 3), fed.run.groups[0].layout
    share = (sums / count / fed.run.data.train_sizes[3]).clamp_max(1)
    assert bool((share > 0).all()) and bool((share < 1).all())
    assert_close(client.memory["share"].double(), share, rtol=1e-6, atol=0)
    judged, start, model = fed.run.method.personal(client), client["start"], client["model"]
    for s in layout.segments(layout.is_parameter, by_layer=True):
        at = slice(s.start, s.stop)
        expected = start[at] + (1 - float(share[s.layer])) ** 0.5 * (model[at] - start[at])
        assert_close(judged[at], expected)


class Deep(nn.Sequential):
    """Layers of 8 numbers: with the classifier `count`."""

    head = "out"

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.flat = nn.Flatten()
        self.add_module("body0", nn.Linear(64, 8))
        for k in range(1, count - 1):
            self.add_module(f"body{k}", nn.Linear(8, 8))
        self.add_module("out", nn.Linear(8, 10))


class Nine(Deep):
    """One layer more than a third trial wants."""

    def __init__(self) -> None:
        super().__init__(9)


def tried_by(run):
    """By candidate, the layers that it groups."""
    run.relation.on_fit_start(run)
    return run.relation._layers


def test_up_to_half_of_the_layers_are_tried_from_each_end(make_run):
    assert tried_by(make_run(CrossKAPC(), net=Deep)) == {
        1: [3],
        2: [0],
        3: [2, 3],
        4: [0, 1],
    }
    tried = tried_by(make_run(CrossKAPC(), net=Nine))
    assert tried[5] == [5, 6, 7, 8] and tried[6] == [0, 1, 2, 3] and len(tried) == 6


@pytest.mark.sampled("[1]")
@pytest.mark.parametrize("winner", [HEAD, FIRST])
def test_where_one_layer_gains_nothing_two_are_tried(winner, federation, monkeypatch, capsys):
    """Rows of the second trial, and those that follow where it has a winner, are exact."""
    trials = iter(
        [{}, {}, *[{(HEAD, 0): 3.0, (FIRST, 0): 6.0, (FIRST, HEAD): 4.0 * winner - 4}] * 2]
    )
    monkeypatch.setattr("fl_lightning.callbacks.crossfitted.gains", lambda *_: next(trials))
    changes = {"rounds": LAST + 5, "local_epochs": 1}
    fed = federation(CrossKAPC(guard=0.0), net=Deep, **(CONFLICT | changes))
    fed.prepare()
    rows = []
    for t in range(1, fed.run.rounds + 1):
        if t == LAST + 1:
            fed.run.server.memory["cross.near"] = (
                torch.tensor(GROUPS)[:, None] == torch.tensor(GROUPS)
            ).long()
        rows.append(fed.round(t).relation.rows)
    assert "rounds 7 to 9 try them in the last 2 layers, and in the first 2\n" in (
        lines := capsys.readouterr().err
    )
    assert f"grouped in the {('last', 'first')[winner - 1]} 2 layers (z 3.0" in lines
    n = np.array(fed.run.data.train_sizes)
    ends = {EVERYWHERE: [], HEAD: [2, 3], FIRST: [0, 1]}
    for t in (*range(LAST, LAST + 3), LAST + 3, LAST + 4):
        for c in range(N):
            trial = t < LAST + 3
            chosen = (c + t + 1) % 3 if trial else winner
            others = n * (np.arange(N) != c) if trial else n
            inside = others * (np.array(GROUPS) == GROUPS[c])
            for layer in range(4):
                row = inside if layer in ends[chosen] else others
                assert_allclose(rows[t][c, layer], row / row.sum(), atol=1e-6)
    layers = fed.run.method.summary(fed.run)["grouped_layers"]
    assert layers == [fed.run.layer_names[k] for k in ends[winner]]


# ---------------------------------------------------------------- where there are no groups to find


def test_a_model_of_one_layer(fit, capsys):
    run = fit("single", FLAGS, "--model mlp --model.hidden []")
    assert capsys.readouterr().err.count("the model has one layer: no groups are looked for") == 1
    assert "groups_separation" not in RunFolder(run).read("metrics")[-1]


def test_one_sample_a_client(federation, capsys):
    """No halves, no losses: all of a step counts as noise, what was received is judged, and a line
    says so."""
    few = prepare(DataConfig(source="digits", partition="iid"), 5, 0)
    train, *others = few._shares
    few._shares, few.train_sizes = ([index[:1] for index in train], *others), [1] * 5
    fed = run_all(federation(CrossKAPC(guard=0.0), clients=5, rounds=LAST + 1, data=few))
    assert capsys.readouterr().err.count("no client has enough samples to measure its noise") == 1
    client = client_of(fed, 0)
    assert client.memory["share"].tolist() == [1.0] * len(fed.run.layer_names)
    assert torch.equal(fed.run.method.personal(client), client["start"])
    assert fed.run.server.memory["cross.losses"].isinf().all()


def test_a_client_that_was_never_there_keeps_the_rest_out_of_groups(federation):
    fed = federation(CrossKAPC(guard=0.0), **CONFLICT)
    for t in range(1, LAST + 1):
        fed.round(t, [0, 1, 2, 3, 4])
    assert not fed.run.server.memory["cross.near"].any()


def test_groups_are_found_by_part_of_the_clients(federation):
    """Where every two of them were once in a round together; those there report losses."""
    fed = federation(CrossKAPC(), **CONFLICT)
    for t, absent in enumerate((5, 0, 1, 2, 3, 4, 5, 0), 1):
        fed.round(t, [c for c in range(N) if c != absent])
    memory = fed.run.server.memory
    assert client_groups(memory["cross.near"]) == [[0, 2, 4], [1, 3, 5]]
    assert [loss.isfinite().sum() for loss in memory["cross.losses"][1]] == [N - 1] * 3


# ---------------------------------------------------------------- the command


FLAGS = (
    "--method crosskapc --method.guard 0 --federation.clients 5 --federation.rounds 7 "
    "--data.partition iid "
    "--data.planted labels --data.groups 2 --callbacks checkpoint --callbacks.checkpoint.seconds 0"
)


REFUSED = {
    "model": "--model [{name: mlp, count: 5}, {name: mlp, count: 5, hidden: [8]}]",
    "callbacks.localprivacy": "--callbacks.localprivacy.clip 1 --callbacks.localprivacy.noise 1",
    "callbacks.centralprivacy": "--callbacks.centralprivacy.clip 1 "
    "--callbacks.centralprivacy.noise 1",
    "optimizer.privacy": "--optimizer.privacy.clip 1 --optimizer.privacy.noise 1",
    "callbacks.median": "--callbacks median",
    "callbacks.blurrelation": "--callbacks.blurrelation.decimals 2",
}


@pytest.mark.parametrize("key", REFUSED)
def test_the_default_is_refused_in_a_line_that_says_what_to_choose(
    key, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    words = REFUSED[key].split(" ", 1) if key == "model" else REFUSED[key].split()
    assert main(["fit", *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"fl-train: error: {key}=") and "crosskapc" in line
    assert "method" in line and ("fedavg" in line or "kapc" in line.split("method", 1)[1])


@pytest.mark.slow
def test_layer_selection_leaves_no_common_start(fit, capsys):
    run = fit("selected", FLAGS, "--callbacks layerselection")
    assert capsys.readouterr().err.count("withholds layers, so clients do not begin from one") == 1
    assert "groups_separation" not in RunFolder(run).read("metrics")[-1]


@pytest.mark.slow
def test_a_run_that_goes_on_for_longer_looks_for_groups_then(fit, capsys):
    fit("short", FLAGS, "--federation.rounds 4")
    assert "4 rounds, where the first 6 would find groups" in capsys.readouterr().err
    assert run_line("fit --name short --resume --federation.rounds 9") == 0
    assert "rounds 6 to 8 try them" in capsys.readouterr().err
