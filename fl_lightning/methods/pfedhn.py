"""pFedHN: Shamsian, Navon, Fetaya, Chechik: Personalized Federated Learning using Hypernetworks.
ICML 2021."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.foundation.rng import key
from fl_lightning.methods import (
    Alone,
    Client,
    GroupServer,
    LogRange,
    NonNegativeFloat,
    NonNegativeInt,
    OwnStatistics,
    Payload,
    Payloads,
    Phase,
    Phases,
    PositiveFloat,
    PositiveInt,
    Relation,
    Rule,
    RunContext,
    Server,
    ShareBelow1,
    Tensors,
    Traits,
    searched,
)
from fl_lightning.methods.common.hypernetwork import Hypernetwork


@dataclass(frozen=True)
class PFedHN(OwnStatistics):
    """A hypernetwork on the server makes each client's model from an embedding of the client;
    hypernetwork and embedding learn from how training changes the model.

    theta_i = h(v_i; phi) is sent and trained to theta'_i; then phi and v_i step down J^T (theta_i -
    theta'_i), one client of the cohort after the other. The authors have one client a round. With a
    cohort of m clients the steps' learning rate is hyper_lr / m: all m models come from the same
    phi, and m steps of the full length would overshoot. Scored: the model that the hypernetwork
    generates after these steps.

    Args:
        embedding: width of a client's embedding v_i; null: int(1 + N / 4) (the authors' code).
        hidden: width of the hypernetwork's hidden layers. 100: the authors' code.
        hidden_layers: number of hidden layers after the first. 3: the authors' trainer (--n-hidden,
            which counts in the same way).
        last_relu: whether a ReLU also precedes the output layer (ours; the authors' code has none
            there).
        hyper_lr: learning rate of the hypernetwork (SGD), for one client a round. 0.01: the
            authors' code.
        hyper_momentum: momentum of the hypernetwork's SGD. 0.9: the authors' code.
        hyper_decay: weight decay of the hypernetwork. 0.001: the authors' code.
        clip: greatest norm of the hypernetwork's gradient. 50: the authors' code.
    """

    traits = Traits(
        family="hypernetwork",
        several=False,
        newcomers=Rule("model generated from its own embedding, which is fitted to its data"),
        receives="a model that the server's hypernetwork makes",
    )

    embedding: PositiveInt | None = None
    hidden: PositiveInt = 100
    hidden_layers: NonNegativeInt = 3
    last_relu: bool = True
    hyper_lr: NonNegativeFloat = searched(
        0.01, LogRange(0.001, 0.1), "a decade around the authors'"
    )
    hyper_momentum: ShareBelow1 = 0.9
    hyper_decay: NonNegativeFloat = 0.001
    clip: PositiveFloat = 50.0

    def relation(self) -> Relation:
        """Return the relation without mixing: the hypernetwork makes each client's model."""
        return Alone()

    def init_server(self, run: RunContext) -> Tensors:
        """The hypernetwork's parameters, drawn from the seed, embeddings among them, and their
        momenta, all 0. If a newcomer is added, its embedding is the mean of the others."""
        embeddings = run.server.memory.get("hypernetwork.0.weight")
        width = self.embedding or int(1 + run.clients / 4)
        if embeddings is not None:
            width = embeddings.shape[1]
        numbers = run.groups[0].layout.parameters.stop
        sizes = (run.clients, numbers, width, self.hidden, self.hidden_layers)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key(run.config.seed, "hypernetwork"))
            network = Hypernetwork(*sizes, last_relu=self.last_relu)
        if embeddings is not None:
            network.get_parameter("0.weight").data[len(embeddings) :] = embeddings.mean(0)
        return network.tensors() | network.momenta()

    def broadcast(self, server: Server) -> Payloads:
        """Send each client its generated model."""
        return server.only.send({c: self.global_model(server.only, c) for c in server.only.here})

    def aggregate(self, server: Server) -> None:
        """Take a step of the hypernetwork for each client that has answered."""
        network = Hypernetwork.of(server.memory)
        memory = server.memory
        columns = server.only.layout.parameters
        rate = self.hyper_lr / len(server.answered)
        optimizer = network.optimizer(memory, rate, self.hyper_momentum, self.hyper_decay)
        for client in server.answered:
            change = server.only.vector(client, since="sent")[columns]
            network.descend(network(torch.tensor(client)), -change, optimizer, self.clip)
        server.flops += 2 * network.multiply_adds * (len(server.cohort) + 3 * len(server.answered))

    def newcomer_phases(self, client: Client, payload: Payload) -> Phases:
        """Train the generated model, then move the newcomer's embedding alone down J^T (output -
        trained model); repeat this as often as there were rounds. The model is then the network's
        output."""
        server = client.run.server
        network = Hypernetwork.of(server.memory).requires_grad_(False)
        embeddings = network.get_parameter("0.weight").requires_grad_()
        optimizer = torch.optim.SGD(
            [embeddings], self.hyper_lr, self.hyper_momentum, weight_decay=self.hyper_decay
        )
        model = client["model"]
        columns = client.layout.parameters
        for step in range(server.round):
            output = network(torch.tensor(client.id))
            model[columns] = output.detach().to(model)
            yield Phase(purpose=f"newcomer {step}")  # gives each phase other batches
            trained = model[columns].to(output)
            network.descend(output, output.detach() - trained, optimizer, self.clip)
        network.write_model(client.id, model)

    def global_model(self, group: GroupServer, client: int) -> Tensor:
        """Return the client's generated model (D,). Its running statistics are the client's own; on
        ranks that do not store the client, they are the initial model's."""
        server = group.server
        state = server.run.states.get(client)
        model = group.initial if state is None else state.vectors["model"]
        vector = model.to(group.initial.device, copy=True)
        return group.layout.clear_gaps(Hypernetwork.of(server.memory).write_model(client, vector))
