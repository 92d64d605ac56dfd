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
from fl_lightning.models import freshly_drawn, head_of


@dataclass(frozen=True)
class FedEM(Method):
    """A mixture of K models that all clients share, with weights pi of each client's own:
    expectation-maximisation, whose M-step is FedAvg.

    Given the received models, a client computes q_k(x, y) ~ pi_k p_k(y|x) for its training samples,
    sets pi to their mean, and trains all models on sum_k q_k CE_k with q fixed. Scored: sum_k pi_k
    p_k; as `global`: with equal weights. Each model's mean is FedAvg's over the cohort (the
    authors' code: over all clients, with the last round's models of those that took no part).

    Args:
        components: K; 1 is FedAvg. 3: the authors' code. The first starts as the run's initial
            model, the others from other draws.
    """

    traits = Traits(
        family="clusters",
        judge="before",
        adapts=True,
        classes=True,
        client_memory=True,
        newcomers=Rule("global components, unchanged, with weights of its own"),
        sample_use="weighs components by their losses on samples",
    )

    components: PositiveInt = 3

    def build(self, model: nn.Module, num_classes: int) -> nn.Module:
        """Return the K models as one network."""
        return Mixture(model, self.components)

    def init_client(self, run: RunContext) -> Tensors:
        """`pi` (K,), float64: the client's weights, 1 / K at first."""
        return {"pi": torch.full((self.components,), 1 / self.components, dtype=torch.float64)}

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Take the E-step, which sets pi; return one phase in which each component is trained on
        all samples, weighted by its responsibilities."""
        q, targets = responsibilities(client, client.memory["pi"])
        client.memory["pi"] = q.cpu().double().mean(0)
        weighted = q[:, :, None] * targets[:, None]
        return [Phase(objective=Objective(loss=PureLoss(self.loss)), targets=weighted)]

    def newcomer_phases(self, client: Client, payload: Payload) -> Phases:
        """Fit pi by E-steps; return no phase."""
        client.memory["pi"] = fitted_weights(client)
        return []

    def loss(
        self,
        _: Tensors,
        module: Module,
        batch: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Return the sum over components k of the batch's mean of q_k CE_k, shape (). A component's
        cross entropy gives no gradient to the other components.

        Args:
            module: holds the mixture.
            batch: inputs, and targets (batch, K, C): the one-hot label, times q_k for component k.
        """
        x, target = batch
        logs: Tensor = module.model.log_probabilities(x)
        return -(target * logs).sum() / len(target)

    def outputs(
        self,
        client: Client,
        x: Tensor,
        kind: str,
    ) -> Tensor:
        """Return log probabilities (batch, C) of the client's mixture; for the kind `global`, of
        the mixture with equal weights."""
        pi = client.memory["pi"]
        if kind == "global":
            pi = torch.full_like(pi, 1 / len(pi))
        return mixture_logs(client.module.model.log_probabilities(x), pi)


class Mixture(nn.Module):
    """`count` networks of one architecture: `model`, and others with initial weights of their own,
    drawn from torch's global generator.

    Raises:
        BadInput: the network defines a `training_step`, which the method would bypass.
    """

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__()
        check_plain_loss(model, "fedem weighs the losses of samples")
        self.components = nn.ModuleList([model, *(freshly_drawn(model) for _ in range(count - 1))])
        self.head = f"components.0.{head_of(model)}"

    def log_probabilities(self, x: Tensor) -> Tensor:
        """Return log probabilities by component (batch, K, C)."""
        scores = torch.stack([component(x) for component in self.components], 1)
        return wide(scores).log_softmax(2)

    def forward(self, x: Tensor) -> Tensor:
        """Return log probabilities (batch, C) of the mixture with equal weights."""
        logs = self.log_probabilities(x)
        return mixture_logs(logs, logs.new_full(logs.shape[1:2], 1 / logs.shape[1]))


def mixture_logs(logs: Tensor, weights: Tensor) -> Tensor:
    """Return log sum_k weights_k exp(logs_k), (batch, C), of log probabilities (batch, K, C) and
    weights (K,)."""
    return (logs + weights.to(logs).log()[:, None]).logsumexp(1)


@torch.no_grad()
def responsibilities(client: Client, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return how likely each component is to have made each training sample of the client: the
    E-step.

    Args:
        client: the client, whose model is a `Mixture`, used in evaluation mode.
        weights: weights of the components, (K,).

    Returns:
        q (n, K), proportional to weights_k p_k(y|x), with rows that sum to 1; and the labels as
        one-hot rows (n, C).
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
    """Fit the weights (K,), float64, of fixed components on the client's training samples, by
    `STEPS` steps of expectation-maximisation from equal weights."""
    pi = client.memory["pi"]
    weights = torch.full_like(pi, 1 / len(pi))
    likelihood = responsibilities(client, weights)[0].double().cpu()
    for _ in range(STEPS):
        shares = likelihood * weights
        weights = (shares / shares.sum(1, keepdim=True)).mean(0)
    return weights


STEPS = 100
"""Steps of expectation-maximisation for a newcomer. Ours: the weights converge long before."""
