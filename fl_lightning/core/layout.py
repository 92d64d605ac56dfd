"""Lays a model out in one flat vector: named blocks, their layers, the classifier, normalisations.

A client's model is one vector of D numbers. Binding the module of a rank to a vector makes the
module's tensors views of it, so that training writes to the vector in place: loading and saving a
client needs no copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fl_lightning.configuration.config import check
from fl_lightning.core.buffers import spectral_weights
from fl_lightning.foundation.errors import BadInput
from fl_lightning.results.record import KINDS

Kind = Literal["parameter", "buffer"]

NORMALISATION = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Types of normalisations; names do not tell: ResNet's `downsample.1` is a BatchNorm, too."""

MOST_TABLES = 1000
"""Largest number of tables of bytes that are cached; with top-k sparsification every payload has
another one."""

ALIGN = 16
"""Blocks start at multiples of 16 numbers (64 bytes): vectorised kernels are faster on aligned
memory."""


@dataclass(frozen=True)
class Block:
    """One tensor of the model inside the vector: numbers `start` to `stop`."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]
    kind: Kind
    layer: int
    """Index of its layer; a normalisation's tensors count with the layer before it."""
    normalisation: bool
    head: bool
    """Whether it belongs to the classifier."""
    above: int
    """Number of layers after its own: 0 in the last."""

    @property
    def size(self) -> int:
        """Number of entries of the tensor."""
        return self.stop - self.start

    @property
    def columns(self) -> slice:
        """The block's columns of a vector."""
        return slice(self.start, self.stop)


_Entry = tuple[str, Tensor, Kind, int, bool]
"""A tensor that becomes a block: its name, kind and layer, and whether it is a normalisation's."""


@dataclass(frozen=True)
class Segment:
    """Columns `start` to `stop` of the vectors, all in layer `layer` (always 0 if layers are not
    distinguished)."""

    start: int
    stop: int
    layer: int

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.stop - self.start

    @property
    def columns(self) -> slice:
        """The segment's columns of a vector."""
        return slice(self.start, self.stop)


