"""How many samples go through a client's bound model, and back, whichever code sends them."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn

from fl_lightning.training.module import ClientModule


class Passes:
    """Counts them while it is entered.

    It looks at the classifier, which every pass meets, also where a user's step calls the model's
    parts by itself, and for the way back at the features before it, where they train: a loss of
    features alone never reaches scores. There is one for each module, and never two clients in it
    at once. It is entered several times in a visit: what a pass of a small model takes is much for
    it.
    """

    def __init__(self, module: ClientModule) -> None:
        self.forward = self.backward = 0
        hook = module.head.register_forward_hook(self._passed)
        self._hooks, self._place = module.head._forward_hooks, hook.id
        # it hangs there only while it counts: a hook makes every pass of the classifier slower
        hook.remove()

    def __enter__(self) -> Self:
        self.forward = self.backward = 0
        self._hooks[self._place] = self._passed
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hooks.pop(self._place, None)

    def _passed(self, head: nn.Module, inputs: Any, out: Any) -> None:
        scores = out if isinstance(out, Tensor) else out[0]
        samples = len(scores)
        self.forward += samples
        passed = next(
            (x for x in (*inputs, scores) if isinstance(x, Tensor) and x.requires_grad), None
        )
        if passed is not None:
            passed.register_hook(lambda _: self._returned(samples))

    def _returned(self, samples: int) -> None:
        self.backward += samples
