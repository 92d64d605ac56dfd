"""Networks whose classifier has been replaced by one that does more: it moves, gates or conditions
the features.

What the classifier sees (`ClientModule.features`) is then what the body gives, a matrix (batch, d).
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from fl_lightning.foundation.errors import BadInput
from fl_lightning.methods import Block, Method, Scope
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
        self,
        model: nn.Module,
        make: Callable[[nn.Linear], nn.Module],
        method: str,
        inner: str = "",
    ) -> None:
        super().__init__()
        path = head_of(model)
        classifier = model.get_submodule(path)
        if not (path and isinstance(classifier, nn.Linear)):
            requirement = f"{method} needs a classifier that is one linear layer"
            raise BadInput("model", type(model).__name__, requirement)
        check_plain_loss(model, f"{method} changes the classifier")
        self.model = model
        self.head = f"model.{path}.{inner}".rstrip(".")
        model.set_submodule(path, make(classifier))

    def forward(self, x: Tensor) -> Tensor:
        """The new classifier's scores."""
        scores: Tensor = self.model(x)
        return scores


def is_personal(block: Block) -> bool:
    """Whether it is the part of such a classifier that is the client's own."""
    return block.head and block.name.endswith((".personal", ".personal.weight", ".personal.bias"))


@dataclass(frozen=True)
class PersonalPart(Method):
    """Base: everything travels both ways but the client's own part of such a classifier."""

    def scope(self, block: Block) -> Scope:
        """The own part stays."""
        return "personal" if is_personal(block) else "shared"


class InContext(nn.Module):
    """A classifier whose scores depend on a vector of the client's, `context` (d,)."""

    context: Tensor | None = None

    @contextlib.contextmanager
    def using(self, context: Tensor) -> Iterator[None]:
        """Score under `context` (d,) within the block."""
        self.context = context
        try:
            yield
        finally:
            self.context = None
