"""What differs by layer in FLAYER (Chen et al., IJCAI 2025): learning rates, and how much of a
layer is uploaded."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core import Batch, Client, Layout, Phase, Server
from fl_lightning.data.sampling import batch_sizes
from fl_lightning.methods.common.critical import unpacked


def layer_rates(layout: Layout, gradient: Tensor, top: float, middle: float = 1.0) -> Tensor:
    """What the learning rate of each parameter is multiplied by, (D,), for a `gradient` (D,).

    Layer l of L: 1 + l / (L - 1) times the mean over its tensors of ln(1 + 1 / ||gradient||), from
    the second layer on times `middle`; the last layer: `top`.
    """
    rates, last = torch.ones_like(gradient), len(layout.layers) - 1
    blocks = [block for block in layout.blocks if block.kind == "parameter"]
    for layer in range(last + 1):
        mine = [block for block in blocks if block.layer == layer]
        norms = torch.stack([gradient[b.start : b.stop].norm() for b in mine]).clamp_min(1e-12)
        if layer == last:
            rate: Tensor | float = top
        elif layer == 0:
            rate = 1.0
        else:
            rate = middle * (1 + layer / last * torch.log1p(1 / norms).mean())
        for block in mine:
            rates[block.start : block.stop] = rate
    return rates


def most_changed(layout: Layout, change: Tensor) -> Tensor:
    """The numbers that FLAYER uploads (the authors' code), a mask (D,), by the `change` (D,) of
    training.

    Of parameter k = 0, 1, ... of n the share 1 - k / n, within 0.1 and 0.9, of least |change| is
    left out: of a convolution in each of its kernels, of a vector as a whole, but never all of it.
    Matrices, the classifier and running statistics are uploaded whole.
    """
    mask = torch.ones_like(change, dtype=torch.bool)
    blocks = [block for block in layout.blocks if block.kind == "parameter"]
    for k, block in enumerate(blocks):
        if block.head or len(block.shape) == 2:
            continue
        group = int(np.prod(block.shape[2:])) if len(block.shape) > 2 else block.size
        rows = change[block.start : block.stop].abs().view(-1, group)
        drop = min(
            round(rows.shape[1] * (1 - min(max(k / len(blocks), 0.1), 0.9))), rows.shape[1] - 1
        )
        least = rows.argsort(dim=1, stable=True)[:, :drop]
        mask[block.start : block.stop] = (
            torch.ones_like(rows, dtype=torch.bool).scatter(1, least, False).flatten()
        )
    return mask


def phase_by_layer(client: Client, top: float, middle: float) -> Phase:
    """Plain steps of the model at rates by layer (`layer_rates`), set anew at the first batch of
    each epoch."""
    w, columns, rates = client["model"], client.layout.parameters, torch.ones_like(client["model"])
    sizes = batch_sizes(
        len(client.data.train), client.run.config.federation.batch_size, client.group.whole_last
    )
    epoch, taken = len(sizes), 0

    def step(_: Client, batch: Batch) -> Tensor:
        nonlocal taken
        loss, gradient = client.gradient(w, batch)
        if taken % epoch == 0:
            rates.copy_(layer_rates(client.layout, gradient, top, middle))
        taken += 1
        w[columns] -= client.lr * (rates * gradient)[columns]
        return loss

    return Phase(step=step, by_gradient=True)


def own_accuracy(client: Client) -> Tensor:
    """Of the client's model, shape (), float64, on its validation data or, without any, on its
    training data."""
    part = client.data.validation if len(client.data.validation) else client.data.train
    right = sum(int((scores.argmax(1) == y).sum()) for _, scores, y in client.passes(part))
    return torch.tensor(right / max(len(part), 1), dtype=torch.float64)


def mean_of_uploaders(server: Server, old: Tensor) -> Tensor:
    """The global model (D,), number by number the mean of those who uploaded it, and `old` (D,)
    where nobody did.

    The server's model is the mean of uploads that hold `old` where nothing is `kept`, the packed
    masks.
    """
    new = server["model"]
    kept = torch.stack(
        [unpacked(server.statistics[c]["kept"], len(old)) for c in server.answered]
    ).to(old.device)
    share = (server.shares(server.answered).to(old)[:, None] * kept).sum(0)
    server.flops += 2 * kept.numel()
    return torch.where(kept.all(0), new, old + (new - old) / torch.where(share > 0, share, 1))
