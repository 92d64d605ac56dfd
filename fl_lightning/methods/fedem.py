"""FedEM: Marfoq, Neglia, Bellet, Kameni, Vidal: Federated Multi-Task Learning under a Mixture of
Distributions. NeurIPS 2021.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from fl_lightning.methods import (
    Client,
    Method,
    Module,
    Objective,
    Payload,
    Phase,
    Phases,
    PositiveInt,
    PureLoss,
    Rule,
    RunContext,
    Tensors,
    Traits,
)
from fl_lightning.methods.common.basics import check_plain_loss, wide
from fl_lightning.models import another, head_of


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

    def init_client(self, run: RunContext) -> Tensors:
        """`pi` (K,), float64: the client's weights."""
        return {"pi": torch.full((self.components,), 1 / self.components, dtype=torch.float64)}

    def phases(self, client: Client, payload: Payload) -> Phases:
        """E-step, then a phase on labels that weigh as much as a component is responsible for the
        sample."""
        q, targets = responsibilities(client, client.memory["pi"])
        client.memory["pi"] = q.cpu().double().mean(0)
        weighted = q[:, :, None] * targets[:, None]
        return [Phase(objective=Objective(loss=PureLoss(self.loss)), targets=weighted)]

    def newcomer_phases(self, client: Client, payload: Payload) -> Phases:
        """E-steps alone."""
        client.memory["pi"] = fitted_weights(client)
        return []

    def loss(
        self,
        _: Tensors,
        module: Module,
        batch: tuple[Tensor, Tensor],
    ) -> Tensor:
        """sum_k mean q_k CE_k of weighted labels (batch, K, C), shape (): no component's reaches
        another."""
        x, target = batch
        logs: Tensor = module.model.log_probabilities(x)
        return -(target * logs).sum() / len(target)

    def outputs(
        self,
        client: Client,
        x: Tensor,
        kind: str,
    ) -> Tensor:
        """Log probabilities of the client's mixture."""
        pi = client.memory["pi"]
        if kind == "global":
            pi = torch.full_like(pi, 1 / len(pi))
        return mixed(client.module.model.log_probabilities(x), pi)


class Mixture(nn.Module):
    """`count` networks of one kind: the given one, and others like it that begin with weights of
    their own.

    Those are drawn from torch's generator in its current state.

    Raises:
        BadInput: the network has a training step of its own.
    """

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__()
        check_plain_loss(model, "fedem weighs the losses of samples")
        self.components = nn.ModuleList([model, *(another(model) for _ in range(count - 1))])
        self.head = f"components.0.{head_of(model)}"

    def log_probabilities(self, x: Tensor) -> Tensor:
        """Log probabilities by component (batch, K, C)."""
        scores = torch.stack([component(x) for component in self.components], 1)
        return wide(scores).log_softmax(2)

    def forward(self, x: Tensor) -> Tensor:
        """Log probabilities (batch, C) of the mixture in which all components weigh the same."""
        logs = self.log_probabilities(x)
        return mixed(logs, logs.new_full(logs.shape[1:2], 1 / logs.shape[1]))


def mixed(logs: Tensor, weights: Tensor) -> Tensor:
    """log sum_k weights_k exp(logs_k), (batch, C), of log probabilities (batch, K, C) and weights
    (K,)."""
    return (logs + weights.to(logs).log()[:, None]).logsumexp(1)


@torch.no_grad()
def responsibilities(client: Client, weights: Tensor) -> tuple[Tensor, Tensor]:
    """How likely each component made each training sample of the client: the E-step.

    Args:
        client: its model is a `Mixture`; the passes are in evaluation mode.
        weights: of the components, (K,).

    Returns:
        q (n, K), rows summing to 1, in proportion to weights_k p_k(y|x); and the labels as one-hot
        rows (n, C).
    """
    model = client.bind().model.eval()
    q = []
    targets = []
    for x, y in client.data.train.batches(client.run.config.evaluation.batch_size):
        logs = model.log_probabilities(x)
        of_label = logs[torch.arange(len(y), device=y.device), :, y]
        q.append((of_label + weights.to(logs).log()).softmax(1))
        targets.append(one_hot(y, logs.shape[2]).to(logs))
    return torch.cat(q), torch.cat(targets)


def fitted_weights(client: Client) -> Tensor:
    """Weights (K,), float64, of components that stay as they are: `STEPS` steps of
    expectation-maximisation from equal ones, on the client's training samples."""
    pi = client.memory["pi"]
    weights = torch.full_like(pi, 1 / len(pi))
    likelihood = responsibilities(client, weights)[0].double().cpu()
    for _ in range(STEPS):
        shares = likelihood * weights
        weights = (shares / shares.sum(1, keepdim=True)).mean(0)
    return weights


STEPS = 100
"""Of expectation-maximisation for a newcomer. Ours: weights come to rest long before."""
