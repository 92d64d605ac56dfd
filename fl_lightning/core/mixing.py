"""The server's one kernel: what client i receives of a layer is the sum over j of R[i, layer, j]
times j's layer.

Vectors lie on their clients' home ranks. The columns are cut into fixed tiles; a rank collects a
tile of all sources (all-to-all; several, where they are small), mixes it and sends it back. So no
rank ever holds all models, the extra memory is that of a tile or `EXCHANGE`, and the sums run in
client order whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.core.layout import Segment
from fl_lightning.foundation.device import wide
from fl_lightning.foundation.parallel import Group

TILE = 1 << 15
"""Columns in a tile. 10 to 100 rows of it stay in cache; results depend on it (in the last bits),
so it is fixed."""

EXCHANGE = 1 << 22
"""Numbers of the sources that a rank collects at a time at most, unless a tile has more. In each
exchange ranks wait for each other, and small ones take as long as large ones: between two processes
of a machine 1 ms for 0.1 to 2 MB (measured). 16 MB: ten MNIST CNNs come in one."""

PAD = 48
"""Numbers between the rows of a tile. Rows at a distance of 2^17 bytes would meet in the same
places of the caches: the products of 100 models took twice as long (measured)."""


def _less_own(A: Tensor, index: Tensor) -> Tensor:
    """A - I: each row of `A` (..., m, n) less one at its receiver's place, in float64."""
    own = torch.nn.functional.one_hot(index, A.shape[-1])
    return A.to(torch.float64) - own


def mean_of(W: Tensor, p: Tensor) -> Tensor:
    """One model for everybody, w_0 + sum_j p_j (w_j - w_0), shape (columns,); equal models stay
    equal bit for bit."""
    return torch.addmm(W[:1], p.to(W.dtype)[None], W - W[0])[0]


@dataclass(frozen=True)
class Gram:
    """Inner products of the sources' layers, W_l W_l^T, kept as the centred part and what was taken
    out.

    In float32 the plain product is destroyed by cancellation once clients are alike; centred, it is
    not. All float64.
    """

    centred: Tensor
    """C[l] = (W_l - mean)(W_l - mean)^T, (L, n, n)."""
    offset: Tensor
    """a[l, j] = <w_j - mean, mean>, (L, n)."""
    mean_square: Tensor
    """||mean||^2, (L,)."""

    @property
    def full(self) -> Tensor:
        """W_l W_l^T, (L, n, n)."""
        a = self.offset
        return self.centred + a[:, :, None] + a[:, None, :] + self.mean_square[:, None, None]

    @property
    def distances(self) -> Tensor:
        """Squared distances ||w_i - w_j||^2 by layer, (L, n, n), never negative."""
        d = self.centred.diagonal(dim1=1, dim2=2)
        return (d[:, :, None] + d[:, None, :] - 2 * self.centred).clamp_min(0.0)

    def among(self, index: Tensor) -> Gram:
        """The same of the sources at `index` (k,) alone, centred about their own mean."""
        C = self.centred[:, index][:, :, index]
        a = self.offset[:, index]
        # <w_j - mean, d> and <d, mean>, d: how far their mean lies from the old
        to_mean = C.mean(2)
        shift = a.mean(1)
        square = to_mean.mean(1)
        centred = C - to_mean[:, :, None] - to_mean[:, None, :] + square[:, None, None]
        return Gram(
            centred, a + to_mean - (shift + square)[:, None], self.mean_square + 2 * shift + square
        )

    def total(self) -> Gram:
        """The same over all layers together, L = 1."""
        return Gram(
            self.centred.sum(0, True), self.offset.sum(0, True), self.mean_square.sum(0, True)
        )


