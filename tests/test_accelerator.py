"""Which device a run takes, what is refused, and the accelerator's suite on one that is written in
Python."""

import random

import numpy as np
import pytest
import torch
from lightning.fabric.accelerators import ACCELERATOR_REGISTRY, CPUAccelerator
from refusals import refuses

from fl_lightning.cli import main
from fl_lightning.foundation import device, parallel
from fl_lightning.foundation.errors import RunFailed
from fl_lightning.foundation.parallel import Group, Heartbeat, TorchAccelerator, fabric_of

CPU = torch.device("cpu")


def has(monkeypatch, kind):
    """This machine seems to have such an accelerator."""
    monkeypatch.setattr(device, "here", lambda: kind)


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps", None])
def test_auto_and_gpu_are_whatever_there_is(kind, monkeypatch):
    has(monkeypatch, kind)
    assert device.resolved("auto") == (kind or "cpu")
    assert device.resolved("cpu") == "cpu"
    if kind:
        assert device.resolved("gpu") == device.resolved(kind) == kind
    else:
        with refuses("no GPU device"):
            device.resolved("gpu")


@pytest.mark.parametrize(
    "asked, said",
    {
        "mps": "torch sees no MPS device on this machine",
        "xpu": "torch sees no XPU device",
        "tpu": "torch sees no TPU device",
        "abacus": "one of auto, cpu, cuda, gpu, mps, tpu, xpu",
    }.items(),
)
def test_what_this_machine_has_not_is_refused_in_one_line(
    asked,
    said,
    tmp_path,
    monkeypatch,
    capsys,
):
    has(monkeypatch, "cuda" if asked == "mps" else None)
    monkeypatch.chdir(tmp_path)
    assert (
        main(f"fit --config kapc_exact_digits --loggers null --fabric.accelerator {asked}".split())
        == 2
    )
    err = capsys.readouterr().err
    assert (
        err.startswith("fl-train: error: fabric.accelerator")
        and said in err
        and err.count("\n") == 1
    )


def test_an_accelerator_that_is_registered_with_lightning_is_taken(
    monkeypatch,
):
    class Own(CPUAccelerator):
        """One of a user."""

        @staticmethod
        def name():
            return "own"

    ACCELERATOR_REGISTRY.register("own", Own, description="")
    try:
        assert device.resolved("own") == "own"
        assert isinstance(fabric_of("own", "32-true").accelerator, Own)
        monkeypatch.setattr(Own, "is_available", staticmethod(lambda: False))
        with refuses("no OWN device"):
            device.resolved("own")
    finally:
        ACCELERATOR_REGISTRY.remove("own")


def test_what_lightning_does_not_know_is_cast_on_its_own_kind(
    monkeypatch,
):
    """Lightning would cast on CUDA; and lets no group of processes on MPS, though one process is a
    group here."""
    has(monkeypatch, "xpu")
    monkeypatch.setattr(device, "count", lambda: 2)
    fabric = fabric_of("xpu", "bf16-mixed")
    assert isinstance(fabric.accelerator, TorchAccelerator)
    assert fabric.device == torch.device("xpu", 0) and fabric.strategy.precision.device == "xpu"

    def none(*args):
        raise RuntimeError("no scaler\nfor this one")

    monkeypatch.setattr(parallel, "MixedPrecision", none)
    with refuses(r"cannot scale losses .*bf16-mixed") as error:
        fabric_of("xpu", "16-mixed")
    assert "\n" not in str(error.value)


def test_a_device_without_64_bits_sums_in_32_and_refuses_them(federation, monkeypatch):
    from fl_lightning.engine import build

    monkeypatch.setattr(build, "wide", lambda device: torch.float32)
    with refuses("has no 64-bit numbers"):
        federation(precision="64-true")


def test_nothing_drawn_within_leaves_a_trace():
    before = device.random_states(CPU)
    with device.no_draws(CPU):
        for draw in (torch.rand, np.random.rand, random.sample):
            draw(*([[1, 2, 3], 2] if draw is random.sample else [3]))
            assert not device.same_states(before, device.random_states(CPU))
            before_next = device.random_states(CPU)
            assert device.same_states(before_next, device.random_states(CPU))
    assert device.same_states(before, device.random_states(CPU))


def test_an_exchange_that_fails_with_all_ranks_there_says_why(
    monkeypatch,
):
    """A device's error, say: no rank is to blame."""
    group = object.__new__(Group)
    watch = object.__new__(Heartbeat)
    group.size, group.exchanges, group._watch = 2, 4, watch
    watch.group, watch.beat, watch._signs, watch._answered_at, watch._changed_at = (
        group,
        0.0,
        [b"9 5 1", b"9 5 2"],
        0.0,
        [0, 0],
    )
    monkeypatch.setattr(watch, "_silent", lambda limit: [])
    said = r"an exchange between the ranks failed: NCCL error 5; .*--resume"
    with pytest.raises(RunFailed, match=said) as failed, group._together():
        raise RuntimeError("NCCL error 5\nLast error: and so on")
    assert "?" not in str(failed.value) and "and so on" not in str(failed.value)
