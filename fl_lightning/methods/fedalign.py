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
    """FedAvg whose local loss draws the Lipschitz constant of a slimmed last block to the whole
    block's.

    Local loss: CE + mu (CE / L, held constant) L with L = MSE(k_slim, k), k the spectral norm of a
    b^T / (H W) of a block's input a and output b. The slim block is the block's first channels, on
    the first channels of its own input; neither that nor k, of the whole block, has a gradient.

    Args:
        mu: weight of the term, whose value is mu times CE; 0 is FedAvg. 0.45: paper.
        width: share of the channels that are left. 0.25: paper.
        block: dotted name of the block; null: the network's last own module before the classifier
            (ResNet: `layer4`).
    """

    traits = Traits(
        family="one global model",
        sample_use="has a loss of its own, and single samples are bounded in the task loss alone",
    )
    mu: NonNegativeFloat = searched(0.45, LogRange(0.05, 4), "a decade around the paper's")
    width: PositiveShare = 0.25
    block: str | None = None

    def check(self, run: RunContext) -> None:
        """Raise `BadInput` where a part of the block's channels cannot work without the rest."""
        if self.mu:
            for group in run.groups:
                self._try_block(run, group.module)

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Down the task loss and the term."""
        if not self.mu:
            return [Phase()]
        forward = _FLOPS.get(client.module.model)
        if forward is None:  # at a site of a deployment, where nothing has been checked
            forward = self._try_block(client.run, client.module)
        return [Phase(objective=Objective(loss=PureLoss(self.loss, flops=3 * forward)))]

    def loss(
        self,
        _: Tensors,
        module: Module,
        batch: Batch,
    ) -> Tensor:
        """The task loss and the term, shape ()."""
        name = self._block(module)
        block = module.model.get_submodule(name)
        with watched(block) as calls:
            task = module.task_loss(batch)
        gap = stretch_gap(block, *calls[-1], self.width, name)
        return task + self.mu * (task / gap.clamp_min(1e-30)).detach() * gap

    def _block(self, module: Module) -> str:
        return self.block or last_block(module.model, module.layout.head)

    def _try_block(self, run: RunContext, module: Module) -> float:
        """Note and return the term's operations for a sample; raises `BadInput` where the block
        will not do."""
        x = torch.zeros(2, *run.data.input_shape, device=run.device, dtype=run.dtype)
        _FLOPS[module.model] = check_block(module.model, self._block(module), x, self.width)
        return _FLOPS[module.model]


_FLOPS: WeakKeyDictionary[nn.Module, float] = WeakKeyDictionary()
"""Of the term, forward, for a sample: by the model of a run."""


def last_block(model: nn.Module, head: str) -> str:
    """Dotted name of the last of the network's own modules with parameters that is not, and does
    not hold, its `head`.

    Of lists of modules that is the last one in it.
    """
    last = ""
    for name, module in model.named_children():
        if any(True for _ in module.parameters()) and not f"{head}.".startswith(f"{name}."):
            last = f"{name}.{len(module) - 1}" if isinstance(module, nn.ModuleList) else name
    requirement = f"{type(model).__name__} has none before its classifier {head}"
    check("method.block", None, bool(last), requirement)
    return last


@torch.no_grad()
def check_block(
    model: nn.Module,
    name: str,
    x: Tensor,
    width: float,
) -> float:
    """Operations of `stretch_gap` for a sample, forward.

    Raises:
        BadInput: `model` does not call its block `name` on inputs like `x`, or a part of its
            channels will not do.
    """
    blocks = dict(model.named_modules())
    training = model.training
    check("method.block", name, name in blocks, "it must name a module of the model")
    with watched(blocks[name]) as calls, _ended_by(blocks[name]):
        model.eval()(x)
    model.train(training)
    check("method.block", name, bool(calls), "the model must call it")
    with FlopCounterMode(display=False) as counter:
        stretch_gap(blocks[name], *calls[-1], width, name)
    return float(counter.get_total_flops()) / len(x)


@contextlib.contextmanager
def watched(block: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Collect the inputs and outputs of `block` within, without a way back."""
    calls: list[tuple[Tensor, Tensor]] = []

    def note(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        calls.append((inputs[0].detach(), output.detach()))

    with block.register_forward_hook(note):
        yield calls


class _Reached(Exception):
    """The block has been called."""


@contextlib.contextmanager
def _ended_by(block: nn.Module) -> Iterator[None]:
    """Within, the first call of `block` ends the pass, which then does not count among a
    client's."""

    def end(*_: object) -> None:
        raise _Reached

    with block.register_forward_hook(end), contextlib.suppress(_Reached):
        yield


def stretch_gap(
    block: nn.Module,
    a: Tensor,
    b: Tensor,
    width: float,
    name: str = "",
) -> Tensor:
    """Mean squared difference, shape (), of `stretch` of the slimmed block, on its part of `a`, and
    of the whole."""
    if a.ndim != b.ndim:
        raise _unfit(name, f"it makes {b.ndim} axes of {a.ndim}")
    part = a[:, : kept(a.shape[1], width)]
    slim = stretch(part, slimmed(block, part, width, name))
    return mse_loss(slim, stretch(a, b))


def slimmed(
    block: nn.Module,
    x: Tensor,
    width: float,
    name: str = "",
) -> Tensor:
    """What `block` makes of `x`, the first channels of its input, with the first inputs and outputs
    of all its layers, a share `width` of them. Running statistics are left as they are.

    Raises:
        BadInput: it cannot be slimmed (groups of channels, flattening): `method.block` `name` is
            another kind of block.
    """

    def cut(tensor: Tensor) -> Tensor:
        for dim in range(min(tensor.ndim, 2)):
            tensor = tensor.narrow(dim, 0, kept(tensor.shape[dim], width))
        return tensor

    tensors = {name: cut(parameter) for name, parameter in block.named_parameters()}
    tensors |= {name: cut(buffer).clone() for name, buffer in block.named_buffers()}
    try:
        output: Tensor = functional_call(block, tensors, x)
    except RuntimeError as error:
        raise _unfit(name, str(error).splitlines()[0]) from error
    return output


def _unfit(name: str, why: str) -> BadInput:
    requirement = f"a block whose layers all take a part of their channels: {why}"
    return BadInput("method.block", name, requirement)


def kept(channels: int, width: float) -> int:
    """How many of the channels are left."""
    return math.ceil(width * channels)


def transmitting(a: Tensor, b: Tensor) -> Tensor:
    """T = a b^T / (H W) of each sample, (n, c, k), of a block's input `a` (n, c, ...) and output
    `b` (n, k, ...).

    Images of a larger input are pooled to the output's size.
    """
    if a.ndim == 4 and a.shape[2] > b.shape[2]:
        a = adaptive_avg_pool2d(a, (b.shape[2], b.shape[3]))
    inputs = a[..., None].flatten(2)
    outputs = b[..., None].flatten(2)
    return inputs @ outputs.mT / inputs.shape[2]


def stretch(a: Tensor, b: Tensor) -> Tensor:
    """Spectral norm (n,) of `transmitting`, by ten steps of power iteration on T T^T from ones."""
    # squares of products: half precision has no room for them
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
