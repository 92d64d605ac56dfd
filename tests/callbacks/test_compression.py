"""Quantisation and sparsification: unbiased, remembered, and counted as they would travel."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from fl_lightning.callbacks.compression import Quantize, TopK, largest, quantised
from fl_lightning.errors import BadInput
from fl_lightning.federation import Federation
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.kapc import KAPC

Make = Callable[..., Federation]


@pytest.mark.parametrize("bits", [8, 16])
def test_quantisation_is_unbiased_on_its_grid(bits: int) -> None:
    x = torch.randn(200, generator=torch.Generator().manual_seed(0))
    draws = torch.Generator().manual_seed(1)
    many = torch.stack([quantised(x, bits, draws) for _ in range(2000)])
    step = x.abs().max() / (2 ** (bits - 1) - 1)
    torch.testing.assert_close(many / step, (many / step).round(), rtol=0, atol=1e-2)
    assert ((many - x).abs() <= step * 1.001).all()
    assert (many.mean(0) - x).abs().max() < 5 * step / 2 / 2000**0.5  # five standard errors of at most step / 2
    assert torch.equal(quantised(torch.zeros(3), bits, draws), torch.zeros(3))


def test_the_largest_changes() -> None:
    assert largest(torch.tensor([1.0, -3.0, 2.0, 0.5]), 2).tolist() == [0.0, -3.0, 2.0, 0.0]


def test_bytes_are_those_that_would_travel(federation: Make) -> None:
    """PlainNet: 64*16, 16, 16*10 and 10 numbers in four tensors; four clients."""
    sizes = [1024, 16, 160, 10]
    full = federation(FedAvg(), rounds=1).round(1).metrics
    assert full["upload_bytes"] == 4 * 4 * sum(sizes)
    eight = federation(FedAvg(), rounds=1, callbacks=[Quantize()]).round(1).metrics
    assert eight["upload_bytes"] == eight["download_bytes"] == 4 * (sum(sizes) + 4 * 4)
    up = federation(FedAvg(), rounds=1, callbacks=[Quantize(bits=16, direction="upload")]).round(1).metrics
    assert up["upload_bytes"] == 4 * (2 * sum(sizes) + 4 * 4)
    assert up["download_bytes"] == full["download_bytes"]
    sparse = federation(FedAvg(), rounds=1, callbacks=[TopK(share=0.1)]).round(1).metrics
    assert sparse["upload_bytes"] == 4 * 8 * (102 + 2 + 16 + 1)
    assert sparse["download_bytes"] == full["download_bytes"]


@pytest.mark.parametrize("method", [FedAvg(), KAPC(solver="exact", beta=0.5, start="server")], ids=["fedavg", "kapc"])
def test_sixteen_bits_train_as_thirty_two(federation: Make, method: FedAvg | KAPC) -> None:
    plain, coded = federation(method, rounds=3), federation(method, rounds=3, callbacks=[Quantize(bits=16)])
    for t in (1, 2, 3):
        one, other = plain.round(t), coded.round(t)
    assert abs(one.metrics["train_loss"] - other.metrics["train_loss"]) < 1e-3
    assert not torch.equal(plain.states[0].row, coded.states[0].row) if plain.states else True


def test_nothing_is_lost_for_good(federation: Make) -> None:
    """Error feedback: while a client stands still, its server copy reaches it, the largest changes first."""
    fed = federation(KAPC(lam=0.0), rounds=12, callbacks=[TopK(share=0.1)])
    fed.round(1)
    fed.optimizer.config.lr = 0.0  # from now on nobody moves
    gaps = []
    for t in range(2, 13):
        fed.round(t)
        state = fed.states[0]
        gaps.append(float((state.row - state.received).norm()))
    assert gaps[0] > 0
    assert all(later < earlier or later == 0 for earlier, later in pairwise(gaps))
    assert gaps[-1] < 1e-6


def test_all_is_everything(federation: Make) -> None:
    whole = federation(FedAvg(), rounds=2, callbacks=[TopK(share=1.0)])
    plain = federation(FedAvg(), rounds=2)
    for t in (1, 2):
        whole.round(t)
        plain.round(t)
    torch.testing.assert_close(whole.at_work.server.shared, plain.at_work.server.shared, rtol=0, atol=1e-6)


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(BadInput, match=r"\(0, 1\]"):
        TopK(share=0.0)