class Layout:
    """The blocks of `model` in module order: all parameters, then all running statistics.

    A layer is a module that owns parameters and is no normalisation: 20 convolutions and one linear
    layer in ResNet-18.

    Some tensors are in no vector. Buffers other than running statistics (BatchNorm's counters,
    masks, indices) stay with the client; `own_names` lists them. Frozen parameters, and the running
    statistics of frozen normalisations, are shared by all clients of a rank; `frozen` lists both.
    Frozen normalisations, listed in `still`, use their running statistics in training, too.

    Args:
        head: dotted name of the classifier module.
        frozen: parameters that never train.
    """

    def __init__(
        self,
        model: nn.Module,
        head: str,
        frozen: Collection[nn.Parameter] = (),
    ) -> None:
        self.head = head
        frozen_ids = {id(p) for p in frozen}
        self.frozen = [name for name, p in model.named_parameters() if id(p) in frozen_ids]
        """Names of the parameters and then of the buffers that all clients of a rank share."""
        self.still = _frozen_normalisations(model, frozen_ids)
        """Names of the normalisations that are frozen."""
        self.layers: list[str] = []
        self.own_names: list[str] = []
        """Names of the buffers that are in no vector: they stay with the client and are never
        sent."""
        entries = self._entries(model, frozen_ids)
        self.blocks: list[Block] = []
        self.size = 0
        self._place(entries, model)
        # caches: the same masks occur in every round
        self._segments: dict[tuple[bytes, bool], list[Segment]] = {}
        self._traffic: dict[tuple[bytes, bytes], tuple[np.ndarray, np.ndarray]] = {}

    def _entries(
        self,
        model: nn.Module,
        frozen_ids: set[int],
    ) -> list[_Entry]:
        """Return the tensors that become blocks, in their order; fills `layers`, `frozen` and
        `own_names`."""
        parameters: list[_Entry] = []
        statistics: list[_Entry] = []
        visited = set(frozen_ids)
        for prefix, module in model.named_modules():
            is_norm = isinstance(module, NORMALISATION)
            own_parameters = [
                (name, p)
                for name, p in module.named_parameters(prefix, recurse=False)
                if id(p) not in visited
            ]
            visited.update(id(p) for _, p in own_parameters)
            if own_parameters and not is_norm:
                self.layers.append(prefix or type(module).__name__)
            layer = max(len(self.layers) - 1, 0)
            for name, p in own_parameters:
                parameters.append((name, p, "parameter", layer, is_norm))
            for name, buffer in module.named_buffers(prefix, recurse=False):
                if id(buffer) in visited:  # shared by modules, such as a mask
                    continue
                visited.add(id(buffer))
                if prefix in self.still:
                    self.frozen.append(name)
                elif is_norm and buffer.is_floating_point():
                    statistics.append((name, buffer, "buffer", layer, is_norm))
                else:
                    self.own_names.append(name)
        return parameters + statistics

    def _place(
        self,
        entries: Sequence[_Entry],
        model: nn.Module,
    ) -> None:
        """Make a block of each entry, one after the other."""
        head = self.head
        named = model.named_parameters(remove_duplicate=False)
        head_ids = {id(p) for name, p in named if name.startswith(f"{head}.")}
        last = max(len(self.layers) - 1, 0)
        requirement = "it is complex: write it as two real parameters (torch.view_as_real)"
        for name, tensor, kind, layer, is_norm in entries:
            check("model", name, not tensor.is_complex(), requirement)
            # compare tensors, too: a tied weight has the name of another layer
            in_head = name == head or name.startswith(f"{head}.") or id(tensor) in head_ids
            start = self.size
            stop = start + tensor.numel()
            shape = tuple(tensor.shape)
            self.blocks.append(
                Block(
                    name,
                    start,
                    stop,
                    shape,
                    kind,
                    layer,
                    is_norm,
                    in_head,
                    last - layer,
                )
            )
            self.size = -(-stop // ALIGN) * ALIGN

    @cached_property
    def sizes(self) -> np.ndarray:
        """Number of entries of each block (int64 [B])."""
        return np.array([b.size for b in self.blocks], dtype=np.int64)

    @cached_property
    def is_parameter(self) -> np.ndarray:
        """Mask of the blocks that are parameters (bool [B])."""
        return np.array([b.kind == "parameter" for b in self.blocks], dtype=bool)

    @cached_property
    def parameters(self) -> slice:
        """Columns of all parameters, including the gaps between them; parameters come first."""
        count = int(self.is_parameter.sum())
        if count == 0:
            return slice(0, 0)
        return slice(0, self.blocks[count - 1].stop)

    @cached_property
    def is_layer_weight(self) -> np.ndarray:
        """Mask, bool [B], of the blocks that are weights and biases of the layers themselves.

        A normalisation has the index of the layer before it, and the mask leaves its parameters
        out. Only if all parameters with a layer index are a normalisation's does the mask contain
        them.
        """
        is_weight = self.mask(lambda b: b.kind == "parameter" and not b.normalisation)
        only_normalisation = np.setdiff1d(self.layer_of, self.layer_of[is_weight])
        return is_weight | (self.is_parameter & np.isin(self.layer_of, only_normalisation))

    @cached_property
    def layer_of(self) -> np.ndarray:
        """Index of each block's layer (int64 [B])."""
        return np.array([b.layer for b in self.blocks], dtype=np.int64)

    def mask(self, holds: Callable[[Block], bool]) -> np.ndarray:
        """Return the mask, bool [B], of the blocks for which `holds` returns True."""
        return np.array([holds(b) for b in self.blocks], dtype=bool)

    def segments(
        self,
        mask: np.ndarray,
        *,
        by_layer: bool = False,
    ) -> list[Segment]:
        """Return the columns of the blocks in `mask`. Neighbouring blocks are joined to one
        segment, with `by_layer` only within a layer."""
        key = mask.tobytes(), by_layer
        if key in self._segments:
            return self._segments[key]
        segments: list[Segment] = []
        previous = -2
        for k in np.flatnonzero(mask).tolist():
            block = self.blocks[k]
            start = block.start
            layer = 0
            if by_layer:
                layer = block.layer
            if previous == k - 1 and segments[-1].layer == layer:
                start = segments.pop().start
            segments.append(Segment(start, block.stop, layer))
            previous = k
        self._segments[key] = segments
        return segments

    @cached_property
    def gaps(self) -> list[slice]:
        """Unused columns between each block and the next one, which starts at a multiple of
        `ALIGN`."""
        gaps = []
        stop = self.size
        for block in reversed(self.blocks):
            gaps.append(slice(block.stop, stop))
            stop = block.start
        return gaps[::-1]

    def clear_gaps(self, vector: Tensor) -> Tensor:
        """Set the unused columns of `vector` (D,) to 0, so that it equals a vector that was put
        together from sent blocks, bit for bit; returns it."""
        for gap in self.gaps:
            vector[gap] = 0
        return vector

    def squared_norms(self, vector: Tensor) -> Tensor:
        """Return the squared norm of each layer's parameters in `vector` (D,): float64 (L,), on the
        CPU."""
        norms = torch.zeros(len(self.layers), dtype=torch.float64)
        for segment in self.segments(self.is_parameter, by_layer=True):
            squares = vector[segment.columns].float().square()
            norms[segment.layer] += squares.sum().cpu()
        return norms

    def traffic(
        self,
        sent: np.ndarray,
        block_bytes: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Count the bytes of the sent blocks, and find out which layers are sent. Both arrays are
        cached: do not write to them.

        Args:
            sent: mask of the sent blocks, bool [B].
            block_bytes: bytes of each block, int64 [B].

        Returns:
            First, the bytes by layer and kind, int64 (L + 1, 4): parameters in the first column,
            running statistics in the second. The other columns and the last row are 0; they are for
            tensors outside of the model. Second, the mask of the layers whose weights
            (`is_layer_weight`) are sent, bool [L].
        """
        key = (sent.tobytes(), block_bytes.tobytes())
        if key not in self._traffic:
            shape = len(self.layers) + 1, len(KINDS)
            # the first kind, or the second: buffers
            cells = self.layer_of * len(KINDS) + ~self.is_parameter
            # sums in float64: exact up to 2^53
            sums = np.bincount(cells[sent], block_bytes[sent], minlength=math.prod(shape))
            is_sent = np.zeros(len(self.layers), dtype=bool)
            is_sent[self.layer_of[sent & self.is_layer_weight]] = True
            if len(self._traffic) > MOST_TABLES:
                self._traffic.clear()
            self._traffic[key] = sums.astype(np.int64).reshape(shape), is_sent
        return self._traffic[key]

    def read(
        self, model: nn.Module, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, list[Tensor]]:
        """Copy the model's blocks to a new vector (D,); returns it and copies of the other buffers,
        on the CPU."""
        tensors = tensors_of(model)
        vector = torch.zeros(self.size, dtype=dtype)
        for block in self.blocks:
            flat = tensors[block.name].detach().reshape(-1)
            vector[block.columns] = flat.cpu()
        buffers = []
        for name in self.own_names:
            buffer = tensors[name].detach().cpu().clone()
            # like Fabric's precision: 32-true leaves a model's float64 unchanged
            if dtype != torch.float32 and buffer.is_floating_point():
                buffer = buffer.to(dtype)
            buffers.append(buffer)
        return vector, buffers


def _frozen_normalisations(model: nn.Module, frozen_ids: set[int]) -> list[str]:
    """Return the names of the frozen normalisations: those whose parameters are all frozen, and
    those within a module whose parameters are all frozen."""
    frozen_modules = set()
    names = []
    for name, module in model.named_modules():
        ids = {id(p) for p in module.parameters()}
        parent = name.rpartition(".")[0]
        in_frozen = name != "" and parent in frozen_modules
        if in_frozen or (ids and ids <= frozen_ids):
            frozen_modules.add(name)
            if isinstance(module, NORMALISATION):
                names.append(name)
    return names


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of `model` by name."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


class Binding:
    """Makes the tensors of one `model` views of vectors with its `layout`."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        tensors = tensors_of(model)
        self.layout = layout
        self._targets = [(tensors[b.name], b.shape) for b in layout.blocks]
        self._sizes: list[int] = []
        for block, gap in zip(layout.blocks, layout.gaps, strict=True):
            self._sizes += [block.size, gap.stop - gap.start]
        self._own = [tensors[name] for name in layout.own_names]
        statistics = [b.name for b in layout.blocks if b.kind == "buffer"]
        self._buffers = []
        for name in statistics + layout.own_names:
            owner, _, leaf = name.rpartition(".")
            module = model.get_submodule(owner)
            self._buffers.append((module._buffers, leaf, tensors[name], name))
        self.parameters = [t for t, _ in self._targets if isinstance(t, nn.Parameter)]
        self.spectral = spectral_weights(model)
        """Weights whose singular vectors are computed anew for every vector that is bound."""
        self.vector = torch.empty(0)
        """The bound vector; empty before the first binding."""
        self.buffers: Sequence[Tensor] = ()
        """The other bound buffers, in the order of `own_names`."""

    def bind(self, vector: Tensor, buffers: Sequence[Tensor]) -> None:
        """Make the model use the memory of `vector` (D,) and `buffers`, so that training writes to
        them, and recompute the singular vectors of spectral normalisation in `buffers`.

        Raises:
            BadInput: the model has assigned a buffer anew, which would belong to no client.
        """
        self.point(vector, buffers)
        self._update_spectral()

    def point(self, vector: Tensor, buffers: Sequence[Tensor]) -> None:
        """Make the model use the memory of `vector` (D,) and `buffers`, as `bind` does, but do not
        recompute the singular vectors of spectral normalisation: those in `buffers` must belong to
        this vector already."""
        self._check_buffers()
        blocks = vector.split_with_sizes(self._sizes)[::2]  # every other piece is a gap
        for (tensor, shape), block in zip(self._targets, blocks, strict=True):
            tensor.data = block.view(shape)
        for tensor, buffer in zip(self._own, buffers, strict=True):
            tensor.data = buffer
        self.vector = vector
        self.buffers = buffers

    def rebind(
        self,
        vector: Tensor,
        buffers: Sequence[Tensor],
    ) -> None:
        """Do the same as `bind`. If the model is bound to these tensors already, this is faster: it
        only recomputes the singular vectors of spectral normalisation."""
        if self.vector is vector and self.buffers is buffers:
            self._check_buffers()
            self._update_spectral()
        else:
            self.bind(vector, buffers)

    def _update_spectral(self) -> None:
        for weight in self.spectral:
            weight.update_vectors()

    def _check_buffers(self) -> None:
        for buffers, leaf, tensor, name in self._buffers:
            if buffers.get(leaf) is not tensor:
                requirement = (
                    "the model assigns this buffer anew or removes it: write into it instead "
                    "(copy_, mul_)"
                )
                raise BadInput("model", name, requirement)


def copy_columns(
    into: Tensor,
    source: Tensor,
    segments: Iterable[Segment],
) -> None:
    """Copy the columns of `segments` from vector `source` into vector `into`."""
    for segment in segments:
        columns = segment.columns
        into[columns].copy_(source[columns])
