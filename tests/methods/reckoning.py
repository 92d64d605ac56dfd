"""Hand computations that the tests of methods compare with: losses and gradients by torch.func, not
by the engine."""

from dataclasses import dataclass
from itertools import chain, combinations

import numpy as np
import torch
from torch.func import functional_call
from torch.nn.functional import cross_entropy, linear

from fl_lightning.callbacks.relations import Uniform
from fl_lightning.methods import Method

WHOLE = {"batch_size": 10_000, "precision": "64-true"}
"""One step an epoch, on all of a client's data, in float64: what a round does can be computed by
hand."""

ROUNDING = {"rtol": 0, "atol": 1e-12}
"""How far float64 may be off."""
KEPT = {"optimizer": {"momentum": 0.9, "weight_decay": 0.1, "keep_state": True}}
"""What reaches a frozen part if it is left in the optimiser."""


def seeded(seed=0):
    """A new generator."""
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class PlainMean(Method):
    """FedAvg with equal weights."""

    def relation(self):
        """1/n."""
        return Uniform()


def by_supports(H, q):
    """The minimum of r H r / 2 - r q over the simplex, by the conditions of Karush, Kuhn and Tucker
    on each support."""
    n, best, value = len(q), None, np.inf
    for support in chain.from_iterable(combinations(range(n), k) for k in range(1, n + 1)):
        K = np.zeros((len(support) + 1,) * 2)
        K[:-1, :-1], K[-1, :-1], K[:-1, -1] = H[np.ix_(support, support)], 1, 1
        part = np.linalg.solve(K, np.append(q[list(support)], 1))[:-1]
        r = np.zeros(n)
        r[list(support)] = part
        if (part >= -1e-12).all() and (here := r @ H @ r / 2 - r @ q) < value:
            best, value = r, here
    assert best is not None
    return best


def tensors_of(layout, vector, prefix=""):
    """What a vector (D,) holds, by the names that begin with `prefix`, without that."""
    blocks = [b for b in layout.blocks if b.name.startswith(prefix)]
    return {b.name.removeprefix(prefix): vector[b.start : b.stop].view(b.shape) for b in blocks}


def scores_at(client, vector, x):
    """The network's scores where its parameters are `vector` (D,)."""
    return functional_call(client.module.model, tensors_of(client.layout, vector), x)


def features(client, vector, x):
    """What the body of the plain network makes of `x` where its parameters are `vector`."""
    named = tensors_of(client.layout, vector).items()
    body = {name.rpartition("body.1.")[2]: tensor for name, tensor in named}
    return linear(x.flatten(1), body["weight"], body["bias"]).relu()


def shaken(client, size, seed=0, where=lambda block: block.kind == "parameter"):
    """The client's model, with noise on its parameters, or on other blocks."""
    noise = torch.randn(client.layout.size, generator=seeded(seed), dtype=client["model"].dtype)
    return client["model"] + size * noise * client.columns(where)


def part(client, vector, *, head):
    """The numbers of the classifier, or of all else."""
    return vector[client.columns(lambda b: b.head == head)]


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
