"""Networks whose classifier has been replaced by one that does more: it moves, gates or conditions
the features.

What the classifier sees (`ClientModule.features`) is then what the body gives, a matrix (batch, d).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import gumbel_softmax, normalize, softmax

from fl_lightning.core import Block
from fl_lightning.foundation.errors import BadInput
from fl_lightning.methods.common.basics import check_plain_loss
from fl_lightning.models import head_of


class NewClassifier(nn.Module):
    """A network with `make(classifier)` in place of its classifier.

    Args:
        model: the network; its classifier must be one linear layer.
        make: the new classifier, of the old one.
        method: what asks for it, for messages.
        inner: name, within the new classifier, of what the features are for; none: the whole of it.

    Raises:
        BadInput: the classifier is something else, or the network has a training step of its own,
            which would not run.
    """

    def __init__(
        self, model: nn.Module, make: Callable[[nn.Linear], nn.Module], method: str, inner: str = ""
    ) -> None:
        super().__init__()
        path, name = head_of(model), type(model).__name__
        own = model.get_submodule(path)
        if not (path and isinstance(own, nn.Linear)):
            raise BadInput("model", name, f"{method} needs a classifier that is one linear layer")
        check_plain_loss(model, f"{method} changes the classifier")
        self.model, self.head = model, f"model.{path}.{inner}".rstrip(".")
        model.set_submodule(path, make(own))

    def forward(self, x: Tensor) -> Tensor:
        """The new classifier's scores."""
        scores: Tensor = self.model(x)
        return scores


def is_personal(block: Block) -> bool:
    """Whether it is the part of such a classifier that is the client's own."""
    return block.head and block.name.endswith((".personal", ".personal.weight", ".personal.bias"))


class Projected(nn.Sequential):
    """A projection of features to `width` numbers, linear, ReLU and linear, and a new classifier of
    them, `out`."""

    def __init__(self, own: nn.Linear, width: int) -> None:
        super().__init__()
        self.first, self.relu = nn.Linear(own.in_features, own.in_features), nn.ReLU()
        self.second, self.out = (
            nn.Linear(own.in_features, width),
            nn.Linear(width, own.out_features),
        )


class Shifted(nn.Module):
    """A classifier of features to which a vector `personal` (d,) is added, 0 at first (DBE)."""

    def __init__(self, own: nn.Linear) -> None:
        super().__init__()
        self.generic, self.personal = own, nn.Parameter(torch.zeros(own.in_features))

    def forward(self, z: Tensor) -> Tensor:
        """Features (batch, d) to scores."""
        scores: Tensor = self.generic(z + self.personal)
        return scores


class InContext(nn.Module):
    """A classifier whose scores depend on a vector of the client's, `context` (d,)."""

    context: Tensor | None = None

    @contextlib.contextmanager
    def using(self, context: Tensor) -> Iterator[None]:
        """Within, scores are those under `context`."""
        self.context = context
        try:
            yield
        finally:
            self.context = None


class Separated(InContext):
    """h(r z) + g(s z): a gate divides each feature between a personal classifier h and a frozen
    global one g (FedCP).

    (r, s) is the softmax over the two of gate(z v / ||v||), by feature; the context v is the sum of
    h's current rows, or the one in use.

    Args:
        own: what both classifiers begin as.
        gumbel: in training the softmax has Gumbel noise.
    """

    def __init__(self, own: nn.Linear, gumbel: bool = False) -> None:
        super().__init__()
        d, self.gumbel = own.in_features, gumbel
        self.personal, self.received = own, copy.deepcopy(own).requires_grad_(False)
        self.gate = nn.Sequential(nn.Linear(d, 2 * d), nn.LayerNorm(2 * d), nn.ReLU())

    def own_context(self) -> Tensor:
        """v of the current h, (d,)."""
        return self.personal.weight.detach().sum(0)

    def shares(self, z: Tensor) -> Tensor:
        """r and s of features (batch, d): (batch, 2, d)."""
        v = self.own_context() if self.context is None else self.context
        rows = self.gate(z * normalize(v, dim=0)).unflatten(1, (2, -1))
        return gumbel_softmax(rows, dim=1) if self.gumbel and self.training else softmax(rows, 1)

    def forward(self, z: Tensor) -> Tensor:
        """Features (batch, d) to scores."""
        r, s = self.shares(z).unbind(1)
        scores: Tensor = self.personal(r * z) + self.received(s * z)
        return scores


class Conditioned(InContext):
    """A classifier of features as they are under a condition, and an embedding of each class
    (GPFL).

    The context is the condition; without one, the mean embedding.
    """

    def __init__(self, own: nn.Linear) -> None:
        super().__init__()
        d = own.in_features
        self.personal, self.embedding = own, nn.Embedding(own.out_features, d)
        self.gamma, self.beta = (
            nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.LayerNorm(d)) for _ in range(2)
        )

    def under(self, z: Tensor, condition: Tensor) -> Tensor:
        """ReLU((gamma(k) + 1) z + beta(k)) of features (batch, d) and a condition k (d,)."""
        conditioned: Tensor = ((self.gamma(condition) + 1) * z + self.beta(condition)).relu()
        return conditioned

    def forward(self, z: Tensor) -> Tensor:
        """Features (batch, d) to scores."""
        condition = self.embedding.weight.mean(0) if self.context is None else self.context
        scores: Tensor = self.personal(self.under(z, condition))
        return scores
