"""Networks on the server that make clients' models (Shamsian et al., ICML 2021), kept as named
tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fl_lightning.core import Tensors


class Hypernetwork(nn.Sequential):
    """From a client's number to the numbers of its model, through an embedding of its own: all ReLU
    layers.

    Args:
        clients: N.
        numbers: what comes out.
        embedding: width of a client's embedding.
        hidden: width of the hidden layers.
        layers: hidden layers beside the first.
        last_relu: whether there is a ReLU before the output layer, too.
    """

    def __init__(
        self,
        clients: int,
        numbers: int,
        embedding: int,
        hidden: int,
        layers: int,
        *,
        last_relu: bool = True,
    ) -> None:
        inner: list[nn.Module] = [nn.Embedding(clients, embedding), nn.Linear(embedding, hidden)]
        for _ in range(layers):
            inner += [nn.ReLU(), nn.Linear(hidden, hidden)]
        outer = [nn.ReLU()] if last_relu else []
        super().__init__(*inner, *outer, nn.Linear(hidden, numbers))

    @property
    def products(self) -> int:
        """Multiply-adds of one pass."""
        return sum(layer.weight.numel() for layer in self if isinstance(layer, nn.Linear))

    def tensors(self, name: str = "hypernetwork") -> Tensors:
        """Parameters, by names that begin with `name`."""
        return {f"{name}.{key}": p.detach() for key, p in self.named_parameters()}

    def momenta(self) -> Tensors:
        """A momentum of 0 for each parameter, by name."""
        return {f"momentum.{name}": torch.zeros_like(p) for name, p in self.named_parameters()}

    @classmethod
    def of(cls, memory: Tensors, name: str = "hypernetwork") -> Hypernetwork:
        """The one whose `tensors` are in `memory`: its parameters share their storage."""
        prefix = f"{name}."
        tensors = {k.removeprefix(prefix): v for k, v in memory.items() if k.startswith(prefix)}
        last = max(int(key.partition(".")[0]) for key in tensors)
        clients, embedding = tensors["0.weight"].shape
        numbers, hidden = tensors[f"{last}.weight"].shape
        layers = len(tensors) // 2 - 2
        last_relu = last == 2 * layers + 3  # else the output layer comes one place earlier
        with torch.device("meta"):
            network = cls(clients, numbers, embedding, hidden, layers, last_relu=last_relu)
        network.load_state_dict(tensors, assign=True)
        return network

    def optimizer(
        self,
        memory: Tensors,
        lr: float,
        momentum: float,
        decay: float,
    ) -> torch.optim.SGD:
        """SGD that goes on with the momenta in `memory`, in place."""
        optimizer = torch.optim.SGD(self.parameters(), lr, momentum, weight_decay=decay)
        for name, p in self.named_parameters():
            optimizer.state[p]["momentum_buffer"] = memory[f"momentum.{name}"]
        return optimizer

    @torch.no_grad()
    def write(self, client: int, vector: Tensor) -> Tensor:
        """`vector` (D,), with the client's model as it is made now in its first columns."""
        output = self(torch.tensor(client))
        vector[: len(output)] = output.to(vector)
        return vector

    def descend(
        self,
        output: Tensor,
        gradient: Tensor,
        optimizer: torch.optim.Optimizer,
        clip: float = math.inf,
    ) -> None:
        """A step down J^T gradient, where J is the Jacobian of its `output` by all parameters.

        The norm of the whole is clipped to `clip`.
        """
        optimizer.zero_grad()
        output.backward(gradient.to(output))
        nn.utils.clip_grad_norm_(self.parameters(), clip)
        optimizer.step()
