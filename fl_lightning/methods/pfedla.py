"""pFedLA: Ma, Zhang, Guo, Xu: Layer-wised Model Aggregation for Personalized Federated Learning.
CVPR 2022."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_lightning.core.vectors import last_received, products
from fl_lightning.foundation.rng import key
from fl_lightning.methods import (
    LogRange,
    NonNegativeFloat,
    NonNegativeInt,
    OwnStatistics,
    Payloads,
    PositiveInt,
    Relation,
    RelationInputs,
    Rule,
    RunContext,
    Server,
    Tensors,
    Traits,
    searched,
)
from fl_lightning.methods.common.hypernetwork import Hypernetwork


@dataclass(frozen=True)
class PFedLA(OwnStatistics):
    """Every client starts each layer from its own mix, with weights made by a network on the server
    for this client.

    The mix is sum_j alpha_ij^l theta_j^l over the last uploaded models. After a client has trained
    its mix, its network and embedding take a step down J^T (mix - trained model), which moves the
    mix towards the trained model (popular code has the opposite sign). Layers in which the client's
    own weight is 1 are not sent. Scored: the mix.

    Args:
        embedding: width of a client's embedding. 100: a public reimplementation (the authors' code
            was not found).
        hidden: width of the network's hidden layers. 100: the same reimplementation.
        hyper_lr: learning rate of the networks (SGD). 0.005: the same reimplementation. Mixing
            weights hardly move with it, since a network's outputs are divided by their sum
            (docs/methods.md).
        local_layers: number of layers that stay the client's own, those in which its own weight is
            greatest (HeurpFedLA's K). 0: pFedLA.
    """

    traits = Traits(
        family="hypernetwork",
        judge="before",
        several=False,
        changes_download=True,
        newcomers=Rule(
            "own mix by layer, of a network of its own; then local training", remembers=True
        ),
    )

    embedding: PositiveInt = 100
    hidden: PositiveInt = 100
    hyper_lr: NonNegativeFloat = searched(
        0.005, LogRange(0.005, 20), "from the default to where rows move"
    )
    local_layers: NonNegativeInt = 0

    def relation(self) -> Relation:
        """Return the relation whose rows the networks compute."""
        return LayerRows(self.embedding, self.hidden, self.local_layers, self.hyper_lr)

    def broadcast(self, server: Server) -> Payloads:
        """Send each client its mix, and keep copies of the cohort's last models: the networks learn
        from these copies after the round's uploads have replaced the models."""
        payloads = super().broadcast(server)
        group = server.only
        server.scratch |= {
            c: model.clone() for c, model in last_received(group, group.here).items()
        }
        for payload in payloads.values():
            assert payload.own_weights is not None
            payload.sent &= payload.own_weights[group.layout.layer_of] < 1
        return payloads


@dataclass
class LayerRows(Relation):
    """Weights by layer from a network for each client: relu(h_l(v_i)) divided by its sum, with
    client i's embedding v_i and the layers of its network.

    If all outputs for a layer are 0, the client keeps its own layer. Clients that have not uploaded
    yet do not count, unless they are in the cohort.

    Args:
        embedding: width of v_i.
        hidden: width of the network's three hidden layers.
        local_layers: number of layers that stay the client's own, those in which its own weight is
            greatest.
        lr: learning rate of the networks.
    """

    per_layer = True
    sources = "known"

    embedding: int
    hidden: int
    local_layers: int
    lr: float

    def flops(self, layers: int, receivers: int, sources: int) -> int:
        """Count a pass of each receiver's network, with its last layer for all sources."""
        return 2 * receivers * self.hidden * (self.embedding + 2 * self.hidden + layers * sources)

    def init_server(self, run: RunContext) -> Tensors:
        """Every client's network. The last layer's weights are drawn from U(0, 1), so that rows
        start near the mean."""
        tensors: Tensors = {}
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

    def network(self, memory: Tensors, client: int) -> Hypernetwork:
        """Return the client's network, whose parameters share the storage of `memory`."""
        return Hypernetwork.of(memory, f"rows.{client}")

    def rows(
        self,
        network: Hypernetwork,
        clients: int,
        client: int,
        sources: Sequence[int],
    ) -> Tensor:
        """Return the weights (L, n) of `sources` in the client's mix, differentiable by its
        network's parameters.

        Args:
            network: the client's network.
            clients: N.
            client: number of the client.
            sources: clients whose models are mixed.
        """
        places = torch.tensor(sources)
        outputs = network(torch.tensor(0)).view(-1, clients)[:, places].relu()
        total = outputs.sum(1, keepdim=True)
        least = torch.finfo(outputs.dtype).tiny
        is_own = places == client
        identity = is_own.to(outputs)
        rows = torch.where(total > 0, outputs / total.clamp_min(least), identity)
        count = min(self.local_layers, len(rows))
        stays_local = torch.zeros(len(rows), 1, dtype=torch.bool)
        stays_local[rows[:, is_own].flatten().topk(count).indices] = True
        return torch.where(stays_local, identity, rows)

    @torch.no_grad()
    def weights(self, inputs: RelationInputs) -> Tensor:
        rows = []
        for client in inputs.receivers:
            network = self.network(inputs.memory, client)
            rows.append(self.rows(network, inputs.clients, client, inputs.sources))
        weights = torch.stack(rows, 1).double()
        return weights / weights.sum(2, keepdim=True)

    def learn(self, server: Server) -> None:
        """Take a step of the networks of the clients that have answered, by how training changed
        their mixes."""
        group = server.only
        assert group.weighed is not None
        sources = group.weighed.sources
        nearer = products(group, server.answered, sources, server.scratch)
        for client, gradient in zip(server.answered, (-nearer).unbind(1), strict=True):
            network = self.network(server.memory, client)
            rows = self.rows(network, server.clients, client, sources)
            network.descend(rows, gradient, torch.optim.SGD(network.parameters(), self.lr))
            server.flops += 6 * network.multiply_adds
