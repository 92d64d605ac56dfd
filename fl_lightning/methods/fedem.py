"""FedEM: Marfoq, Neglia, Bellet, Kameni, Vidal: Federated Multi-Task Learning under a Mixture of
Distributions. NeurIPS 2021.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_lightning.configuration.ranges import PositiveInt
from fl_lightning.core import (
    Client,
    Module,
    Objective,
    Payload,
    Phase,
    PureLoss,
    Rule,
    RunContext,
    Tensors,
    Traits,
)
from fl_lightning.methods.base import Method
from fl_lightning.methods.common.mixture import Mixture, fitted_weights, mixed, responsibilities


@dataclass(frozen=True)
class FedEM(Method):
    """K models for all, and for each client weights pi of them: expectation-maximisation, whose
    M-step is FedAvg.

    With what it has received a client finds q_k(x, y) ~ pi_k p_k(y|x) for its training samples,
    sets pi to their mean and trains all models on sum_k q_k CE_k, q fixed. Scored: sum_k pi_k p_k;
    as `global`: plain weights. Each model's mean is FedAvg's over the cohort (the authors' code:
    over all clients, those that took no part with the last round's).

    Args:
        components: K; 1 is FedAvg. 3: the authors' code. The first begins as the run's first model,
            the others apart.
    """

    traits = Traits(
        family="clusters",
        judge="before",
        adapts=True,
        classes=True,
        client_memory=True,
        newcomers=Rule("own weights of the global components, which stay"),
        sample_use="weighs components by their losses on samples",
    )

    components: PositiveInt = 3

    def build(self, model: nn.Module, num_classes: int) -> nn.Module:
        """K of them, as one network."""
        return Mixture(model, self.components)

    def init_client(self, run: RunContext) -> dict[str, Tensor]:
        """`pi` (K,), float64: the client's weights."""
        return {"pi": torch.full((self.components,), 1 / self.components, dtype=torch.float64)}

    def phases(self, client: Client, payload: Payload) -> Iterable[Phase]:
        """E-step, then a phase on labels that weigh as much as a component is responsible for the
        sample."""
        q, right = responsibilities(client, client.memory["pi"])
        client.memory["pi"] = q.cpu().double().mean(0)
        return [
            Phase(
                objective=Objective(loss=PureLoss(self.loss)),
                targets=q[:, :, None] * right[:, None],
            )
        ]

    def newcomer_phases(self, client: Client, payload: Payload) -> Iterable[Phase]:
        """E-steps alone."""
        client.memory["pi"] = fitted_weights(client)
        return []

    def loss(self, _: Tensors, module: Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """sum_k mean q_k CE_k of weighted labels (batch, K, C), shape (): no component's reaches
        another."""
        x, target = batch
        loss: Tensor = -(target * module.model.each(x)).sum() / len(target)
        return loss

    def outputs(self, client: Client, x: Tensor, kind: str) -> Tensor:
        """Log probabilities of the client's mixture."""
        each: Tensor = client.module.model.each(x)
        pi = client.memory["pi"]
        return mixed(each, torch.full_like(pi, 1 / len(pi)) if kind == "global" else pi)
