"""How a model lies in one flat vector: named blocks, their layers, and what is a classifier or a
normalisation.

A client's model is one vector of D numbers. The module of a rank is bound to a vector by pointing
its tensors into it, so that training writes the vector in place: loading and saving a client costs
no copy.
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
"""Found by type, never by name: ResNet's `downsample.1` is a BatchNorm, too."""

MOST_TABLES = 1000
"""Tables of bytes and of layers that are remembered: with top-k sparsification every payload has
its own."""

ALIGN = 16
"""Blocks start at multiples of 16 numbers (64 bytes), so that vectorised kernels meet aligned
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
    """It belongs to the classifier."""
    above: int
    """Layers above its own: 0 in the last."""

    @property
    def size(self) -> int:
        """Numbers in the block."""
        return self.stop - self.start

    @property
    def columns(self) -> slice:
        """Its columns of a vector."""
        return slice(self.start, self.stop)


_Entry = tuple[str, Tensor, Kind, int, bool]
"""A tensor that becomes a block: its name, kind and layer, and whether it is a normalisation's."""


@dataclass(frozen=True)
class Segment:
    """Columns `start` to `stop` of the vectors, all of layer `layer` (0 where layers are not told
    apart)."""

    start: int
    stop: int
    layer: int

    @property
    def width(self) -> int:
        """How many columns there are."""
        return self.stop - self.start

    @property
    def columns(self) -> slice:
        """Its columns of a vector."""
        return slice(self.start, self.stop)


class Layout:
    """The blocks of `model` in module order: all parameters, then all running statistics.

    A layer is a module that owns parameters and is no normalisation: 20 convolutions and one linear
    layer in ResNet-18. All other buffers (BatchNorm's counters, masks, indices) stay with the
    client, whatever their type: `own_names`. `head` is the dotted name of the classifier module.

    Frozen parameters are in no vector: all clients of a rank share them (`frozen`). So are the
    statistics of frozen normalisations (`still`), which normalise by them in training, too.
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
        """Names of the parameters, and then the buffers, that are the same for all clients of a
        rank."""
        self.still = _frozen_normalisations(model, frozen_ids)
        """Names of the normalisations that are frozen."""
        self.layers: list[str] = []
        self.own_names: list[str] = []
        """Names of the buffers that are in no vector: they stay with the client, and never
        travel."""
        entries = self._entries(model, frozen_ids)
        self.blocks: list[Block] = []
        self.size = 0
        self._place(entries, model)
        # masks recur from round to round
        self._segments: dict[tuple[bytes, bool], list[Segment]] = {}
        self._traffic: dict[tuple[bytes, bytes], tuple[np.ndarray, np.ndarray]] = {}

    def _entries(
        self,
        model: nn.Module,
        frozen_ids: set[int],
    ) -> list[_Entry]:
        """The tensors that become blocks, in the blocks' order; names layers and all other
        buffers."""
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
        """Make a block of each entry, one behind the other."""
        head = self.head
        named = model.named_parameters(remove_duplicate=False)
        head_ids = {id(p) for name, p in named if name.startswith(f"{head}.")}
        last = max(len(self.layers) - 1, 0)
        requirement = "it is complex: write it as two real parameters (torch.view_as_real)"
        for name, tensor, kind, layer, is_norm in entries:
            check("model", name, not tensor.is_complex(), requirement)
            # by its tensor, too: a tied weight has the name of another layer
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
    def numbers(self) -> np.ndarray:
        """Size of each block, in numbers (int64 [B])."""
        return np.array([b.size for b in self.blocks], dtype=np.int64)

    @cached_property
    def is_parameter(self) -> np.ndarray:
        """Which blocks are parameters (bool [B])."""
        return np.array([b.kind == "parameter" for b in self.blocks], dtype=bool)

    @cached_property
    def parameters(self) -> slice:
        """Columns up to the last parameter (and the gaps between them): parameters come first."""
        count = int(self.is_parameter.sum())
        if count == 0:
            return slice(0, 0)
        return slice(0, self.blocks[count - 1].stop)

    @cached_property
    def is_own(self) -> np.ndarray:
        """Which blocks (bool [B]) are weights and biases of a layer, without the normalisation that
        counts with it; a layer that is nothing but normalisation counts with that."""
        is_own = self.mask(lambda b: b.kind == "parameter" and not b.normalisation)
        only_normalisation = np.setdiff1d(self.layer_of, self.layer_of[is_own])
        return is_own | (self.is_parameter & np.isin(self.layer_of, only_normalisation))

    @cached_property
    def layer_of(self) -> np.ndarray:
        """Layer of each block (int64 [B])."""
        return np.array([b.layer for b in self.blocks], dtype=np.int64)

    def mask(self, holds: Callable[[Block], bool]) -> np.ndarray:
        """Bool [B]: the blocks for which `holds` returns True."""
        return np.array([holds(b) for b in self.blocks], dtype=bool)

    def segments(
        self,
        mask: np.ndarray,
        *,
        by_layer: bool = False,
    ) -> list[Segment]:
        """The columns of the blocks in `mask`, neighbours joined (with `by_layer` only within a
        layer)."""
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
        """Columns behind each block, up to the next one."""
        gaps = []
        stop = self.size
        for block in reversed(self.blocks):
            gaps.append(slice(block.stop, stop))
            stop = block.start
        return gaps[::-1]

    def clear_gaps(self, vector: Tensor) -> Tensor:
        """Set the numbers of `vector` (D,) between blocks to 0, as where blocks alone travel;
        returns it."""
        for gap in self.gaps:
            vector[gap] = 0
        return vector

    def squared_norms(self, vector: Tensor) -> Tensor:
        """Squared norm of the parameters of each layer in `vector` (D,): float64 (L,), on the
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
        """Bytes of the blocks in `sent` (bool [B]) by layer and kind, int64 (L + 1, `KINDS`), and
        the layers of which own parameters are in it, bool [L]; do not write to them.

        The first column is of parameters, the second of running statistics. The other columns and
        the last row are 0, for tensors beside the model.
        """
        key = (sent.tobytes(), block_bytes.tobytes())
        if key not in self._traffic:
            shape = len(self.layers) + 1, len(KINDS)
            # the first kind, or the second: buffers
            cells = self.layer_of * len(KINDS) + ~self.is_parameter
            # sums in float64: exact up to 2^53
            sums = np.bincount(cells[sent], block_bytes[sent], minlength=math.prod(shape))
            is_sent = np.zeros(len(self.layers), dtype=bool)
            is_sent[self.layer_of[sent & self.is_own]] = True
            if len(self._traffic) > MOST_TABLES:
                self._traffic.clear()
            self._traffic[key] = sums.astype(np.int64).reshape(shape), is_sent
        return self._traffic[key]

    def read(
        self, model: nn.Module, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, list[Tensor]]:
        """The model's blocks as a new vector (D,), and its other buffers, on the CPU."""
        tensors = tensors_of(model)
        vector = torch.zeros(self.size, dtype=dtype)
        for block in self.blocks:
            flat = tensors[block.name].detach().reshape(-1)
            vector[block.columns] = flat.cpu()
        buffers = []
        for name in self.own_names:
            buffer = tensors[name].detach().cpu().clone()
            # as Fabric's precision does: with 32-true, a model's float64 stays so
            if dtype != torch.float32 and buffer.is_floating_point():
                buffer = buffer.to(dtype)
            buffers.append(buffer)
        return vector, buffers


