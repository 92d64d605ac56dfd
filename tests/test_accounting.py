"""Operations and memory: hand counts, torch's own counter, and that counting changes nothing."""

import csv
from dataclasses import dataclass

import pytest
import torch
from classes import KAPC, SCAFFOLD, FedAMP, FedAvg, FedProx, Local
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fl_lightning.callbacks.base import Observer
from fl_lightning.callbacks.compression import Quantize
from fl_lightning.callbacks.selection import LayerSelection
from fl_lightning.core.layout import Layout
from fl_lightning.core.phase import Phase
from fl_lightning.core.server import Server
from fl_lightning.data import ResidentPart
from fl_lightning.engine.phases import sample_cost
from fl_lightning.engine.trainer import count_costs
from fl_lightning.models.resnet18 import ResNet18
from fl_lightning.results.folder import CLIENT_FLOPS, RunFolder
from fl_lightning.training.module import ClientModule


def client_of(model):
    layout = Layout(model, "out")
    client = ClientModule(model, layout, 10)
    client.binding.bind(*layout.read(model))
    return client


def cost_of(client, x):
    return sample_cost(client, (x, torch.zeros(len(x), dtype=torch.int64)))


def test_a_linear_net_costs_what_a_hand_count_says():
    cost = cost_of(
        client_of(nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))),
        torch.randn(3, 64),
    )
    assert cost.forward == 2 * (64 * 16 + 16 * 10)
    # the first layer hands nothing further back
    assert cost.backward == 2 * (64 * 16 + 2 * 16 * 10)
    assert cost.extra == 0
    assert cost.by_column(samples=7, steps=3, proximal=11) == {
        "flops_forward": 7 * cost.forward,
        "flops_backward": 7 * cost.backward,
        "flops_extra": 0,
        "flops_penalty": 5 * 11 * 3,
    }


def test_resnet18_costs_the_same_for_each_sample_of_a_greater_batch():
    torch.manual_seed(0)
    model = ResNet18(10, (3, 32, 32), stem="7x7")
    small = cost_of(client_of(model), torch.randn(2, 3, 32, 32))
    with FlopCounterMode(display=False) as counter:
        loss = model(torch.randn(8, 3, 32, 32)).sum()
        torch.autograd.grad(loss, list(model.parameters()))
    assert counter.get_total_flops() == 8 * (small.forward + small.backward)
    # 1.8 G multiply-adds at 224 x 224, over 7 x 7
    assert small.forward == pytest.approx(2 * 37.0e6, rel=2e-3)


@pytest.mark.parametrize("method", [KAPC(), FedAMP()], ids=repr)
def test_the_servers_products_are_those_that_torch_counts(federation, method):
    fed = federation(method, rounds=1)
    fed.round(1)
    run, [group] = fed.run, fed.run.groups
    server = Server(run, 2, fed.cohort(2), fed.reducer)
    with FlopCounterMode(display=False) as counter:
        method.broadcast(server)
    n, columns = 4, int(group.layout.sizes[group.down_mask].sum())
    products = 2 * n * n * columns + 2 * n * n * columns  # the Gram matrix, and the mix
    # and a little for the relation's own
    assert counter.get_total_flops() == pytest.approx(products, rel=0.01)
    beside = (4 * n + 2) * columns + 2 * n * columns
    layers = len(run.layer_names) if run.relation.per_layer else 1
    assert server.flops == products + beside + run.relation.flops(layers, n, n)


def test_a_mean_costs_three_operations_for_each_number_and_client(federation):
    fed = federation(FedAvg(), rounds=1)
    record = fed.round(1)
    assert record.metrics["flops_server"] == (3 * 4 + 1) * int(fed.run.groups[0].layout.sizes.sum())
    assert federation(Local(), rounds=1).round(1).metrics["flops_server"] == 0


class Records(Observer):
    """Keeps every record."""

    def __init__(self):
        self.held = []

    def on_round_end(self, run, record):
        self.held.append(record)


