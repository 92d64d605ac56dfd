"""FedAlign: Mendieta, Yang, Wang, Lee, Ding, Chen: Local Learning Matters: Rethinking Data
Heterogeneity in Federated Learning. CVPR 2022.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import adaptive_avg_pool2d, mse_loss
from torch.utils.flop_counter import FlopCounterMode

from fl_lightning.foundation.errors import BadInput
from fl_lightning.methods import (
    Batch,
    Client,
    LogRange,
    Method,
    Module,
    NonNegativeFloat,
    Objective,
    Payload,
    Phase,
    Phases,
    PositiveShare,
    PureLoss,
    RunContext,
    Tensors,
    Traits,
    check,
    searched,
)
from fl_lightning.methods.common.basics import wide


@dataclass(frozen=True)
class FedAlign(Method):
    """FedAvg whose local loss pulls the Lipschitz constant of a slimmed last block towards the
    whole block's.

    Local loss: CE + mu s L, with L = MSE(k_slim, k). The scale s = CE / L has no gradient, so the
    term's value is mu CE. k is the block's Lipschitz constant, estimated as the spectral norm of a
    b^T / (H W), for the block's input a and output b, images of H W pixels. k_slim is that of the
    slim block: the first channels of the block, on the first channels of its input. Neither that
    input nor k of the whole block has a gradient.

    Args:
        mu: weight of the term, whose value is mu times CE; 0 is FedAvg. 0.45: paper.
        width: share of the channels in the slim block. 0.25: paper.
        block: dotted name of the block; null: the last of the network's own modules before the
            classifier (ResNet: `layer4`).
    """

    traits = Traits(
        family="one global model",
        sample_use="adds terms of its own to the loss; DP-SGD bounds samples in the task loss only",
    )
    mu: NonNegativeFloat = searched(0.45, LogRange(0.05, 4), "a decade around the paper's")
    width: PositiveShare = 0.25
    block: str | None = None

    def check(self, run: RunContext) -> None:
        """Raise `BadInput` if the block cannot run on a part of its channels."""
        if self.mu:
            for group in run.groups:
                self._try_block(run, group.module)

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Return one phase that minimises the task loss plus the Lipschitz term."""
        if not self.mu:
            return [Phase()]
        forward = _FLOPS.get(client.module.model)
        if forward is None:  # at a site of a deployment, where `check` has not run
            forward = self._try_block(client.run, client.module)
        return [Phase(objective=Objective(loss=PureLoss(self.loss, flops=3 * forward)))]

    def loss(
        self,
        _: Tensors,
        module: Module,
        batch: Batch,
    ) -> Tensor:
        """Return the task loss plus the Lipschitz term, shape ()."""
        name = self._block(module)
        block = module.model.get_submodule(name)
        with recorded_calls(block) as calls:
            task = module.task_loss(batch)
        gap = stretch_gap(block, *calls[-1], self.width, name)
        return task + self.mu * (task / gap.clamp_min(1e-30)).detach() * gap

    def _block(self, module: Module) -> str:
        return self.block or last_block(module.model, module.layout.head)

    @torch.no_grad()
    def _try_block(self, run: RunContext, module: Module) -> float:
        """Run the block and its slim copy once; store and return the term's operations of a forward
        pass, for one sample.

        Raises:
            BadInput: the model has no such block or never calls it, or the block cannot be slimmed.
        """
        model = module.model
        name = self._block(module)
        blocks = dict(model.named_modules())
        check(
            "method.block",
            name,
            name in blocks,
            "the model has no such module; give a dotted name of one",
        )
        block = blocks[name]
        x = torch.zeros(2, *run.data.input_shape, device=run.device, dtype=run.dtype)
        training = model.training
        with recorded_calls(block) as calls, _ended_by(block):
            model.eval()(x)
        model.train(training)
        check(
            "method.block",
            name,
            bool(calls),
            "the model never calls this module; name one that it calls",
        )
        with FlopCounterMode(display=False) as counter:
            stretch_gap(block, *calls[-1], self.width, name)
        flops = float(counter.get_total_flops()) / len(x)
        _FLOPS[model] = flops
        return flops


_FLOPS: WeakKeyDictionary[nn.Module, float] = WeakKeyDictionary()
"""Operations of the term's forward pass for one sample, by model."""


def last_block(model: nn.Module, head: str) -> str:
    """Return the dotted name of the last child of the network that has parameters and does not
    contain its `head`; if that child is a ModuleList, of the list's last module."""
    last = ""
    for name, module in model.named_children():
        if any(True for _ in module.parameters()) and not f"{head}.".startswith(f"{name}."):
            last = f"{name}.{len(module) - 1}" if isinstance(module, nn.ModuleList) else name
    check(
        "method.block",
        None,
        bool(last),
        f"{type(model).__name__} has no block before its classifier {head}; use another model",
    )
    return last


