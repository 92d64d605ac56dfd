"""`data.global_test`: one test set for all clients, beside each client's own (FedHKD's local and
global accuracy)."""

import numpy as np
import pytest
import torch
from classes import FedAvg, FedPer
from refusals import refuses

from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import prepare

CPU = torch.device("cpu")
PAPER = {"client_test": 0.25, "global_test": True, "test_fraction": 1.0}
ALL, OWN = "global_test_accuracy_", "accuracy_"


def numbered(tmp_path):
    """80 training and 40 test samples of two features: their number, and 0 or 1 for the part they
    are from."""
    x = np.stack([np.arange(120), np.repeat([0, 1], [80, 40])], 1).astype(np.float32)
    np.savez(
        tmp_path / "a.npz",
        x_train=x[:80],
        y_train=np.arange(80) % 2,
        x_test=x[80:],
        y_test=np.arange(40) % 2,
    )
    return str(tmp_path / "a.npz")


def test_fedhkds_split(tmp_path):
    root = numbered(tmp_path)
    data = prepare(
        DataConfig(root=root, fraction=0.5, partition="hsu", min_samples=1, **PAPER), 4, 0
    )
    parts = [data.client(i) for i in range(4)]
    # 10 of 40 each; floor(2.5) are its test part
    assert [(len(p.train), len(p.test)) for p in parts] == [(8, 2)] * 4
    own = torch.cat([x for p in parts for part in (p.train, p.test) for x, _ in part.batches(99)])
    numbers = (own * data._train.std + data._train.mean)[:, 0].round()
    # none of the official test set, each once
    assert len(set(numbers.tolist())) == 40 and numbers.max() < 80
    common = data.global_test(CPU, torch.float32)
    assert len(common) == 40
    ((x, y),) = common.batches(99)
    assert (x * data._train.std + data._train.mean)[:, 0].round().tolist() == list(range(80, 120))
    assert y.tolist() == [k % 2 for k in range(40)]


def test_without_a_cut_the_clients_share_the_same_test_set_out(tmp_path):
    plain, common = (
        prepare(DataConfig(root=numbered(tmp_path), partition="iid", global_test=g), 4, 0)
        for g in (False, True)
    )
    assert plain.global_test(CPU, torch.float32) is None
    shared = common.global_test(CPU, torch.float32)
    assert len(shared) == 40 == sum(common.test_sizes)
    assert common.raw_bytes == plain.raw_bytes  # it is the same in memory
    for i in range(4):
        for part in ("train", "test"):
            (a, _), (b, _) = (next(getattr(d.client(i), part).batches(99)) for d in (plain, common))
            assert torch.equal(a, b)


def test_a_share_of_no_test_part_is_refused():
    with refuses(r"data\.client_test=0\.25.*data\.global_test"):
        DataConfig(client_test=0.25, test_fraction=1.0).validate()
    DataConfig(**PAPER).validate()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "method, models, kinds",
    [
        (FedAvg(), None, {"global"}),
        (FedAvg(), ["after", "global"], {"global", "after"}),
        (FedPer(), None, {"after"}),  # no global model: its judge
    ],
)
def test_who_is_scored_on_it(federation, method, models, kinds):
    fed = federation(method, rounds=1, data=dict(PAPER), evaluation={"models": models})
    record = fed.round(1)
    for row in (*record.clients, record.metrics):
        assert {name.removeprefix(ALL) for name in row if name.startswith(ALL)} == kinds
    for kind in kinds:
        scores = [row[ALL + kind] for row in record.clients]
        assert record.metrics[ALL + kind] == pytest.approx(np.mean(scores))
        assert scores != [row[OWN + kind] for row in record.clients]
        assert (len(set(scores)) == 1) == (kind == "global")
    if "global" in kinds:
        module = fed.evaluator.at_rest(0).bind(fed.run.groups[0].vectors["model"])
        module.model.eval()
        ((x, y),) = fed.run.data.global_test(CPU, torch.float32).batches(500)
        assert len(y) == 359
        right = (module.model(x).argmax(1) == y).float().mean()
        assert record.metrics[ALL + "global"] == pytest.approx(float(right))
