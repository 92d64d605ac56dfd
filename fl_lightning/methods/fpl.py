"""FPL: Huang, Ye, Shi, Li, Du: Rethinking Federated Learning with Domain Shift: A Prototype View.
CVPR 2023."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from fl_lightning.configuration.ranges import PositiveFloat
from fl_lightning.configuration.search import LogRange, searched
from fl_lightning.core import Batch, Client, Module, Objective, Payload, RunContext, Server, Tensors
from fl_lightning.methods.base import Method
from fl_lightning.methods.classmeans import ClassMeans
from fl_lightning.methods.common.cluster_prototypes import cluster_losses, cluster_prototypes


@dataclass(frozen=True)
class FPL(ClassMeans):
    """FedAvg whose clients' features are drawn to prototypes of their class, one for each cluster
    of clients' means.

    The server clusters the class means that clients upload, class by class, by first neighbours
    (FINCH). Client: CE + contrast of each sample with all clusters' prototypes + MSE to the mean of
    its class's: all clusters weigh alike.

    Args:
        tau: temperature of the contrast. 0.02: the authors' code.
    """

    traits = replace(
        ClassMeans.traits,
        judge="global",
        receives_beside="class means of clusters of clients",
    )

    tau: PositiveFloat = searched(0.02, LogRange(0.01, 1), "the authors' to plain cosines")

    @property
    def adds(self) -> bool:
        """Always."""
        return True

    def init_server(self, run: RunContext) -> dict[str, Tensor]:
        """Cluster prototypes (K, d) and their classes (K,), none at first."""
        memory = super().init_server(run)
        prototypes, classes = cluster_prototypes([], memory["means.features"])
        return {"clusters.prototypes": prototypes, "clusters.classes": classes}

    def broadcast(self, server: Server) -> dict[int, Payload]:
        """With it the prototypes, once there are any."""
        sent, memory = Method.broadcast(self, server), server.memory
        for payload in sent.values() if len(memory["clusters.classes"]) else ():
            payload.extra["prototypes"] = memory["clusters.prototypes"]
            payload.statistics["classes"] = memory["clusters.classes"].int()
        return sent

    def objective(self, client: Client, payload: Payload) -> Objective:
        """The task loss, and with prototypes both losses on them."""
        if "prototypes" not in payload.extra:
            return Objective()
        device = client.run.device
        means = {
            "prototypes": payload.extra["prototypes"],
            "classes": payload.statistics["classes"].long(),
        }
        means = {name: tensor.to(device) for name, tensor in means.items()}

        def loss(module: Module, batch: Batch) -> Tensor:
            # cosines, their slopes, means of a class
            client.flops += 8 * len(batch[1]) * means["prototypes"].numel()
            return self.loss(means, module, batch)

        return Objective(loss=loss)

    def loss(self, means: Tensors, module: Module, batch: Batch) -> Tensor:
        """And the losses on prototypes."""
        task: Tensor = module.task_loss(batch)
        known, classes = means["prototypes"], means["classes"]
        return task + cluster_losses(module.features, batch[1], known, classes, self.tau)

    def aggregate(self, server: Server) -> None:
        """The mean, and the round's prototypes."""
        Method.aggregate(self, server)
        memory = server.memory
        prototypes, classes = cluster_prototypes(
            server.statistics.values(), memory["clusters.prototypes"]
        )
        memory |= {"clusters.prototypes": prototypes, "clusters.classes": classes}