def _frozen_normalisations(model: nn.Module, frozen_ids: set[int]) -> list[str]:
    """Names of the normalisations none of whose weights train; of those without weights, the ones
    in a module that is frozen as a whole."""
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
    """Parameters and buffers of `model` by name."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


class Binding:
    """Points the tensors of one `model` into vectors of its `layout`."""

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
        """Weights with buffers that are computed anew for every vector that is bound."""
        self.vector = torch.empty(0)
        """The vector that is bound; empty: none is yet."""
        self.buffers: Sequence[Tensor] = ()
        """The other buffers that are bound, in the order of `own_names`."""

    def bind(self, vector: Tensor, buffers: Sequence[Tensor]) -> None:
        """From now on the model *is* `vector` (D,) and `buffers`: training writes into them.

        Raises:
            BadInput: the model has assigned a buffer anew, which would belong to no client.
        """
        self.point(vector, buffers)
        self._fit()

    def point(self, vector: Tensor, buffers: Sequence[Tensor]) -> None:
        """As `bind`, without computing spectral norms' u, v anew: the buffers belong to the
        vector."""
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
        """As `bind`; tensors that are bound already are not bound again."""
        if self.vector is vector and self.buffers is buffers:
            self._check_buffers()
            self._fit()
        else:
            self.bind(vector, buffers)

    def _fit(self) -> None:
        for weight in self.spectral:
            weight.fit()

    def _check_buffers(self) -> None:
        for buffers, leaf, tensor, name in self._buffers:
            if buffers.get(leaf) is not tensor:
                requirement = (
                    "this buffer is assigned anew or removed: write into it (copy_, mul_), or it "
                    "is no client's"
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
