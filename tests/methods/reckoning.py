"""Hand computations that the tests of methods compare with: losses and gradients by torch.func, not
by the engine."""

from dataclasses import dataclass

import torch
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fl_lightning.callbacks.relations import Uniform
from fl_lightning.methods import Method

WHOLE = {"batch_size": 10_000, "precision": "64-true"}
"""One step an epoch, on all of a client's data, in float64: what a round does can be computed by
hand."""

ROUNDING = {"rtol": 0, "atol": 1e-12}
"""How far float64 may be off."""


def seeded(seed=0):
    """A new generator."""
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class PlainMean(Method):
    """FedAvg with equal weights."""

    def relation(self):
        """1/n."""
        return Uniform()


def scores_at(client, vector, x):
    """The network's scores where its parameters are `vector` (D,)."""
    tensors = {b.name: vector[b.start : b.stop].view(b.shape) for b in client.layout.blocks}
    scores = functional_call(client.module.model, tensors, x)
    return scores


def slope(client, vector, batch):
    """The gradient (D,) of the mean cross entropy at `vector`."""
    leaf = vector.clone().requires_grad_()
    [found] = torch.autograd.grad(cross_entropy(scores_at(client, leaf, batch[0]), batch[1]), leaf)
    return found


def batch_of(client, size=10_000):
    """The client's first `size` samples."""
    return next(iter(client.data.train.batches(size)))


def uploads(fed, slot="model"):
    """What the clients have of a slot, copied, by client."""
    return [fed.run.states[c].vectors[slot].clone() for c in sorted(fed.run.states)]
