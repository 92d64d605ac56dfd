"""Hypernetworks on the server, which generate clients' models (Shamsian et al., ICML 2021); their
parameters are kept as named tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fl_lightning.core import Tensors


class Hypernetwork(nn.Sequential):
    """Maps a client's number to the parameters of its model: an embedding of the client, then
    linear layers with ReLU.

    Args:
        clients: N, rows of the embedding.
        numbers: outputs.
        embedding: width of a client's embedding.
        hidden: width of the hidden layers.
        layers: hidden layers after the first.
        last_relu: whether a ReLU also precedes the output layer.
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
    def multiply_adds(self) -> int:
        """Multiply-adds of one forward pass."""
        return sum(layer.weight.numel() for layer in self if isinstance(layer, nn.Linear))

    def tensors(self, name: str = "hypernetwork") -> Tensors:
        """Return the parameters by name, each name with the prefix `name`."""
        return {f"{name}.{key}": p.detach() for key, p in self.named_parameters()}

    def momenta(self) -> Tensors:
        """Return a momentum of 0 for each parameter, by name."""
        return {f"momentum.{name}": torch.zeros_like(p) for name, p in self.named_parameters()}

    @classmethod
    def of(cls, memory: Tensors, name: str = "hypernetwork") -> Hypernetwork:
        """Return the hypernetwork whose `tensors` are in `memory`; its parameters share their
        storage."""
        prefix = f"{name}."
        tensors = {k.removeprefix(prefix): v for k, v in memory.items() if k.startswith(prefix)}
        last = max(int(key.partition(".")[0]) for key in tensors)
        clients, embedding = tensors["0.weight"].shape
        numbers, hidden = tensors[f"{last}.weight"].shape
        layers = len(tensors) // 2 - 2
        last_relu = last == 2 * layers + 3  # otherwise the output layer is one place earlier
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
        """Return an SGD optimiser whose momentum buffers are those in `memory`; its steps update
        them in place.

        Args:
            memory: holds the buffers, as `momenta` returns them.
            lr: learning rate.
            momentum: factor on a buffer in each step.
            decay: weight decay.
        """
        optimizer = torch.optim.SGD(self.parameters(), lr, momentum, weight_decay=decay)
        for name, p in self.named_parameters():
            optimizer.state[p]["momentum_buffer"] = memory[f"momentum.{name}"]
        return optimizer

    @torch.no_grad()
    def write_model(self, client: int, vector: Tensor) -> Tensor:
        """Overwrite the first entries of `vector` (D,), in place, with the client's generated
        model; return `vector`."""
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
        """Take one optimiser step with the parameters' gradient J^T `gradient`, where J is the
        Jacobian of `output` by the parameters.

        Args:
            output: output of this network, with its autograd graph.
            gradient: gradient of a loss by `output`.
            optimizer: optimiser of this network.
            clip: greatest norm of the gradient of all parameters together.
        """
        optimizer.zero_grad()
        output.backward(gradient.to(output))
        nn.utils.clip_grad_norm_(self.parameters(), clip)
        optimizer.step()
