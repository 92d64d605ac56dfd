"""Buffers that belong to weights, and modules whose buffers nobody could average
(docs/own-model-and-data.md)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import normalize
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

from fl_lightning.foundation.errors import BadInput

MOST_STEPS = 300
"""Power iterations. Ours: where two singular values are so close that these do not tell them apart,
either will do."""
ENOUGH = 1e-6
"""How little a further iteration must change a singular value, relatively. Ours: ten times
float32's rounding."""

SMALL = 512
"""Rows of a matrix of which many iterations are taken at once. Ours: one product then takes no
longer than they do."""
SQUARED = 5
"""How often that doubles them: 32 at once."""


def check_modules(model: nn.Module) -> None:
    """Raise `BadInput` where a module's buffers can be neither averaged, nor recomputed, nor left
    with a client."""
    quantization = sys.modules.get("torch.ao.quantization")
    observers: tuple[type, ...] = ()
    if quantization is not None:
        observers = (quantization.ObserverBase, quantization.FakeQuantizeBase)
    for name, module in model.named_modules():
        kind = type(module).__name__
        tensors = module._parameters | module._buffers
        lazy = next((key for key, tensor in tensors.items() if is_lazy(tensor)), None)
        reason = None
        if isinstance(module, nn.SyncBatchNorm):
            reason = (
                "would mix batches of clients in different processes: use BatchNorm2d or the like"
            )
        elif isinstance(module, observers):
            reason = (
                "keeps ranges of what it has seen, which are in no average: quantise the exported "
                "model"
            )
        elif lazy is not None:
            reason = (
                f"has no {lazy} until it is called, and the model's forward pass does not call it"
            )
        if reason is not None:
            raise BadInput("model", name, f"{kind} {reason}")


@dataclass(frozen=True)
class SpectralWeight:
    """A weight that is divided by its greatest singular value, with the singular vectors u, v.

    u, v follow from the weight alone: they are computed anew for each weight that is bound, and
    never averaged. They do not depend on their last values, and so not on how often they were
    computed.
    """

    matrix: Callable[[], Tensor]
    u: Tensor
    v: Tensor
    renewed: Callable[[], None]
    """Computes anew whatever else was computed from an earlier weight."""

    @torch.no_grad()
    def fit(self) -> None:
        """Write the current weight's singular vectors to u, v: by power iterations from a fixed
        vector."""
        matrix = self.matrix().detach()
        if isinstance(matrix, FakeTensor) or not matrix.isfinite().all() or not matrix.any():
            return
        matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
        tall = matrix.shape[0] > matrix.shape[1]
        left, right = singular_vectors(matrix.T if tall else matrix)
        self.u.copy_(right if tall else left)
        self.v.copy_(left if tall else right)
        self.renewed()


def singular_vectors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Left and right singular vector of the greatest singular value of `matrix` (rows, columns),
    which has no more rows than columns."""
    rows = len(matrix)
    power: Tensor | None = None
    if rows <= SMALL:
        power = normalize((matrix @ matrix.T).flatten(), dim=0).view(rows, rows)
        for _ in range(SQUARED):
            power = normalize((power @ power).flatten(), dim=0).view(rows, rows)
    first = torch.randn(rows, generator=torch.Generator().manual_seed(0))
    left = normalize(first.to(matrix), dim=0)
    before = 0.0
    for _ in range(MOST_STEPS):
        left = normalize(matrix @ (matrix.T @ left) if power is None else power @ left, dim=0)
        right = matrix.T @ left
        value = float(torch.linalg.vector_norm(right))
        if abs(value - before) <= ENOUGH * value:
            break
        before = value
    return left, normalize(right, dim=0)


def spectral_weights(model: nn.Module) -> list[SpectralWeight]:
    """Weights under one of torch's spectral normalisations: the parametrisation or the older
    hook."""
    weights = []
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                u, v = (getattr(module, f"{hook.name}_{letter}") for letter in "uv")
                matrix = partial(_hooked_matrix, module, hook)
                weights.append(SpectralWeight(matrix, u, v, partial(_renew, module, hook)))
        if isinstance(module, ParametrizationList):
            for place, part in enumerate(module):
                if isinstance(part, _SpectralNorm) and "_u" in part._buffers:
                    matrix = partial(_parametrised_matrix, module, place, part)
                    weights.append(SpectralWeight(matrix, part._u, part._v, _nothing))
    return weights


def _hooked_matrix(module: nn.Module, hook: SpectralNorm) -> Tensor:
    matrix: Tensor = hook.reshape_weight_to_matrix(getattr(module, f"{hook.name}_orig"))
    return matrix


def _renew(module: nn.Module, hook: SpectralNorm) -> None:
    """Replace the weight of the last pass: it is another model's, and cannot be copied with the
    module."""
    setattr(module, hook.name, hook.compute_weight(module, do_power_iteration=False))


def _parametrised_matrix(
    parts: ParametrizationList,
    place: int,
    norm: _SpectralNorm,
) -> Tensor:
    """The input, as a matrix, of the `norm` at a `place` in a chain of parametrisations."""
    if parts.is_tensor:
        originals = [parts.original]
    else:
        originals = [getattr(parts, f"original{k}") for k in range(parts.ntensors)]
    if place == 0:
        [weight] = originals
    else:
        weight = parts[0](*originals)
    for part in list(parts)[1:place]:
        weight = part(weight)
    return norm._reshape_weight_to_matrix(weight)


def _nothing() -> None:
    """Nothing else was computed from the weight."""
