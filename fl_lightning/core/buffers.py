"""Recomputes buffers that follow from weights, and refuses modules whose buffers cannot be averaged
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
    """Raise `BadInput` if the model has a module whose buffers can be neither averaged, nor
    recomputed, nor left with a client."""
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
                "would mix batches of clients in different processes: use an ordinary BatchNorm"
            )
        elif isinstance(module, observers):
            reason = (
                "records ranges of activations, which cannot be averaged: quantise the exported "
                "model"
            )
        elif any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values()):
            reason = (
                "uses torch's older spectral_norm: use "
                "torch.nn.utils.parametrizations.spectral_norm"
            )
        elif lazy:
            reason = (
                f"has no {lazy[0]} until it is called, and the model's forward pass does not call "
                "it: remove it, or call it"
            )
        if reason is not None:
            raise BadInput("model", name, f"{kind} {reason}")


@dataclass(frozen=True)
class SpectralWeight:
    """A weight under spectral normalisation, which divides it by its largest singular value.

    The singular vectors u, v are computed anew for each weight that is bound, and never averaged.
    They follow from the weight alone, not from their last values or the number of computations.
    """

    parts: ParametrizationList
    """All parametrisations of the weight."""
    norm: _SpectralNorm
    """The one of them that normalises."""

    @property
    def vectors(self) -> tuple[Tensor, Tensor]:
        """The buffers u, v."""
        return self.norm._u, self.norm._v

    @torch.no_grad()
    def update_vectors(self) -> None:
        """Compute the singular vectors of the current weight, and write them to u, v."""
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
    """Return the left and right singular vectors of the largest singular value of `matrix`, which
    has at most as many rows as columns."""
    # a loss may bind another model within autocast
    with torch.autocast(matrix.device.type, enabled=False):
        products = (matrix @ matrix.T).cpu()  # not every device computes eigenvectors
        u = torch.linalg.eigh(products).eigenvectors[:, -1].to(matrix)
        return u, normalize(matrix.T @ u, dim=0)


def spectral_weights(model: nn.Module) -> list[SpectralWeight]:
    """Return the weights under `torch.nn.utils.parametrizations.spectral_norm`."""
    weights = []
    for module in model.modules():
        if isinstance(module, ParametrizationList):
            norms = [part for part in module if isinstance(part, _SpectralNorm)]
            weights += [SpectralWeight(module, norm) for norm in norms if "_u" in norm._buffers]
    return weights
