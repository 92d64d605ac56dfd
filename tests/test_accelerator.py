"""Random numbers of a device."""

import random

import numpy as np
import torch

from fl_lightning.foundation import device

CPU = torch.device("cpu")


def test_nothing_drawn_within_leaves_a_trace():
    before = device.random_states(CPU)
    with device.rng_restored(CPU):
        for draw in (torch.rand, np.random.rand, random.sample):
            draw(*([[1, 2, 3], 2] if draw is random.sample else [3]))
            assert not device.same_states(before, device.random_states(CPU))
            before_next = device.random_states(CPU)
            assert device.same_states(before_next, device.random_states(CPU))
    assert device.same_states(before, device.random_states(CPU))
