"""Training on two random halves of a client's samples: the difference of the two models measures
the noise that comes from having few samples."""

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.core import Client, Fit, Phase
from fl_lightning.data.part import Part


@dataclass(frozen=True)
class Half:
    """One half of a client's samples, and the model (D,) trained on it."""

    part: Part
    model: Tensor


Halves = tuple[Half, Half]


def train_halves(client: Client) -> Generator[Phase, Fit | None, Halves | None]:
    """Train the client's model on two halves of its samples, from the same start, with batches of
    half the size; leave the mean of both models as the client's model.

    This takes as many steps and samples as training on all samples. A client with too few samples
    trains on all of them.

    Returns:
        Both halves, or None if the client has too few samples.
    """
    model = client["model"]
    start = model.clone()
    config = client.run.config.federation
    part = client.data.train
    # BatchNorm cannot train on one sample
    least = 2 if client.group.whole_last else 1
    size = max(config.batch_size // 2, least)
    # the same number of samples in all
    steps = config.local_steps and config.local_steps * config.batch_size // (2 * size)
    if len(part) < 2 * least or steps == 0:
        yield Phase()
        return None
    order = torch.randperm(len(part), generator=client.generator("halves"))
    first_part, second_part = (part.subset(half.sort().values) for half in order.chunk(2))
    yield Phase(part=first_part, batch_size=size, steps=steps)
    first = Half(first_part, model.clone())
    model.copy_(start)
    yield Phase(part=second_part, batch_size=size, steps=steps, purpose="train half")
    second = Half(second_part, model.clone())
    model.lerp_(first.model, 0.5)
    return first, second


def noise_of(client: Client, halves: Halves) -> Tensor:
    """Return the estimated variance of the halves' mean model, by layer: ||w_A - w_B||^2 / 4,
    float32 (L,)."""
    first, second = halves
    return client.layout.squared_norms(second.model - first.model).float() / 4


def step_of(client: Client, start: Tensor) -> Tensor:
    """Return the squared norm, by layer, of the client's change from `start` (D,): float32 (L,)."""
    return client.layout.squared_norms(client["model"] - start).float()


def shrunk(
    client: Client,
    start: Tensor,
    model: Tensor,
    factors: Tensor,
) -> Tensor:
    """Return start + factor (model - start), (D,), with a factor for each layer. Running statistics
    are the model's.

    Args:
        client: whose layout is used.
        start: (D,).
        model: (D,).
        factors: (L,).
    """
    if (factors == 1).all():
        return model
    nearer = model.clone()
    layout = client.layout
    for s in layout.segments(layout.is_parameter, by_layer=True):
        columns = s.columns
        nearer[columns] = torch.lerp(start[columns], model[columns], float(factors[s.layer]))
    return nearer


def held_out(client: Client, halves: Halves) -> Tensor:
    """Return two mean losses over the client's training samples, float32 (2,): at the model from
    which the client started, and after training.

    After training, each sample is scored by the model trained on the half without it. The step from
    the start to that model is first shrunk: in each layer it is multiplied by 1 - `share`, the
    layer's share of noise, which the server has sent (`client.memory`).
    """
    part = client.data.train
    start = client["start"]
    factors = 1 - client.memory["share"]
    total = 0.0
    for trained, unseen in (halves, halves[::-1]):
        model = shrunk(client, start, trained.model, factors)
        total += len(unseen.part) * client.loss(unseen.part, model)
    return torch.tensor([client.loss(part, start), total / len(part)])
