"""How a model lies in one flat vector: named blocks, their layers, and what is a classifier or a
normalisation.

A client's model is one vector of D numbers. The module of a rank is bound to a vector by pointing
its tensors into it, so that training writes the vector in place: loading and saving a client costs
no copy.
"""

from __future__ import annotations

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

NORMALISATION = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Found by type, never by name: ResNet's `downsample.1` is a BatchNorm too (the cards' section
0)."""

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
    kind: Literal["parameter", "buffer"]
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

    The parameters `frozen` are nobody's: they lie once on every rank and in no vector (`frozen`),
    and so do the buffers of the normalisations that are frozen (`still`), in training those of
    evaluation: their statistics stay.
    """

    def __init__(self, model: nn.Module, head: str, frozen: Collection[nn.Parameter] = ()) -> None:
        self.head = head
        ids = {id(p) for p in frozen}
        self.frozen = [name for name, p in model.named_parameters() if id(p) in ids]
        """Names of the parameters, and then the buffers, that are the same for all clients of a
        rank."""
        self.still = _still(model, ids)
        """Names of the normalisations that are frozen."""
        self.layers: list[str] = []
        places: list[tuple[str, Tensor, Literal["parameter", "buffer"], int, bool]] = []
        buffers = places[:]
        self.own_names: list[str] = []
        seen = set(ids)
        for prefix, module in model.named_modules():
            own = [
                (n, p)
                for n, p in module.named_parameters(prefix, recurse=False)
                if id(p) not in seen
            ]
            seen.update(id(p) for _, p in own)
            is_norm = isinstance(module, NORMALISATION)
            if own and not is_norm:
                self.layers.append(prefix or type(module).__name__)
            layer = max(len(self.layers) - 1, 0)
            places += [(n, p, "parameter", layer, is_norm) for n, p in own]
            for name, buffer in module.named_buffers(prefix, recurse=False):
                if id(buffer) in seen:  # shared by modules, such as a mask
                    continue
                seen.add(id(buffer))
                if prefix in self.still:
                    self.frozen.append(name)
                elif is_norm and buffer.is_floating_point():
                    buffers.append((name, buffer, "buffer", layer, is_norm))
                else:
                    self.own_names.append(name)
        self.blocks: list[Block] = []
        end = 0
        of_head = {
            id(p)
            for name, module in model.named_modules()
            if name == head != ""
            for p in module.parameters()
        }
        for name, tensor, kind, layer, is_norm in places + buffers:
            real = not tensor.is_complex()
            check(
                "model",
                name,
                real,
                "it is complex: write it as two real parameters (torch.view_as_real)",
            )
            # its weight may be tied
            in_head = name == head or name.startswith(f"{head}.") or id(tensor) in of_head
            stop = end + tensor.numel()
            above = max(len(self.layers) - 1, 0) - layer
            self.blocks.append(
                Block(name, end, stop, tuple(tensor.shape), kind, layer, is_norm, in_head, above)
            )
            end = -(-stop // ALIGN) * ALIGN
        self.size = end
        # masks recur from round to round
        self._segments: dict[tuple[bytes, bool], list[Segment]] = {}
        self._tables: dict[tuple[bytes, bytes, int], np.ndarray] = {}

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
        return slice(0, max((b.stop for b in self.blocks if b.kind == "parameter"), default=0))

    @cached_property
    def is_own(self) -> np.ndarray:
        """Which blocks are a layer's own parameters: not its normalisation, unless the layer is
        nothing else."""
        own = self.mask(lambda b: b.kind == "parameter" and not b.normalisation)
        bare = np.setdiff1d(self.layer_of, self.layer_of[own])
        return own | (self.is_parameter & np.isin(self.layer_of, bare))

    @cached_property
    def layer_of(self) -> np.ndarray:
        """Layer of each block (int64 [B])."""
        return np.array([b.layer for b in self.blocks], dtype=np.int64)

    def mask(self, holds: Callable[[Block], bool]) -> np.ndarray:
        """Bool [B]: the blocks for which `holds`."""
        return np.array([holds(b) for b in self.blocks], dtype=bool)

    def segments(self, mask: np.ndarray, *, by_layer: bool = False) -> list[Segment]:
        """The columns of the blocks in `mask`, neighbours joined (with `by_layer` only within a
        layer)."""
        known = self._segments.get((mask.tobytes(), by_layer))
        if known is not None:
            return known
        out: list[Segment] = []
        follows = -1  # the block that would continue the last segment
        for k, block in enumerate(self.blocks):
            if not mask[k]:
                continue
            layer = block.layer if by_layer else 0
            if out and follows == k and out[-1].layer == layer:
                out[-1] = Segment(out[-1].start, block.stop, layer)
            else:
                out.append(Segment(block.start, block.stop, layer))
            follows = k + 1
        self._segments[mask.tobytes(), by_layer] = out
        return out

    def clear_gaps(self, vector: Tensor) -> Tensor:
        """Set the numbers of `vector` (D,) between blocks to 0, as where blocks alone travel;
        returns it."""
        for block, end in zip(
            self.blocks, [*(b.start for b in self.blocks[1:]), self.size], strict=True
        ):
            vector[block.stop : end] = 0
        return vector

    def squared_norms(self, vector: Tensor) -> Tensor:
        """Squared norm of the parameters of each layer in `vector` (D,): float64 (L,), on the
        CPU."""
        norms = torch.zeros(len(self.layers), dtype=torch.float64)
        for s in self.segments(self.is_parameter, by_layer=True):
            norms[s.layer] += vector[s.start : s.stop].float().square().sum().cpu()
        return norms

    def bytes_by_layer(self, sent: np.ndarray, block_bytes: np.ndarray, kinds: int) -> np.ndarray:
        """`block_bytes` of the blocks in `sent` (bool [B]) by layer and kind, int64 (L + 1, kinds),
        the last row 0."""
        known = (sent.tobytes(), block_bytes.tobytes(), kinds)
        if known not in self._tables:
            shape = (len(self.layers) + 1, kinds)
            # the first kind, or the second: buffers
            cells = self.layer_of * kinds + ~self.is_parameter
            sums = np.bincount(cells[sent], block_bytes[sent], minlength=shape[0] * shape[1])
            # sums in float64: exact up to 2^53
            self._keep(known, sums.astype(np.int64).reshape(shape))
        return self._tables[known]

    def layers_in(self, sent: np.ndarray) -> np.ndarray:
        """The layers of which own parameters are in `sent` (bool [B]), bool [L]; not to be written
        to."""
        known = (sent.tobytes(), b"", 0)
        if known not in self._tables:
            in_layer = np.zeros(len(self.layers), dtype=bool)
            in_layer[self.layer_of[sent & self.is_own]] = True
            self._keep(known, in_layer)
        return self._tables[known]

    def _keep(self, name: tuple[bytes, bytes, int], table: np.ndarray) -> None:
        if len(self._tables) > MOST_TABLES:
            self._tables.clear()
        self._tables[name] = table

    def read(
        self, model: nn.Module, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, list[Tensor]]:
        """The model's blocks as a new vector (D,), and its other buffers, on the CPU."""
        tensors = _tensors(model)
        vector = torch.zeros(self.size, dtype=dtype)
        for b in self.blocks:
            vector[b.start : b.stop] = tensors[b.name].detach().reshape(-1).cpu()
        own = [tensors[n].detach().cpu().clone() for n in self.own_names]
        # as Fabric's precision does: with 32-true, a model's float64 stays so
        if dtype != torch.float32:
            own = [b.to(dtype) if b.is_floating_point() else b for b in own]
        return vector, own


def _still(model: nn.Module, frozen: Collection[int]) -> list[str]:
    """The normalisations none of whose weights train; of those without weights, the ones in a
    module that is frozen."""
    whole: set[str] = set()  # modules that are frozen with all that is in them
    for name, module in model.named_modules():
        ids = [id(p) for p in module.parameters()]
        if (ids and all(i in frozen for i in ids)) or (name and name.rpartition(".")[0] in whole):
            whole.add(name)
    return [
        name
        for name, module in model.named_modules()
        if name in whole and isinstance(module, NORMALISATION)
    ]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


class Binding:
    """Points the tensors of one `model` into vectors of its `layout`."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        tensors = _tensors(model)
        self.layout = layout
        self._targets = [(tensors[b.name], b.shape) for b in layout.blocks]
        ends = [*(b.start for b in layout.blocks[1:]), layout.size]
        self._sizes = [
            n for b, end in zip(layout.blocks, ends, strict=True) for n in (b.size, end - b.stop)
        ]
        self._own = [tensors[n] for n in layout.own_names]
        places = [b.name for b in layout.blocks if b.kind == "buffer"] + layout.own_names
        owned = [
            (model.get_submodule(n.rpartition(".")[0])._buffers, n.rpartition(".")[2])
            for n in places
        ]
        self._buffers = [(*own, tensors[n], n) for own, n in zip(owned, places, strict=True)]
        self.parameters = [t for t, _ in self._targets if isinstance(t, nn.Parameter)]
        self.spectral = spectral_weights(model)
        """Weights with buffers that are computed anew of every vector that is bound."""
        self.vector: Tensor | None = None
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
        """As `bind`, where the buffers belong to the vector already."""
        self._check_buffers()
        blocks = vector.split_with_sizes(self._sizes)[::2]  # every other piece is a gap
        for (tensor, shape), block in zip(self._targets, blocks, strict=True):
            tensor.data = block.view(shape)
        for tensor, buffer in zip(self._own, buffers, strict=True):
            tensor.data = buffer
        self.vector, self.buffers = vector, buffers

    def rebind(self, vector: Tensor, buffers: Sequence[Tensor]) -> None:
        """As `bind`; nothing is done where just these are bound already."""
        if self.vector is not vector or self.buffers is not buffers:
            self.bind(vector, buffers)
        else:
            self._check_buffers()
            self._fit()

    def _fit(self) -> None:
        for weight in self.spectral:
            weight.fit()

    def _check_buffers(self) -> None:
        for buffers, leaf, tensor, name in self._buffers:
            if buffers.get(leaf) is not tensor:
                allowed = (
                    "this buffer is assigned anew or removed: write into it (copy_, mul_), or it "
                    "is no client's"
                )
                raise BadInput("model", name, allowed)


def copy_columns(into: Tensor, source: Tensor, segments: Iterable[Segment]) -> None:
    """Copy the columns of `segments` from vector `source` into vector `into`."""
    for s in segments:
        into[s.columns].copy_(source[s.columns])
