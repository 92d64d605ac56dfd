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
        lazy = [key for key, tensor in tensors.items() if is_lazy(tensor)]
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
        elif lazy:
            reason = (
                f"has no {lazy[0]} until it is called, and the model's forward pass does not call "
                "it"
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
        """Write the current weight's singular vectors to u, v."""
        matrix = self.matrix().detach()
        if isinstance(matrix, FakeTensor):
            return
        if not matrix.isfinite().all() or not matrix.any():
            return
        matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
        tall = matrix.shape[0] > matrix.shape[1]
        u, v = singular_vectors(matrix.T if tall else matrix)
        self.u.copy_(v if tall else u)
        self.v.copy_(u if tall else v)
        self.renewed()


def singular_vectors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Left and right singular vector of the greatest singular value of `matrix` (rows, columns),
    which has no more rows than columns."""
    with torch.autocast(matrix.device.type, enabled=False):  # a loss may bind another model
        u = torch.linalg.eigh(matrix @ matrix.T).eigenvectors[:, -1]
        return u, normalize(matrix.T @ u, dim=0)


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
            for part in module:
                if isinstance(part, _SpectralNorm) and "_u" in part._buffers:
                    matrix = partial(_parametrised_matrix, module, part)
                    weights.append(SpectralWeight(matrix, part._u, part._v, lambda: None))
    return weights


def _hooked_matrix(module: nn.Module, hook: SpectralNorm) -> Tensor:
    matrix: Tensor = hook.reshape_weight_to_matrix(getattr(module, f"{hook.name}_orig"))
    return matrix


def _renew(module: nn.Module, hook: SpectralNorm) -> None:
    """Replace the weight of the last pass: it is another model's, and cannot be copied with the
    module."""
    setattr(module, hook.name, hook.compute_weight(module, do_power_iteration=False))


def _parametrised_matrix(parts: ParametrizationList, norm: _SpectralNorm) -> Tensor:
    """The input, as a matrix, of the `norm` in a chain of parametrisations."""
    weights: list[Tensor] = []
    with norm.register_forward_pre_hook(lambda _, inputs: weights.append(inputs[0])):
        parts()
    return norm._reshape_weight_to_matrix(weights[0])
