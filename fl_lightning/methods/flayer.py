"""FLAYER: Chen, Yang, Ren, Li, Wang: Optimizing Personalized Federated Learning through Adaptive
Layer-Wise Learning. IJCAI 2025.
"""

import math
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from fl_lightning.data.sampling import batch_sizes
from fl_lightning.methods import (
    Batch,
    Beside,
    Client,
    Layout,
    LogRange,
    NonNegativeFloat,
    Payload,
    Phase,
    Phases,
    PlainSteps,
    PositiveInt,
    Rule,
    RunContext,
    Server,
    Tensors,
    Traits,
    searched,
)
from fl_lightning.methods.common.basics import packed, unpacked


@dataclass(frozen=True)
class FLAYER(PlainSteps):
    """FedAvg with layerwise rules: clients mix in their own top layers by their accuracy, learning
    rates differ by layer, and the parameters that change most are uploaded.

    A client starts from w = a w_i + (1 - a) w^ in the top layers and w^ below, with the received
    model w^ and its last model w_i, and trains the top layers alone for an epoch. Then its accuracy
    is measured (`own_accuracy`), which is a in the client's next round; a is 0 in the first. Then
    the client takes plain steps with learning rates by layer (`layer_rates`), computed anew in each
    epoch. The server averages each parameter over the clients that uploaded it (`most_changed`); a
    parameter that none uploaded stays.

    Args:
        layers: number of layers next to the output that are mixed and trained first. 1: the
            authors' script (2 tensors).
        top_rate: factor on the learning rate of the last layer. 0.2: the authors' code.
        middle_rate: factor on the learning rates of the layers between the first and the last. 1:
            the authors' code for ResNet and fastText; 20: for its CNN.
    """

    traits = Traits(
        family="mixing",
        judge="before",
        starts="both",
        features=True,
        classes=True,
        statistics=True,
        several=False,
        changes_upload=True,
        client_memory=True,
        newcomers=Rule(
            "global model, top layers mixed with its own by their accuracy and trained; then local "
            "training"
        ),
        sample_use="takes steps of its own",
    )

    layers: PositiveInt = 1
    top_rate: NonNegativeFloat = searched(0.2, LogRange(0.02, 2), "a decade around the authors'")
    middle_rate: NonNegativeFloat = 1.0

    def init_client(self, run: RunContext) -> Tensors:
        """`accuracy`, a scalar: a, 0 at first."""
        return {"accuracy": torch.zeros((), dtype=torch.float64)}

    def receive(self, client: Client, payload: Payload) -> Phases:
        """Mix and train the top layers; then measure the model's accuracy."""
        model = client["model"]
        top = client.mask(lambda b: b.above < self.layers)
        is_mixed = client.columns(lambda b: b.above < self.layers and b.kind == "parameter")
        received = client.composed(payload)
        a = float(client.memory["accuracy"])
        model.copy_(torch.where(is_mixed, torch.lerp(received, model, a), received))
        client.scratch["received"] = received
        yield Phase(trains=top, epochs=1, lr=client.lr * self.top_rate, purpose="top layers")
        client.memory["accuracy"] = own_accuracy(client)

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Yield one phase of plain steps with learning rates by layer, computed anew at the first
        batch of each epoch; then choose the parameters to upload."""
        w = client["model"]
        before = w.clone()
        columns = client.layout.parameters
        rates = torch.ones_like(w)
        size = client.run.config.federation.batch_size
        steps_of_epoch = len(batch_sizes(len(client.data.train), size, client.group.whole_last))
        steps = count()

        def step(_: Client, batch: Batch) -> Tensor:
            loss, gradient = client.gradient(w, batch)
            if next(steps) % steps_of_epoch == 0:
                rates.copy_(layer_rates(client.layout, gradient, self.top_rate, self.middle_rate))
            w[columns] -= client.lr * (rates * gradient)[columns]
            return loss

        yield Phase(step=step, by_gradient=True)
        client.scratch["uploaded"] = most_changed(client.layout, w - before)

    def beside(self) -> dict[str, Beside]:
        return {"kept": Beside("kept", "a bit for each number: whether it was uploaded", None)}

    def upload(self, client: Client, payload: Payload) -> Payload:
        """Upload the parameters that have changed most, with the received values elsewhere, and a
        mask of these parameters, packed into bits."""
        upload = super().upload(client, payload)
        uploaded = client.scratch["uploaded"]
        upload.vector = torch.where(uploaded, client["model"], client.scratch["received"])
        upload.extra["kept"] = packed(uploaded)
        return upload

    def aggregate(self, server: Server) -> None:
        """Average each parameter over the clients that uploaded it; a parameter that none uploaded
        stays.

        The other clients upload the received value in its place. So the change of the base's mean
        is divided by the weight of the clients that uploaded the parameter.
        """
        old = server["model"]
        super().aggregate(server)
        new = server["model"]
        masks = [unpacked(server.statistics[c]["kept"], len(old)) for c in server.answered]
        uploaded = torch.stack(masks).to(old.device)
        shares = server.shares(server.answered).to(old)
        share = (shares[:, None] * uploaded).sum(0)
        mean = old + (new - old) / torch.where(share > 0, share, 1)
        server["model"] = torch.where(uploaded.all(0), new, mean)
        server.flops += 2 * uploaded.numel()


def layer_rates(
    layout: Layout,
    gradient: Tensor,
    top: float,
    middle: float = 1.0,
) -> Tensor:
    """Return the factor on the learning rate of each parameter, (D,).

    With layers 0 to L: 1 in layer 0, middle (1 + s_l l / L) in layer l, and `top` in layer L. s_l
    is the mean of ln(1 + 1 / ||g||) over the gradients g of the layer's tensors.

    Args:
        layout: layout of the model.
        gradient: gradient on a batch, (D,).
        top: factor of the last layer.
        middle: factor of the layers between the first and the last.
    """
    rates = torch.ones_like(gradient)
    last = len(layout.layers) - 1
    blocks = [block for block in layout.blocks if block.kind == "parameter"]
    for layer in range(last + 1):
        tensors = [block for block in blocks if block.layer == layer]
        norms = torch.stack([gradient[block.columns].norm() for block in tensors])
        rate: Tensor | float = 1.0
        if layer == last:
            rate = top
        elif layer:
            slope = torch.log1p(1 / norms.clamp_min(1e-12)).mean()
            rate = middle * (1 + layer / last * slope)
        for block in tensors:
            rates[block.columns] = rate
    return rates


def most_changed(layout: Layout, change: Tensor) -> Tensor:
    """Return the mask (D,) of the parameters that a client uploads, as in the authors' code.

    Matrices, the classifier and running statistics are uploaded whole. Of all other tensors, which
    are vectors and convolutions, the parameters that changed least are left out: the share 1 - k /
    n of each vector, and of each kernel of a convolution. n is the number of the model's parameter
    tensors, k = 0, 1, ... the tensor's place among them; k / n is clipped to [0.1, 0.9]. At least
    one parameter of each vector or kernel is uploaded.

    Args:
        layout: layout of the model.
        change: change of the parameters in training, (D,).
    """
    mask = torch.ones_like(change, dtype=torch.bool)
    blocks = [block for block in layout.blocks if block.kind == "parameter"]
    for k, block in enumerate(blocks):
        if block.head or len(block.shape) == 2:
            continue
        kernel = math.prod(block.shape[2:]) if len(block.shape) > 2 else block.size
        rows = change[block.columns].abs().view(-1, kernel)
        share_left_out = 1 - min(max(k / len(blocks), 0.1), 0.9)
        left_out = min(round(kernel * share_left_out), kernel - 1)
        least = rows.argsort(dim=1, stable=True)[:, :left_out]
        uploaded = torch.ones_like(rows, dtype=torch.bool).scatter(1, least, False)
        mask[block.columns] = uploaded.flatten()
    return mask


def own_accuracy(client: Client) -> Tensor:
    """Return the accuracy of the client's model, shape (), float64, on its validation data or, if
    it has none, on its training data."""
    data = client.data
    part = data.validation if len(data.validation) else data.train
    correct = sum(int((scores.argmax(1) == y).sum()) for _, scores, y in client.passes(part))
    return torch.tensor(correct / max(len(part), 1), dtype=torch.float64)
