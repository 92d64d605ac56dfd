"""An accelerator of one's own, and random numbers of a device."""

import random

import numpy as np
import torch
from lightning.fabric.accelerators import ACCELERATOR_REGISTRY, CPUAccelerator
from refusals import refuses

from fl_lightning.foundation import device
from fl_lightning.foundation.parallel import fabric_of

CPU = torch.device("cpu")


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


def test_nothing_drawn_within_leaves_a_trace():
    before = device.random_states(CPU)
    with device.no_draws(CPU):
        for draw in (torch.rand, np.random.rand, random.sample):
            draw(*([[1, 2, 3], 2] if draw is random.sample else [3]))
            assert not device.same_states(before, device.random_states(CPU))
            before_next = device.random_states(CPU)
            assert device.same_states(before_next, device.random_states(CPU))
    assert device.same_states(before, device.random_states(CPU))