def test_a_run_counts_its_visits_and_counting_changes_nothing(federation):
    def made(*more):
        callbacks = [LayerSelection(client=False, mu=None), Quantize(), *more]
        return federation(KAPC(), net="norm", callbacks=callbacks, local_epochs=2)

    records = Records()
    fed, plain = made(records), made()
    fed.fit()
    for t in (1, 2):
        plain.round(t)
    assert all(
        torch.equal(state.vectors["model"], model_of(plain, c))
        for c, state in fed.run.states.items()
    )
    assert len(fed.run.states) == 4
    [group], last = fed.run.groups, records.held[1]
    everything, coached = (
        int(group.layout.sizes.sum()),
        int(group.layout.sizes[group.down_mask].sum()),
    )
    for row in last.clients:
        steps = 2 * -(-row["train_samples"] // 32)
        lone = row["train_samples"] % 32 == 1
        assert row["flops_penalty"] == 5 * coached * (steps - 2 * lone)
        assert row["flops_forward"] == 2 * row["train_samples"] * 2 * (
            4 * 9 * 9 + 36 * 16 + 16 * 10
        )
        # quantising and norms
        assert 0 < row["flops_extra"] <= 9 * (everything + coached) + 5 * everything
    total = sum(row["flops_backward"] for row in last.clients)
    assert last.metrics["flops_backward"] == total > 0


def model_of(fed, client):
    return fed.run.states[client].vectors["model"]


def test_a_step_that_fails_is_not_counted_but_named_in_its_visit(federation):
    fed = federation(FedAvg())
    [trainer] = fed.worker.trainers
    trainer.module.training_step = lambda batch, k: 1 / 0  # type: ignore[method-assign]
    assert trainer.measure_cost() == "ZeroDivisionError: division by zero"
    with pytest.raises(Exception, match=r"client 0 failed in round 1, .*division"):
        fed.round(1)


# ---------------------------------------------------------------- what hooks do with the model


def take_a_step(client, batch):
    """By hand."""
    module = client.bind()
    loss = nn.functional.cross_entropy(module.model(batch[0]), batch[1])
    parameters = list(module.model.parameters())
    with torch.no_grad():
        torch._foreach_add_(parameters, torch.autograd.grad(loss, parameters), alpha=-0.01)
    return loss


def counted(fed):
    count_costs(fed.run, fed.worker.trainers)
    return fed.round(1).clients


FORWARD, BACKWARD = 2 * (64 * 16 + 16 * 10), 2 * (64 * 16 + 2 * 16 * 10)


@dataclass(frozen=True)
class Phases(FedProx):
    """Three steps of 4 on other data, an own step on each batch, and half of the steps of an epoch
    with the pull."""

    def phases(self, client, payload):
        other = ResidentPart(torch.zeros(12, 1, 8, 8), torch.arange(12) % 10, None)
        objective = client.proximal(payload, 0.1)
        yield Phase(part=other, batch_size=4, epochs=1, purpose="other", objective=objective)
        yield Phase(step=take_a_step, epochs=1)
        yield Phase(steps=2, objective=objective)
        yield Phase(steps=1)


def test_phases_add_up(federation):
    """On the client's own data by the columns; on other data, and by steps of one's own, as
    `flops_extra`."""
    fed = federation(Phases())
    numbers = sum(p.numel() for p in fed.worker.trainers[0].module.model.parameters())
    for row in counted(fed):
        assert row["train_samples"] > 3 * 32
        assert row["flops_extra"] == (12 + row["train_samples"]) * (FORWARD + BACKWARD)
        assert (row["flops_forward"], row["flops_backward"]) == (
            3 * 32 * FORWARD,
            3 * 32 * BACKWARD,
        )
        assert row["flops_penalty"] == 5 * numbers * 2


def test_a_linear_term_is_counted(federation):
    fed = federation(SCAFFOLD(), local_epochs=None, local_steps=4)
    numbers = sum(p.numel() for p in fed.worker.trainers[0].module.model.parameters())
    assert {row["flops_penalty"] for row in counted(fed)} == {3 * numbers * 4}


@dataclass(frozen=True)
class Idle(FedAvg):
    """Its clients do not train; where `asks`, for 0 steps."""

    asks: bool = False

    def phases(self, client, payload):
        return [Phase(steps=0)] if self.asks else []


@pytest.mark.parametrize("asks", [False, True])
def test_who_does_not_train_has_no_loss_and_no_operations(federation, asks):
    fed = federation(Idle(asks=asks))
    for row in counted(fed):
        assert "train_loss" not in row and "coaching_loss" not in row
        assert [row[name] for name in CLIENT_FLOPS] == [0] * 4
    assert torch.equal(fed.run.groups[0].vectors["model"], fed.run.groups[0].initial)


@dataclass(frozen=True)
class Unseen(FedAvg):
    """Takes a step that no pass through the model explains."""

    def phases(self, client, payload):
        with torch.no_grad():
            for p in client.bind().model.parameters():
                p.mul_(1.01)
        return super().phases(client, payload)


def test_what_is_not_known_is_said_once_and_stays_an_empty_cell(federation, tmp_path, capsys):
    def table(fed):
        count_costs(fed.run, fed.worker.trainers)
        folder = tmp_path / fed.run.method_name
        for t in (1, 2):
            RunFolder(folder).append(fed.round(t))
        tables = [(folder / name).read_text() for name in ("metrics.csv", "clients.csv")]
        return [row for text in tables for row in csv.DictReader(text.splitlines())]

    for row in table(federation(Unseen())):
        assert row["flops_extra"] == "" and int(row["flops_forward"]) > 0
    assert capsys.readouterr().err.count("a hook changed plainnet without a backward pass") == 1
    fed = federation(FedAvg())
    [trainer] = fed.worker.trainers
    trainer.measure_cost = lambda: "ValueError: too few samples for me"  # type: ignore[method-assign]
    for row in table(fed):
        assert [row[name] for name in CLIENT_FLOPS] == [""] * 4
    assert (
        capsys.readouterr().err.count(
            "plainnet could not be counted (ValueError: too few samples for me)"
        )
        == 1
    )
