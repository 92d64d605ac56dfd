"""What a client's training costs in floating-point operations (a multiply-add counts as two).

Matrix products and convolutions are counted by `torch.utils.flop_counter` on one small batch, and are proportional to
the samples. What it does not see (activations, normalisation, the optimiser's step) is small beside them and left out;
the pull, which papers count, and a linear term have formulas. What hooks do with a client's model is metered as it
runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.core import PLAIN, Client
from fl_lightning.training.module import ClientModule

PULL_FLOPS = 5
"""Per pulled number and step: subtract, multiply and add for the value, multiply and add for the gradient."""
LINEAR_FLOPS = 3
"""Per number of a linear term and step: multiply and add for the value, add for the gradient."""


@dataclass(frozen=True)
class SampleCost:
    """Operations for one training sample."""

    forward: float
    """One pass through the model."""
    backward: float
    """Back through it, to all parameters."""
    extra: float
    """What the training step does beyond that: further passes of a method or of a user's own step."""

    @property
    def step(self) -> float:
        """All of it."""
        return self.forward + self.backward + self.extra

    def of(self, samples: int, steps: int, pulled: int, linear: int = 0) -> dict[str, int]:
        """`flops_forward`, `flops_backward`, `flops_extra` and `flops_penalty` of a phase of so many `samples` (epochs
        counted) and `steps`, with so many numbers in the pull and in the linear term."""
        return {
            "flops_forward": round(self.forward * samples),
            "flops_backward": round(self.backward * samples),
            "flops_extra": round(self.extra * samples),
            "flops_penalty": (PULL_FLOPS * pulled + LINEAR_FLOPS * linear) * steps,
        }


def sample_cost(client: ClientModule, batch: tuple[Tensor, Tensor]) -> SampleCost:
    """Count the user's or the task's step on one `batch`.

    It writes to what is bound (running statistics): bind a copy first.
    """
    from torch.utils.flop_counter import FlopCounterMode

    def counted(step: Tensor) -> Tensor:
        torch.autograd.grad(step, [p for p in client.binding.parameters if p.requires_grad], allow_unused=True)
        return step

    client.model.train()
    client.set_objective(PLAIN)
    n = len(batch[1])
    with FlopCounterMode(display=False) as passed:
        out = client.model(batch[0])
    with FlopCounterMode(display=False) as returned:
        counted(_total(out))
    with FlopCounterMode(display=False) as whole:
        counted(client.training_step(batch, 0))
    forward, backward, step = (mode.get_total_flops() / n for mode in (passed, returned, whole))
    return SampleCost(forward, backward, max(step - forward - backward, 0.0))


def _total(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    return out.sum() if isinstance(out, Tensor) else torch.stack([o.sum() for o in out]).sum()


class Meter:
    """Counts the samples that go through a client's bound model, and back, whichever code sends them.

    It looks at the classifier, which every pass meets, also where a user's step calls the model's parts by itself, and
    for the way back at the features before it, where they train: a loss of features alone never reaches scores.
    There is one for each module, and never two clients in it at once. It is entered several times in a visit: what a
    pass of a small model takes is much for it.
    """

    def __init__(self, module: ClientModule) -> None:
        self.forward = self.backward = 0
        self._parameters = module.binding.parameters
        self._client: Client
        self._cost: SampleCost | None = None
        self._before = 0
        hook = module.head.register_forward_hook(self._passed)
        self._hooks, self._place = module.head._forward_hooks, hook.id
        hook.remove()  # it hangs there only while it counts: a hook makes every pass of the classifier slower

    def of(self, client: Client, cost: SampleCost | None) -> Meter:
        """Within, count for `client`, whose samples cost `cost`."""
        self._client, self._cost = client, cost
        return self

    def __enter__(self) -> None:
        self.forward = self.backward = 0
        self._before = self._versions()
        self._hooks[self._place] = self._passed

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._hooks.pop(self._place, None)
        if kind is not None:
            return
        client, cost = self._client, self._cost
        if cost is None or (not self.backward and self._versions() != self._before):
            client.flops = math.nan  # unknown: steps were taken, and no way back was seen
        elif self.forward or self.backward:
            client.flops += round(cost.forward * self.forward + cost.backward * self.backward)

    def _versions(self) -> int:
        return sum([p._version for p in self._parameters])  # each write in place adds one

    def _passed(self, head: nn.Module, inputs: Any, out: Any) -> None:
        scores = out if isinstance(out, Tensor) else out[0]
        samples = len(scores)
        self.forward += samples
        passed = next((x for x in (*inputs, scores) if isinstance(x, Tensor) and x.requires_grad), None)
        if passed is not None:
            passed.register_hook(lambda _: self._returned(samples))

    def _returned(self, samples: int) -> None:
        self.backward += samples
