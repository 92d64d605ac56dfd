"""A network of several components whose predictions are mixed (FedEM: Marfoq et al., NeurIPS
2021)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fl_lightning.core import Client
from fl_lightning.methods.common.basics import check_plain_loss, wide
from fl_lightning.models import another, head_of


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

    def each(self, x: Tensor) -> Tensor:
        """Log probabilities by component (batch, K, C)."""
        return wide(torch.stack([component(x) for component in self.components], 1)).log_softmax(2)

    def forward(self, x: Tensor) -> Tensor:
        """Log probabilities (batch, C) of the mixture in which all components weigh the same."""
        each = self.each(x)
        return mixed(each, each.new_full(each.shape[1:2], 1 / each.shape[1]))


def mixed(each: Tensor, weights: Tensor) -> Tensor:
    """log sum_k weights_k exp(each_k), (batch, C), of log probabilities (batch, K, C) and weights
    (K,)."""
    return (each + weights.to(each).log()[:, None]).logsumexp(1)


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
    posteriors = []
    for x, y in client.data.train.batches(client.run.config.evaluation.batch_size):
        each = model.each(x)
        right = nn.functional.one_hot(y, each.shape[2]).to(each)
        likelihood = each[torch.arange(len(y), device=y.device), :, y] + weights.to(each).log()
        posteriors.append((likelihood.softmax(1), right))
    return torch.cat([q for q, _ in posteriors]), torch.cat([right for _, right in posteriors])


def fitted_weights(client: Client, steps: int = 100) -> Tensor:
    """Weights (K,), float64, of components that stay as they are: so many steps of
    expectation-maximisation from equal ones, on the client's training samples. 100: ours, they come
    to rest long before.
    """
    count = len(client.memory["pi"])
    weights = torch.full((count,), 1 / count, dtype=torch.float64)
    likelihood = responsibilities(client, weights)[0].double().cpu()
    for _ in range(steps):
        shares = likelihood * weights
        weights = (shares / shares.sum(1, keepdim=True)).mean(0)
    return weights
