"""FedRoD: Chen, Chao: On Bridging Generic and Personalized Federated Learning for Image
Classification. ICLR 2022."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_lightning.methods import (
    Batch,
    Block,
    Client,
    GroupServer,
    Method,
    Module,
    Objective,
    Payload,
    Phase,
    Phases,
    PureLoss,
    Scope,
    Tensors,
    Traits,
)
from fl_lightning.methods.common.basics import check_plain_loss
from fl_lightning.models import head_of


@dataclass(frozen=True)
class FedRoD(Method):
    """A shared body and classifier g, trained on a balanced loss, and a personal classifier h,
    whose scores are added to g's.

    Loss: CE(g(z) + log n_y) trains the body and g, CE(g(z) + h(z)) trains h alone, with the
    features z and the client's samples n_y of each class. Scored: g + h; as `global`: g.
    """

    traits = Traits(
        family="two models",
        judge="after",
        features=True,
        classes=True,
        sample_use="balances its loss by class counts of samples",
    )

    def build(self, model: nn.Module, num_classes: int) -> nn.Module:
        """Return the network with a second classifier, the personal one."""
        return TwoHeads(model)

    def scope(self, block: Block) -> Scope:
        return "personal" if block.name.startswith("personal.") else "shared"

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Return one phase that minimises the sum of both losses. Neither loss gives a gradient to
        the parameters of the other."""
        counts = client.class_counts.to(client.run.device, client.run.dtype)
        # log n_y up to a constant
        prior = (counts / counts.max()).clamp_min(torch.finfo(torch.float32).tiny).log()
        return [Phase(objective=Objective(loss=PureLoss(self.loss, {"prior": prior})))]

    def loss(
        self,
        tensors: Tensors,
        module: Module,
        batch: Batch,
    ) -> Tensor:
        """Return the balanced loss, with the client's `prior` (C,) added to the scores, plus the
        loss of both classifiers together, which trains the personal one; shape ()."""
        x, y = batch
        prior = tensors["prior"]
        scores = module.model(x)
        # outputs beyond the classes count as absent classes
        absent_prior = prior.min().expand(scores.shape[-1] - len(prior))
        balanced = cross_entropy(scores + torch.cat([prior, absent_prior]), y)
        personal = scores.detach() + module.model.personal(module.features.detach())
        return balanced + cross_entropy(personal, y)

    def outputs(self, client: Client, x: Tensor, kind: str) -> Tensor:
        """Return g(z) for the kind `global`, g(z) + h(z) otherwise."""
        module = client.module
        scores: Tensor = module.model(x)
        return scores if kind == "global" else scores + module.model.personal(module.features)

    def global_model(self, group: GroupServer, client: int) -> Tensor:
        """Return the server's model (D,). All clients share its body and classifier g; its personal
        classifier is not used for the kind `global` (see `outputs`)."""
        return group["model"]


class TwoHeads(nn.Module):
    """A network with a second classifier, `personal`: a copy of the network's classifier that
    starts at zero and takes the same features.

    Raises:
        BadInput: the network defines a `training_step`, which the method would bypass.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        check_plain_loss(model, "fedrod has a loss for each of two classifiers")
        self.model = model
        self.head = f"model.{head_of(model)}"
        self.personal = copy.deepcopy(self.get_submodule(self.head))
        for p in self.personal.parameters():
            nn.init.zeros_(p)

    def forward(self, x: Tensor) -> Tensor:
        """Return the generic classifier's scores."""
        scores: Tensor = self.model(x)
        return scores
