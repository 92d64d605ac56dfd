"""pFedLA's relation: a hypernetwork for each client, which makes its row of weights for every
layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_lightning.callbacks.relations import Relation
from fl_lightning.core import RelationInputs, RunContext, Server
from fl_lightning.foundation.rng import key
from fl_lightning.methods.common.hypernetwork import Hypernetwork


@dataclass
class LayerRows(Relation):
    """alpha_i^l = relu(h_l(v_i)) over their sum, with the embedding v_i and the layers of client
    i's own network.

    A row that is 0 everywhere is one's own. Clients that have not uploaded yet do not count, unless
    in the cohort.

    Args:
        embedding: numbers of v_i.
        hidden: width of the network's three hidden layers.
        local_layers: so many layers, those in which a client's own weight is greatest, are its own
            alone.
    """

    per_layer = True
    sources = "known"

    embedding: int
    hidden: int
    local_layers: int

    def flops(self, layers: int, receivers: int, sources: int) -> int:
        """A pass of each receiver's network, its last layer for all sources."""
        return 2 * receivers * self.hidden * (self.embedding + 2 * self.hidden + layers * sources)

    def init_server(self, run: RunContext) -> dict[str, Tensor]:
        """Every client's network. Weights of its last layer begin as U(0, 1), so that rows begin
        near the mean."""
        tensors: dict[str, Tensor] = {}
        for c in range(run.clients):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(key(run.config.seed, "hypernetwork", c))
                network = Hypernetwork(
                    1, len(run.layer_names) * run.clients, self.embedding, self.hidden, 2
                )
                last = network[-1]
                assert isinstance(last, nn.Linear)
                nn.init.uniform_(last.weight)
                nn.init.zeros_(last.bias)
            tensors |= network.tensors(f"rows.{c}")
        return tensors

    def network(self, memory: dict[str, Tensor], client: int) -> Hypernetwork:
        """The client's."""
        return Hypernetwork.of(memory, f"rows.{client}")

    def rows(
        self, network: Hypernetwork, clients: int, client: int, sources: Sequence[int]
    ) -> Tensor:
        """Weights (L, n) of `sources` in what a client receives, as functions of its network's
        parameters."""
        made = network(torch.tensor(0)).view(-1, clients)[:, torch.tensor(sources)].relu()
        own, total = torch.tensor(sources) == client, made.sum(1, keepdim=True)
        rows = torch.where(
            total > 0, made / total.clamp_min(torch.finfo(made.dtype).tiny), own.to(made)
        )
        local = torch.zeros(len(rows), 1, dtype=torch.bool)
        local[rows[:, own].flatten().topk(min(self.local_layers, len(rows))).indices] = True
        return torch.where(local, own.to(rows), rows)

    @torch.no_grad()
    def weights(self, inputs: RelationInputs) -> Tensor:
        """Shape (L, m, n)."""
        of = (
            (self.network(inputs.memory, c), inputs.clients, c, inputs.sources)
            for c in inputs.receivers
        )
        rows = torch.stack([self.rows(*each) for each in of], 1).double()
        return rows / rows.sum(2, keepdim=True)

    def descend(self, server: Server, sources: Sequence[int], gradients: Tensor, lr: float) -> None:
        """A step of each network down the `gradients` (L, m, n) by the rows of those who have
        answered."""
        for client, gradient in zip(server.answered, gradients.unbind(1), strict=True):
            network = self.network(server.memory, client)
            optimizer = torch.optim.SGD(network.parameters(), lr)
            network.descend(
                self.rows(network, server.clients, client, sources), gradient, optimizer
            )
            server.flops += 6 * network.products