@contextlib.contextmanager
def recorded_calls(block: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Record the inputs and outputs of `block`, detached; the yielded list grows with each call
    within the `with` block."""
    calls: list[tuple[Tensor, Tensor]] = []

    def record(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        calls.append((inputs[0].detach(), output.detach()))

    with block.register_forward_hook(record):
        yield calls


class _Reached(Exception):
    """Raised at the block's call, to end the forward pass."""


@contextlib.contextmanager
def _ended_by(block: nn.Module) -> Iterator[None]:
    """End a forward pass at the first call of `block` within the `with` block; the pass is then not
    counted among the client's."""

    def end(*_: object) -> None:
        raise _Reached

    with block.register_forward_hook(end), contextlib.suppress(_Reached):
        yield


def stretch_gap(
    block: nn.Module,
    a: Tensor,
    b: Tensor,
    width: float,
    name: str,
) -> Tensor:
    """Return L, the mean squared difference between the Lipschitz constants (`stretch`) of the slim
    block and of the whole block, shape ().

    Args:
        block: the whole block.
        a: its input (n, c, ...).
        b: its output (n, k, ...).
        width: share of the channels in the slim block, which takes the first channels of `a`.
        name: the block's dotted name, for messages.
    """
    if a.ndim != b.ndim:
        raise _unfit(name, f"it makes {b.ndim} axes of {a.ndim}")
    part = a[:, : slim_channels(a.shape[1], width)]
    slim = stretch(part, slimmed(block, part, width, name))
    return mse_loss(slim, stretch(a, b))


def slimmed(
    block: nn.Module,
    x: Tensor,
    width: float,
    name: str = "",
) -> Tensor:
    """Run `block` with the first inputs and outputs of all its layers, a share `width` of them, on
    `x`, the first channels of its input. Running statistics are not updated.

    Raises:
        BadInput: the block cannot be slimmed, as it groups channels or flattens; the message has
            its dotted `name`.
    """

    def cut(tensor: Tensor) -> Tensor:
        for dim in range(min(tensor.ndim, 2)):
            tensor = tensor.narrow(dim, 0, slim_channels(tensor.shape[dim], width))
        return tensor

    tensors = {name: cut(parameter) for name, parameter in block.named_parameters()}
    tensors |= {name: cut(buffer).clone() for name, buffer in block.named_buffers()}
    try:
        output: Tensor = functional_call(block, tensors, x)
    except RuntimeError as error:
        raise _unfit(name, str(error).splitlines()[0]) from error
    return output


def _unfit(name: str, why: str) -> BadInput:
    return BadInput(
        "method.block",
        name,
        f"it cannot run on a part of its channels ({why}); name another block",
    )


def slim_channels(channels: int, width: float) -> int:
    """Return the number of channels in the slim block."""
    return math.ceil(width * channels)


def transmitting(a: Tensor, b: Tensor) -> Tensor:
    """Return the transmitting matrix T = a b^T / (H W) of each sample, (n, c, k), for a block's
    input and output with H W pixels.

    An input image that is larger than the output is pooled to the output's size.

    Args:
        a: input (n, c, ...).
        b: output (n, k, ...).
    """
    if a.ndim == 4 and a.shape[2] > b.shape[2]:
        a = adaptive_avg_pool2d(a, (b.shape[2], b.shape[3]))
    inputs = a[..., None].flatten(2)
    outputs = b[..., None].flatten(2)
    return inputs @ outputs.mT / inputs.shape[2]


def stretch(a: Tensor, b: Tensor) -> Tensor:
    """Return a block's estimated Lipschitz constant for each sample, (n,): the spectral norm of the
    matrix T of `transmitting`, by ten steps of power iteration on T T^T from a vector of ones.

    Args:
        a: the block's input (n, c, ...).
        b: its output (n, k, ...).
    """
    # squares of products overflow in half precision
    with torch.autocast(a.device.type, enabled=False):
        T = transmitting(wide(a), wide(b))
        K = T @ T.mT
        v = torch.ones_like(K[:, :, :1])
        for _ in range(10):
            m = K @ v
            norm = torch.linalg.vector_norm(m, dim=1, keepdim=True)
            norm = norm.clamp_min(torch.finfo(T.dtype).tiny)
            v = m / norm
        return torch.sqrt(norm[:, 0, 0])
