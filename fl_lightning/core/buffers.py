"""Buffers that belong to weights, and modules whose buffers nobody could average
(docs/own-model-and-data.md)."""

from __future__ import annotations

import sys
from dataclasses import dataclass

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
        elif any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values()):
            reason = (
                "has torch's older spectral_norm: use torch.nn.utils.parametrizations.spectral_norm"
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
    """A weight that `norm`, one of its parametrisations `parts`, divides by its greatest singular
    value, with the singular vectors u, v.

    u, v follow from the weight alone: they are computed anew for each weight that is bound, and
    never averaged. They do not depend on their last values, and so not on how often they were
    computed.
    """

    parts: ParametrizationList
    norm: _SpectralNorm

    @property
    def vectors(self) -> tuple[Tensor, Tensor]:
        """The buffers u, v."""
        return self.norm._u, self.norm._v

    @torch.no_grad()
    def fit(self) -> None:
        """Write the current weight's singular vectors to u, v."""
        weights: list[Tensor] = []
        with self.norm.register_forward_pre_hook(lambda _, inputs: weights.append(inputs[0])):
            self.parts()
        matrix = self.norm._reshape_weight_to_matrix(weights[0])
        if isinstance(matrix, FakeTensor):
            return
        if not matrix.isfinite().all() or not matrix.any():
            return
        matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
        tall = matrix.shape[0] > matrix.shape[1]
        shorter, longer = singular_vectors(matrix.T if tall else matrix)
        u, v = self.vectors
        u.copy_(longer if tall else shorter)
        v.copy_(shorter if tall else longer)


def singular_vectors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Left and right singular vector of the greatest singular value of `matrix` (rows, columns),
    which has no more rows than columns."""
    with torch.autocast(matrix.device.type, enabled=False):  # a loss may bind another model
        products = (matrix @ matrix.T).cpu()  # not every device has eigenvectors
        u = torch.linalg.eigh(products).eigenvectors[:, -1].to(matrix)
        return u, normalize(matrix.T @ u, dim=0)


def spectral_weights(model: nn.Module) -> list[SpectralWeight]:
    """Weights under `torch.nn.utils.parametrizations.spectral_norm`."""
    weights = []
    for module in model.modules():
        if isinstance(module, ParametrizationList):
            norms = [part for part in module if isinstance(part, _SpectralNorm)]
            weights += [SpectralWeight(module, norm) for norm in norms if "_u" in norm._buffers]
    return weights