class Mixer:
    """The kernel over the vectors of `sources`, spread over the ranks of `group`.

    Args:
        home: home rank by client.
        vectors: this rank's, by client; at least those of its sources.
        sources: clients whose models are mixed, in ascending order, the same on every rank.
        dtype: type of the vectors (a rank may have none).
    """

    def __init__(
        self,
        group: Group,
        home: Sequence[int],
        vectors: Mapping[int, Tensor],
        sources: Sequence[int],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.group = group
        self.home = home
        self.vectors = vectors
        self.dtype = dtype
        # half precision is too coarse to mix in
        self.work = torch.promote_types(dtype, torch.float32)
        self.sources = list(sources)
        self.places = {c: k for k, c in enumerate(self.sources)}
        self.by_rank = [[c for c in self.sources if home[c] == r] for r in range(group.size)]
        self.flops = 0
        """Operations so far, over all ranks: those of the matrix products, and of centring."""
        self.working_bytes = 0
        """The most work space at once on this rank."""

    def gram(self, segments: Sequence[Segment], layers: int) -> Gram:
        """Inner products by layer over `segments` (equal on every rank)."""
        n = len(self.sources)
        tiles = _tiles(segments)
        self.flops += (2 * n * n + 4 * n + 2) * _columns(segments)
        self._holds(n if self.group.size == 1 else 5 * n, tiles)
        pieces = []
        for _, collected in self._collected(tiles):
            for _, W in collected:
                mean = W.mean(0)
                D = W.sub_(mean)
                pieces.append(torch.cat([(D @ D.T).flatten(), D @ mean, mean.dot(mean)[None]]))
        width = n * n + n + 1
        here = (
            torch.stack(pieces)
            if pieces
            else torch.zeros(0, width, dtype=self.work, device=self.group.device)
        )
        # MPS has no 64 bits, and is alone
        here = (here.cpu() if self.group.size == 1 else here).double()
        total = self._by_layer(tiles, here, layers).cpu()
        return Gram(total[:, : n * n].view(layers, n, n), total[:, n * n : -1], total[:, -1])

    def _by_layer(self, tiles: list[Segment], here: Tensor, layers: int) -> Tensor:
        """Sums by layer (layers, width), on every rank, of what the ranks have `here` for their
        tiles (tiles, width).

        A layer's tiles are added up on one rank, in their order: the same bits on any number of
        ranks.
        """
        size = self.group.size
        rank = self.group.rank
        total = here.new_zeros(layers, here.shape[1])
        to_add = list(enumerate(tiles))
        if size > 1:
            of_rank = [list(enumerate(tiles))[r::size] for r in range(size)]
            send = [
                [k for k, (_, tile) in enumerate(of_rank[rank]) if tile.layer % size == r]
                for r in range(size)
            ]
            came = [
                [(k, tile) for k, tile in mine if tile.layer % size == rank] for mine in of_rank
            ]
            flat = self.group.all_to_all(
                [here.new_empty(0), *(here[k] for ks in send for k in ks)],
                [len(ks) * here.shape[1] for ks in send],
                [len(theirs) * here.shape[1] for theirs in came],
            )
            to_add = [entry for theirs in came for entry in theirs]
            here = torch.cat(flat).view(-1, here.shape[1])
        for (_, tile), sums in sorted(
            zip(to_add, here, strict=True), key=lambda entry: entry[0][0]
        ):
            total[tile.layer] += sums
        return self.group.all_reduce(total)

    def mix(
        self,
        segments: Sequence[Segment],
        A: Tensor,
        receivers: Sequence[int],
        into: Mapping[int, Tensor],
        sums_to_one: bool = True,
    ) -> None:
        """What each of `receivers` receives, written into the columns of `segments` of this rank's
        vectors `into`.

        Rows `A` are applied to the models W as differences: W_i + (A - I)(W - 1 w_0). Equal models
        stay equal bit for bit, and A = I gives W itself (A W does neither, and W + (A - I) W fails
        the first). Errors in the rows' sums do no harm.

        Args:
            segments: columns to mix; their `layer` picks the weights.
            A: weights (L, m, n), receivers by sources.
            receivers: clients (m of them), all among the sources.
            into: a vector for each receiver whose home is this rank.
            sums_to_one: what rows do; False: they may have any sum, and are applied as W_i + (A -
                I) W.
        """
        tiles = _tiles(segments)
        self.flops += (
            2 * len(self.sources) * len(receivers) + len(self.sources) + len(receivers)
        ) * _columns(segments)
        own = torch.tensor([self.places[c] for c in receivers])
        B = _less_own(A.cpu(), own).to(self.group.device, self.work)
        shift = int(sums_to_one)
        differences = self._room(len(self.sources))
        products = self._room(len(receivers))
        if self.group.size == 1:
            pairs = [(into[c], self.places[c]) for c in receivers]
            self._mix_alone(tiles, B, pairs, differences, products, shift)
            return
        places = own.to(self.group.device)
        mine = [k for k, c in enumerate(receivers) if c in into]
        by_rank = [
            [k for k, c in enumerate(receivers) if self.home[c] == r]
            for r in range(self.group.size)
        ]
        self._holds(4 * len(self.sources) + 3 * len(receivers), tiles)
        for stripe, collected in self._collected(tiles):
            outs = []
            for t, W in collected:
                D = torch.sub(W, W[0], alpha=shift, out=differences[:, : W.shape[1]])
                out = torch.mm(B[t.layer], D, out=products[:, : W.shape[1]])
                outs.append((W[places] + out).to(self.dtype))
            width = sum(out.shape[1] for out in outs)
            rank = self.group.rank
            shares = self._shared_out(stripe)
            # what stays here does not travel
            away = [(r, ks) for r, ks in enumerate(by_rank) if r != rank]
            parts = [out[k] for _, ks in away for out in outs for k in ks]
            back = self.group.all_to_all(
                [self._nothing(), *parts],
                [len(ks) * width * (r != rank) for r, ks in enumerate(by_rank)],
                [len(mine) * _columns(ts) * (r != rank) for r, ts in enumerate(shares)],
            )
            for (t, _), out in zip(collected, outs, strict=True):
                for k in mine:
                    into[receivers[k]][t.start : t.stop].copy_(out[k], non_blocking=True)
            for r, part in enumerate(back):
                if r == rank:
                    continue
                rows = [(t, k) for t in shares[r] for k in mine]
                pieces = part.split([t.width for t, _ in rows])
                for (t, k), row in zip(rows, pieces, strict=True):
                    into[receivers[k]][t.start : t.stop].copy_(row, non_blocking=True)

    def _mix_alone(
        self,
        tiles: list[Segment],
        B: Tensor,
        rows: list[tuple[Tensor, int]],
        differences: Tensor,
        products: Tensor,
        shift: int,
    ) -> None:
        """The same with one rank: from vectors to differences and from products to vectors, without
        a copy between."""
        self._holds(len(self.sources) + len(rows), tiles)
        device = self.group.device
        local = [self.vectors[c] for c in self.sources]
        for t in tiles:
            W = [row[t.start : t.stop].to(device, self.work, non_blocking=True) for row in local]
            D = differences[:, : t.width]
            for w, difference in zip(W, D.unbind(0), strict=True):
                torch.sub(w, W[0], alpha=shift, out=difference)
            out = torch.mm(B[t.layer], D, out=products[:, : t.width])
            for (row, k), change in zip(rows, out.unbind(0), strict=True):
                place = row[t.start : t.stop]
                if place.device == change.device and place.dtype == change.dtype:
                    torch.add(W[k], change, out=place)
                else:
                    place.copy_(W[k] + change, non_blocking=True)

    def mean(
        self,
        segments: Sequence[Segment],
        p: Tensor,
        into: Tensor,
        combine: Callable[[Tensor, Tensor], Tensor] = mean_of,
    ) -> None:
        """The one model that everybody receives, `p` (L, n) over the sources, written into `into`
        (D,) on every rank.

        `combine` makes one row of a tile of rows and their weights; operations are counted as those
        of the mean.
        """
        tiles = _tiles(segments)
        self.flops += (3 * len(self.sources) + 1) * _columns(segments)
        p = p.to(self.group.device, wide(self.group.device))
        self._holds((2 if self.group.size == 1 else 6) * len(self.sources), tiles)
        outs: list[Tensor] = []
        done: list[list[Segment]] = []
        for stripe, collected in self._collected(tiles):
            combined = [combine(W, p[t.layer]).to(self.dtype) for t, W in collected]
            if self.group.size == 1:
                for (t, _), out in zip(collected, combined, strict=True):
                    into[t.start : t.stop] = out
                continue
            outs = outs + combined
            done = [*done, stripe]
            if sum(map(_columns, done)) >= EXCHANGE or stripe[-1] is tiles[-1]:
                self._spread(done, outs, into)
                outs = []
                done = []

    def _spread(self, stripes: list[list[Segment]], outs: list[Tensor], into: Tensor) -> None:
        """Write what each rank has for its tiles of `stripes`, here `outs`, into `into` on every
        rank."""
        size = self.group.size
        shares = [[t for stripe in stripes for t in stripe[rank::size]] for rank in range(size)]
        parts = self.group.gather_parts(
            [self._nothing(), *outs], [_columns(theirs) for theirs in shares]
        )
        for theirs, came in zip(shares, parts, strict=True):
            for t, part in zip(theirs, came.split([t.width for t in theirs]), strict=True):
                into[t.start : t.stop] = part

    def _shared_out(self, stripe: list[Segment]) -> list[list[Segment]]:
        """The tiles of a stripe that each rank works on."""
        return [stripe[rank :: self.group.size] for rank in range(self.group.size)]

    def _holds(self, rows: int, tiles: list[Segment]) -> None:
        """`rows` rows of each of the tiles that are collected at a time are in use: rooms, what
        came, what is sent (the latter two twice, where ranks share memory).
        """
        rows *= tiles_at_once(len(self.sources), len(tiles), self.group.size)
        self.working_bytes = max(self.working_bytes, rows * TILE * self.work.itemsize)

    def _room(self, rows: int, dtype: torch.dtype | None = None) -> Tensor:
        """So many rows of a tile, (rows, TILE), not next to each other."""
        return torch.empty(rows, TILE + PAD, dtype=dtype or self.work, device=self.group.device)[
            :, :TILE
        ]

    def _nothing(self) -> Tensor:
        return torch.empty(0, dtype=self.dtype, device=self.group.device)

    def _collected(
        self, tiles: list[Segment]
    ) -> Iterator[tuple[list[Segment], list[tuple[Segment, Tensor]]]]:
        """Stripes of `tiles`, all of which the ranks work on at the same time, equally many on
        every rank.

        With each come this rank's tiles of it (there may be none) with the sources' columns (n,
        width), rows in source order. Their memory is used again for the next stripe, and may be
        written to.
        """
        size = self.group.size
        rank = self.group.rank
        device = self.group.device
        n = len(self.sources)
        local = [self.vectors[c] for c in self.by_rank[rank]]
        if size == 1:
            # One tile's memory serves them all: allocating anew fragments the heap at 30 clients
            # and more.
            tile = self._room(n, self.dtype)
            for t in tiles:
                W = tile[:, : t.width]
                torch._foreach_copy_(
                    list(W.unbind(0)), [row[t.start : t.stop] for row in local], non_blocking=True
                )
                yield [t], [(t, W.to(self.work))]
            return
        order = [self.places[c] for clients in self.by_rank for c in clients]
        at_once = tiles_at_once(n, len(tiles), size)
        rooms = [self._room(n, self.dtype) for _ in range(at_once)]
        for first in range(0, len(tiles), size * at_once):
            stripe = tiles[first : first + size * at_once]
            shares = self._shared_out(stripe)
            widths = [_columns(theirs) for theirs in shares]
            others = (t for r, theirs in enumerate(shares) if r != rank for t in theirs)
            parts = [
                row[t.start : t.stop].to(device, non_blocking=True) for t in others for row in local
            ]
            counts = [
                len(clients) * widths[rank] * (r != rank) for r, clients in enumerate(self.by_rank)
            ]
            came = self.group.all_to_all(
                [self._nothing(), *parts],
                [len(local) * width * (r != rank) for r, width in enumerate(widths)],
                counts,
            )
            collected = []
            at = 0
            for t, room in zip(shares[rank], rooms, strict=False):
                width = t.width
                W = room[:, :width]
                rows: list[Tensor] = []
                for r, (part, clients) in enumerate(zip(came, self.by_rank, strict=True)):
                    if r == rank:  # they have not travelled
                        rows += [
                            row[t.start : t.stop].to(device, non_blocking=True) for row in local
                        ]
                    else:
                        rows += [
                            part[(at * len(clients) + k * width) :][:width]
                            for k in range(len(clients))
                        ]
                torch._foreach_copy_([W[k] for k in order], rows)
                collected.append((t, W.to(self.work)))
                at += width
            yield stripe, collected


def tiles_at_once(sources: int, tiles: int, ranks: int) -> int:
    """How many of its tiles a rank collects at a time."""
    return 1 if ranks == 1 else max(1, min(EXCHANGE // (sources * TILE), -(-tiles // ranks)))


def _columns(segments: Sequence[Segment]) -> int:
    return sum(s.width for s in segments)


def _tiles(segments: Sequence[Segment]) -> list[Segment]:
    """`segments` cut into pieces of at most TILE columns."""
    return [
        Segment(a, min(a + TILE, s.stop), s.layer)
        for s in segments
        for a in range(s.start, s.stop, TILE)
    ]
