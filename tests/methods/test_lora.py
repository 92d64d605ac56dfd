"""FedSA-LoRA and FFA-LoRA, and what averaging A and B apart errs about their product."""

import pytest
import torch
from classes import FedAvg, FedProto, FedSALoRA, FFALoRA
from refusals import refuses
from torch.testing import assert_close
from watching import Watch, global_model, run_all

from fl_lightning.methods.common.adapters import AdapterError

pytest.importorskip("peft")

DOUBLE = {"precision": "64-true", "rounds": 2}


def a_and_b(fed, vector):
    """The one adapter's matrices in a model's vector."""
    blocks = {
        b.name.split(".lora_")[1][0]: b
        for b in fed.run.groups[0].layout.blocks
        if ".lora_" in b.name
    }
    a, b = (vector[blocks[x].start : blocks[x].stop].reshape(blocks[x].shape) for x in "AB")
    return a, b


def shares(fed):
    sizes = [fed.run.data.train_sizes[c] for c in range(fed.run.clients)]
    return [size / sum(sizes) for size in sizes]


LORA = {"precision": "64-true", "ranks": [2]}


@pytest.fixture
def federation(federation):
    """With what hangs on every run that has adapters."""
    return lambda *args, callbacks=(), **changes: federation(
        *args, callbacks=[AdapterError(), *callbacks], **changes
    )


"""Adapters for a method that asks for none."""


# ---------------------------------------------------------------- FFA-LoRA


def test_the_mean_of_products_is_the_product_of_means(federation):
    """A is everybody's first one, decay and momentum notwithstanding; so B's mean is the
    product's."""
    watch = Watch()
    fed = federation(
        FFALoRA(), callbacks=[watch], optimizer={"momentum": 0.9, "weight_decay": 0.1}, **DOUBLE
    )
    run_all(fed)
    first, _ = a_and_b(fed, fed.run.groups[0].initial)
    uploaded = [a_and_b(fed, model) for _, model in watch.models[4:]]
    assert all(torch.equal(a, first) for a, _ in uploaded)
    assert all(float(b.abs().max()) > 0 for _, b in uploaded)
    a, b = a_and_b(fed, global_model(fed))
    exact = sum(p * (own @ first) for p, (_, own) in zip(shares(fed), uploaded, strict=True))
    assert torch.equal(a, first)
    assert_close(b @ a, exact, rtol=1e-12, atol=1e-14)


# ---------------------------------------------------------------- the error of averaging apart


def test_the_error_is_that_of_the_products_by_hand(federation):
    watch = Watch()
    fed = federation(FedAvg(), callbacks=[watch], **LORA)
    for t in (1, 2):
        error = fed.round(t).metrics["adapter_error"]
        pairs = [a_and_b(fed, model) for _, model in watch.models[-4:]]
        exact = sum(p * (b @ a) for p, (a, b) in zip(shares(fed), pairs, strict=True))
        a, b = (
            sum(p * pair[k] for p, pair in zip(shares(fed), pairs, strict=True)) for k in (0, 1)
        )
        assert error == pytest.approx(float((exact - b @ a).norm() / exact.norm()), rel=1e-9)
        assert 0 < error < 1


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("method", [FedSALoRA(), FFALoRA()])
def test_without_adapters_it_is_refused(federation, method):
    said = (
        r"model\.adapters=None.* needs low-rank adapters in plainnet; add some, such as "
        r"--model\.adapters\.rank 8"
    )
    with refuses(said):
        federation(method, ranks=[0]).prepare()


@pytest.mark.parametrize("method", [FedSALoRA(), FFALoRA(), FedAvg()])
def test_mixed_ranks_are_refused(federation, method):
    """Of one network; who uploads no adapters may have any."""
    # two architectures, which the configuration of this fixture calls by one name
    nets = {"plain": 2, "norm": 2}
    said = (
        r"model\.adapters\.rank=\[2, 3\]: \w+ cannot mix adapters of different ranks; "
        r"give all clients of a network the same rank"
    )
    with refuses(said):
        federation(method, ranks=[2, 3], net=nets).prepare()
    federation(FedProto(), ranks=[2, 3], net=nets).prepare()
