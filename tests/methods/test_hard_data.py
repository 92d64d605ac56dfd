"""Every method on what federations are made of: BatchNorm, a client with one class, clients with
hardly a sample."""

import math

import pytest
from every import BESIDE, NAMES, method_of
from refusals import refuses

from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import FederatedData, prepare


def dealt(clients, fraction):
    """Digits, dealt evenly."""
    config = DataConfig(partition="iid", fraction=fraction, validation=0.2, public="held_back")
    return prepare(config, clients, 0)


def again(data):
    """The same data, after their shares have been changed."""
    return FederatedData(
        data._train,
        data._test,
        data._shares,
        data.class_names,
        [0.0] * data.clients,
        public=data._public,
    )


@pytest.fixture(scope="module")
def hard():
    """Digits of five clients: all classes, one class, 3 samples, 17 samples (one more than two
    batches), 40 samples."""
    clients_dealt = dealt(5, 0.5)
    train, validation, test = clients_dealt._shares
    labels = clients_dealt._train.labels.numpy()
    for part, of in (
        (train, labels),
        (validation, labels),
        (test, clients_dealt._test.labels.numpy()),
    ):
        part[1] = part[1][of[part[1]] == 3]
    for k, most in ((2, 3), (3, 17), (4, 40)):
        train[k], validation[k], test[k] = train[k][:most], validation[k][:2], test[k][:5]
    return again(clients_dealt)


@pytest.mark.sampled("crosskapc")
@pytest.mark.parametrize("name", [name for name in NAMES if name != "partialpooling"])
def test_it_runs_to_the_end(federation, hard, name):
    fed = federation(method_of(name), "residual", data=hard, clients=5, batch_size=8, rounds=3)
    fed.prepare()
    for t in (1, 2, 3):
        row = fed.round(t).metrics
        assert all(map(math.isfinite, row.values())), row
    assert all(map(math.isfinite, fed.evaluator.everyone()["final_accuracies"]))


def single(make, name, net):
    """A federation in which client 2 has a single training sample."""
    data = dealt(3, 0.3)
    data._shares[0][2] = data._shares[0][2][:1]
    method = method_of(name, **BESIDE.get(name, {}))
    return make(method, net, data=again(data), clients=3, batch_size=8, rounds=2)


@pytest.mark.sampled("fedhkd")
@pytest.mark.parametrize("name", NAMES)
def test_a_single_sample(federation, name):
    fed = single(federation, name, "plain")
    fed.prepare()
    for t in (1, 2):
        assert all(map(math.isfinite, fed.round(t).metrics.values()))


def test_batchnorm_cannot_train_on_a_single_sample(federation):
    with refuses(r"^data\.min_samples=10.*BatchNorm.* client 2: at least 2$"):
        single(federation, "fedavg", "norm")


@pytest.mark.sampled("topkpfd")
@pytest.mark.parametrize(
    "name, argument",
    {
        "fedas": "align_batch_size",
        "fedmd": "batch_size",
        "topkpfd": "samples",
        "ktpfl": "batch_size",
    }.items(),
)
def test_batches_of_a_methods_own_are_no_single_samples_under_batchnorm(
    federation, hard, name, argument
):
    for net, arguments in (("plain", {argument: "1"}), ("norm", {argument: "2"})):
        assert math.isfinite(
            run_two(
                federation(method_of(name, **arguments), net, data=hard, clients=5, batch_size=8)
            )
        )
    fed = federation(method_of(name, **{argument: "1"}), "norm", data=hard, clients=5, batch_size=8)
    with refuses(
        rf"^method\.{argument}=1.*BatchNorm cannot train on single samples; set it to 2 or more$"
    ):
        fed.prepare()


def run_two(fed):
    """The accuracy after two rounds."""
    fed.prepare()
    return [fed.round(t).metrics["mean_accuracy"] for t in (1, 2)][-1]
