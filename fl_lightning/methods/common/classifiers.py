"""Networks with a new classifier that also shifts, gates or conditions the features.

The classifier's input (`ClientModule.features`) is then the body's output, a matrix (batch, d).
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
    """A network whose classifier is replaced by `make(classifier)`.

    Args:
        model: the network; its classifier must be one linear layer.
        make: returns the new classifier, given the old one.
        method: the method's name, for messages.
        inner: dotted name, within the new classifier, of the module whose parameters count as the
            network's head and whose inputs count as its features; empty: the whole new classifier.

    Raises:
        BadInput: the classifier is not one linear layer, or the network defines a `training_step`,
            which the method would bypass.
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
            raise BadInput(
                "model",
                type(model).__name__,
                f"{method} needs a classifier that is one linear layer; use another model",
            )
        check_plain_loss(model, f"{method} changes the classifier")
        self.model = model
        self.head = f"model.{path}.{inner}".rstrip(".")
        model.set_submodule(path, make(classifier))

    def forward(self, x: Tensor) -> Tensor:
        """Return the new classifier's scores."""
        scores: Tensor = self.model(x)
        return scores


def is_personal(block: Block) -> bool:
    """Whether a block belongs to the module `personal` of a `NewClassifier`, which is never
    sent."""
    return block.head and block.name.endswith((".personal", ".personal.weight", ".personal.bias"))


@dataclass(frozen=True)
class PersonalPart(Method):
    """Base: the module `personal` of the `NewClassifier` stays at the client; everything else is
    shared."""

    def scope(self, block: Block) -> Scope:
        return "personal" if is_personal(block) else "shared"


class ContextClassifier(nn.Module):
    """A classifier whose scores also depend on a vector of the client, `context` (d,)."""

    context: Tensor | None = None

    @contextlib.contextmanager
    def using(self, context: Tensor) -> Iterator[None]:
        """Set `context` (d,) within the `with` block."""
        self.context = context
        try:
            yield
        finally:
            self.context = None
