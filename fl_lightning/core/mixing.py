"""The server's mixing kernel: client i receives, in each layer, the sum over j of R[i, layer, j]
times client j's layer.

Vectors lie on their clients' home ranks. The columns are divided into tiles of a fixed width. A
rank collects a tile of all sources (or several small ones) by all-to-all, mixes it and sends it
back. So no rank ever holds all models, the extra memory is that of a tile or `EXCHANGE`, and sums
run in client order for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.core.layout import Segment
from fl_lightning.foundation.device import wide
from fl_lightning.foundation.parallel import RankGroup

TILE = 1 << 15
"""Columns in a tile. 10 to 100 rows of it fit into the cache. It is fixed, as the last bits of
results depend on it."""

EXCHANGE = 1 << 22
"""Largest number of entries that a rank collects in one exchange, unless a single tile has more.
Ranks wait for each other in each exchange, and small ones take as long as large ones: 1 ms for 0.1
to 2 MB between two processes of a machine (measured). 16 MB hold ten MNIST CNNs."""

PAD = 48
"""Unused entries between the rows of a tile. Rows at a distance of 2^17 bytes would share cache
lines: the products of 100 models took twice as long (measured)."""


def mean_of(W: Tensor, p: Tensor) -> Tensor:
    """Return the weighted mean of the rows of W, shape (columns,), computed as
    w_0 + sum_j p_j (w_j - w_0). The mean of equal rows is that row, bit for bit.

    Args:
        W: rows w_j, (n, columns).
        p: weights (n,), which sum to 1.
    """
    weights = p.to(W.dtype)[None]
    return torch.addmm(W[:1], weights, W - W[0])[0]


@dataclass(frozen=True)
class Gram:
    """Inner products of the sources' models in each layer, W_l W_l^T, stored as those of the
    centred models and the terms that centring removes.

    If models are similar, cancellation makes the plain product useless in float32, but not the
    centred one. All tensors are float64.
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
        outer = self.centred + a[:, :, None] + a[:, None, :]
        return outer + self.mean_square[:, None, None]

    @property
    def distances(self) -> Tensor:
        """Squared distances ||w_i - w_j||^2 by layer, (L, n, n), never negative."""
        d = self.centred.diagonal(dim1=1, dim2=2)
        squares = d[:, :, None] + d[:, None, :]
        return (squares - 2 * self.centred).clamp_min(0.0)

    def select(self, index: Tensor) -> Gram:
        """Return the inner products of the sources at `index` (k,), centred at their own mean."""
        C = self.centred[:, index][:, :, index]
        a = self.offset[:, index]
        # <w_j - mean, d> and <d, mean>, where d is the new mean minus the old one
        to_mean = C.mean(2)
        shift = a.mean(1)
        square = to_mean.mean(1)
        rows = to_mean[:, :, None]
        columns = to_mean[:, None, :]
        centred = C - rows - columns + square[:, None, None]
        offset = a + to_mean - (shift + square)[:, None]
        return Gram(centred, offset, self.mean_square + 2 * shift + square)

    def total(self) -> Gram:
        """Return the inner products of whole models, summed over layers: L = 1."""
        parts = (self.centred, self.offset, self.mean_square)
        return Gram(*(part.sum(0, True) for part in parts))


class Mixer:
    """Computes mixes, means and inner products of vectors that lie on several ranks.

    Args:
        group: the ranks.
        home: home rank of each client.
        vectors: vectors on this rank by client, at least those of its sources.
        sources: clients whose models are mixed, ascending and equal on every rank.
        dtype: type of the vectors; a rank may have none.
    """

    def __init__(
        self,
        group: RankGroup,
        home: Sequence[int],
        vectors: Mapping[int, Tensor],
        sources: Sequence[int],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.group = group
        self.home = home
        self.vectors = vectors
        self.dtype = dtype
        # half precision is too coarse for mixing
        self.work = torch.promote_types(dtype, torch.float32)
        self.sources = list(sources)
        self.places = {c: k for k, c in enumerate(self.sources)}
        ranks = range(group.size)
        self.by_rank: list[list[int]] = [[] for _ in ranks]
        for c in self.sources:
            self.by_rank[home[c]].append(c)
        self.flops = 0
        """FLOPs of matrix products and centring so far, over all ranks."""
        self.working_bytes = 0
        """Peak bytes of work space on this rank."""

    def gram(self, segments: Sequence[Segment], layers: int) -> Gram:
        """Compute the inner products of the sources' vectors by layer, equal on every rank.

        Args:
            segments: columns over which to sum; their `layer` tells the layer.
            layers: number of layers, L.
        """
        n = len(self.sources)
        tiles = _tiles(segments)
        self.flops += (2 * n * n + 4 * n + 2) * _columns(segments)
        # a collected row for each source; with several ranks also a sent and a received one, each
        # of them also in shared memory
        self._count_work(n if self.group.size == 1 else 5 * n, tiles)
        rows = []
        for _, collected in self._collected(tiles):
            for _, W in collected:
                mean = W.mean(0)
                D = W.sub_(mean)
                products = (D @ D.T).flatten()
                square = mean.dot(mean)[None]
                rows.append(torch.cat([products, D @ mean, square]))
        here = torch.zeros(0, n * n + n + 1, dtype=self.work, device=self.group.device)
        if rows:
            here = torch.stack(rows)
        if self.group.size == 1:  # MPS, which has no 64-bit numbers, has one rank
            here = here.cpu()
        total = self._by_layer(tiles, here.double(), layers)
        centred, offset, mean_square = total.cpu().split([n * n, n, 1], dim=1)
        products = centred.view(layers, n, n)
        return Gram(products, offset, mean_square[:, 0])

    def _by_layer(
        self,
        tiles: list[Segment],
        here: Tensor,
        layers: int,
    ) -> Tensor:
        """Sum the tiles' rows of all ranks by layer; returns (layers, width) on every rank. As they
        are added in the tiles' order, the bits are the same for any number of ranks.

        Args:
            here: a row for each of this rank's tiles, (tiles, width).
        """
        size = self.group.size
        width = here.shape[1]
        rows = here
        if size > 1:
            numbers = [width * len(tiles[rank::size]) for rank in range(size)]
            rows = here.new_empty(len(tiles), width)
            for rank, part in enumerate(self.group.gather_parts([here.flatten()], numbers)):
                rows[rank::size] = part.view(-1, width)
        total = here.new_zeros(layers, width)
        for tile, row in zip(tiles, rows, strict=True):
            total[tile.layer] += row
        return total

    def mix(
        self,
        segments: Sequence[Segment],
        A: Tensor,
        receivers: Sequence[int],
        into: Mapping[int, Tensor],
        sums_to_one: bool = True,
    ) -> None:
        """Write each receiver's mix into the columns of `segments` of this rank's vectors `into`.

        If the rows of `A` sum to 1, the mixes A W of the models W are computed as
        W_i + (A - I)(W - 1 w_0): equal models then stay equal bit for bit, A = I gives W itself,
        and rounding of the rows' sums has no effect. Otherwise they are computed as
        W_i + (A - I) W. This, too, gives W itself for A = I; all other mixes are rounded, even of
        equal models.

        Args:
            segments: columns to mix; their `layer` selects the weights.
            A: weights (L, m, n), receivers by sources.
            receivers: m clients, all among the sources.
            into: a vector for each receiver whose home is this rank.
            sums_to_one: whether the rows of `A` sum to 1.
        """
        n = len(self.sources)
        m = len(receivers)
        tiles = _tiles(segments)
        by_column = 2 * n * m + n + m
        self.flops += by_column * _columns(segments)
        places = torch.tensor([self.places[c] for c in receivers])
        identity = torch.nn.functional.one_hot(places, n)
        change = A.cpu().to(torch.float64) - identity
        B = change.to(self.group.device, self.work)
        subtracts_first = int(sums_to_one)
        if self.group.size == 1:
            pairs = [(into[c], self.places[c]) for c in receivers]
            self._mix_alone(tiles, B, pairs, subtracts_first)
            return
        places = places.to(self.group.device)
        # four rows for each source (collected, difference, sent, arrived), three for each receiver
        # (change, sent, arrived)
        self._count_work(4 * n + 3 * m, tiles)
        differences = self._room(n)
        products = self._room(m)
        for stripe, collected in self._collected(tiles):
            mixed = []
            for t, W in collected:
                D = differences[:, : t.width]
                change = products[:, : t.width]
                torch.sub(W, W[0], alpha=subtracts_first, out=D)
                torch.mm(B[t.layer], D, out=change)
                mixed.append((W[places] + change).to(self.dtype))
            self._send_home(stripe, mixed, receivers, into)

    def _send_home(
        self,
        stripe: list[Segment],
        mixed: list[Tensor],
        receivers: Sequence[int],
        into: Mapping[int, Tensor],
    ) -> None:
        """Send the mixed tiles of this rank to the receivers' home ranks, and write those that
        arrive here to the vectors `into`.

        Args:
            stripe: tiles that the ranks work on at the same time.
            mixed: rows (m, width) of each of this rank's tiles in the stripe.
        """
        rank = self.group.rank
        shares = self._shares(stripe)
        width = _columns(shares[rank])
        here = [k for k, c in enumerate(receivers) if self.home[c] == rank]
        parts = [self._nothing()]
        leaving = []
        coming = []
        for r, tiles in enumerate(shares):
            rows = [k for k, c in enumerate(receivers) if self.home[c] == r and r != rank]
            parts += [out[k] for out in mixed for k in rows]
            leaving.append(len(rows) * width)
            coming.append(len(here) * _columns(tiles) * (r != rank))
        arrived = self.group.all_to_all(parts, leaving, coming)
        for t, out in zip(shares[rank], mixed, strict=True):
            for k in here:
                into[receivers[k]][t.columns].copy_(out[k], non_blocking=True)
        for r, tiles in enumerate(shares):
            if r == rank:  # rows that stay here were written above
                continue
            cells = [(t, k) for t in tiles for k in here]
            rows_of_rank = arrived[r].split([t.width for t, _ in cells])
            for (t, k), row in zip(cells, rows_of_rank, strict=True):
                into[receivers[k]][t.columns].copy_(row, non_blocking=True)

    def _mix_alone(
        self,
        tiles: list[Segment],
        B: Tensor,
        rows: list[tuple[Tensor, int]],
        subtracts_first: int,
    ) -> None:
        """Do the work of `mix` on one rank, without copying vectors to tiles and back.

        Args:
            B: A - I, on the device, (L, m, n).
            rows: each receiver's vector and its position among the sources.
            subtracts_first: 1 if the first source is subtracted from the others, else 0.
        """
        self._count_work(len(self.sources) + len(rows), tiles)
        differences = self._room(len(self.sources))
        products = self._room(len(rows))
        device = self.group.device
        vectors = [self.vectors[c] for c in self.sources]
        for t in tiles:
            columns = t.columns
            W = [v[columns].to(device, self.work, non_blocking=True) for v in vectors]
            D = differences[:, : t.width]
            for w, difference in zip(W, D.unbind(0), strict=True):
                torch.sub(w, W[0], alpha=subtracts_first, out=difference)
            changes = products[:, : t.width]
            torch.mm(B[t.layer], D, out=changes)
            for (row, k), change in zip(rows, changes.unbind(0), strict=True):
                place = row[columns]
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
        """Write one weighted mean of the sources to `into` (D,), on every rank.

        Args:
            p: weights (L, n); each row sums to 1.
            combine: combines a tile (n, width) by weights (n,) to one row: the mean, or a robust
                aggregate. Its FLOPs are counted as those of the mean.
        """
        n = len(self.sources)
        tiles = _tiles(segments)
        self.flops += (3 * n + 1) * _columns(segments)
        p = p.to(self.group.device, wide(self.group.device))
        # two rows for each source (collected, difference); the rest as in `gram`
        self._count_work((2 if self.group.size == 1 else 6) * n, tiles)
        means = []
        stripes = []
        for stripe, collected in self._collected(tiles):
            combined = [combine(W, p[t.layer]).to(self.dtype) for t, W in collected]
            if self.group.size == 1:
                [mean] = combined
                into[stripe[0].columns] = mean
                continue
            means += combined
            stripes.append(stripe)
            is_last = stripe[-1] is tiles[-1]
            if is_last or sum(map(_columns, stripes)) >= EXCHANGE:
                self._spread(stripes, means, into)
                means = []
                stripes = []

    def _spread(
        self,
        stripes: list[list[Segment]],
        means: list[Tensor],
        into: Tensor,
    ) -> None:
        """Exchange the `means` of each rank's tiles in `stripes`, and write all of them to `into`
        on every rank."""
        tiles_of: list[list[Segment]] = [[] for _ in range(self.group.size)]
        for stripe in stripes:
            for tiles, share in zip(tiles_of, self._shares(stripe), strict=True):
                tiles += share
        sizes = list(map(_columns, tiles_of))
        parts = self.group.gather_parts([self._nothing(), *means], sizes)
        for tiles, part in zip(tiles_of, parts, strict=True):
            pieces = part.split([t.width for t in tiles])
            for t, piece in zip(tiles, pieces, strict=True):
                into[t.columns] = piece

    def _shares(self, stripe: list[Segment]) -> list[list[Segment]]:
        """Return, for each rank, its tiles of a stripe."""
        return [stripe[rank :: self.group.size] for rank in range(self.group.size)]

    def _count_work(self, rows: int, tiles: list[Segment]) -> None:
        """Count work space: raise `working_bytes` to the bytes of all tiles that this rank collects
        at a time, if it is less.

        Args:
            rows: number of rows that each tile needs.
            tiles: all tiles.
        """
        rows *= tiles_at_once(len(self.sources), len(tiles), self.group.size)
        self.working_bytes = max(self.working_bytes, rows * TILE * self.work.itemsize)

    def _room(
        self,
        rows: int,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Allocate rows for a tile, (rows, TILE), with a distance of `PAD` entries between them."""
        dtype = dtype or self.work
        memory = torch.empty(rows, TILE + PAD, dtype=dtype, device=self.group.device)
        return memory[:, :TILE]

    def _nothing(self) -> Tensor:
        return torch.empty(0, dtype=self.dtype, device=self.group.device)

    def _collected(
        self, tiles: list[Segment]
    ) -> Iterator[tuple[list[Segment], list[tuple[Segment, Tensor]]]]:
        """Yield the stripes of `tiles`, groups of tiles that the ranks work on at the same time.
        Their number is equal on every rank.

        Each stripe comes with this rank's tiles in it (possibly none) and the columns of all
        sources in each of these, (n, width), in source order. The caller may write to them; the
        next stripe reuses the memory.
        """
        n = len(self.sources)
        size = self.group.size
        vectors = [self.vectors[c] for c in self.by_rank[self.group.rank]]
        if size == 1:
            # all tiles share one memory: allocating anew fragments the heap from 30 clients on
            tile = self._room(n, self.dtype)
            for t in tiles:
                W = tile[:, : t.width]
                columns = t.columns
                rows = [vector[columns] for vector in vectors]
                torch._foreach_copy_(list(W.unbind(0)), rows, non_blocking=True)
                yield [t], [(t, W.to(self.work))]
            return
        order = [self.places[c] for clients in self.by_rank for c in clients]
        at_once = tiles_at_once(n, len(tiles), size)
        rooms = [self._room(n, self.dtype) for _ in range(at_once)]
        for first in range(0, len(tiles), size * at_once):
            stripe = tiles[first : first + size * at_once]
            shares = self._shares(stripe)
            arrived = self._exchanged(shares, vectors)
            collected = []
            before = 0  # number of columns in this rank's earlier tiles
            for t, room in zip(shares[self.group.rank], rooms, strict=False):
                W = room[:, : t.width]
                rows = self._rows_of(t, before, arrived, vectors)
                torch._foreach_copy_([W[k] for k in order], rows)
                collected.append((t, W.to(self.work)))
                before += t.width
            yield stripe, collected

    def _exchanged(
        self,
        shares: list[list[Segment]],
        vectors: list[Tensor],
    ) -> list[Tensor]:
        """Send each rank the columns of this rank's `vectors` in its tiles; returns the columns
        that arrive from each rank, flat.

        Args:
            shares: tiles of each rank.
        """
        rank = self.group.rank
        width = _columns(shares[rank])
        parts = [self._nothing()]
        leaving = []
        coming = []
        for r, tiles in enumerate(shares):
            travels = r != rank
            for t in tiles if travels else ():
                parts += [v[t.columns].to(self.group.device, non_blocking=True) for v in vectors]
            leaving.append(len(vectors) * _columns(tiles) * travels)
            coming.append(len(self.by_rank[r]) * width * travels)
        return self.group.all_to_all(parts, leaving, coming)

    def _rows_of(
        self,
        tile: Segment,
        before: int,
        arrived: list[Tensor],
        vectors: list[Tensor],
    ) -> list[Tensor]:
        """Return the columns of each source in a tile, in the order of ranks.

        Args:
            before: number of columns in this rank's earlier tiles of the stripe.
            arrived: columns from each other rank, as from `_exchanged`.
            vectors: vectors (D,) of the sources on this rank.
        """
        rows = []
        for r, clients in enumerate(self.by_rank):
            if r == self.group.rank:
                device = self.group.device
                rows += [v[tile.columns].to(device, non_blocking=True) for v in vectors]
                continue
            start = before * len(clients)
            for k in range(len(clients)):
                first = start + k * tile.width
                rows.append(arrived[r][first : first + tile.width])
        return rows


def tiles_at_once(
    sources: int,
    tiles: int,
    ranks: int,
) -> int:
    """Return the number of tiles that a rank collects at a time, of `tiles` tiles in all."""
    if ranks == 1:
        return 1
    fitting = EXCHANGE // (sources * TILE)
    return max(1, min(fitting, -(-tiles // ranks)))


def _columns(segments: Sequence[Segment]) -> int:
    return sum(s.width for s in segments)


def _tiles(segments: Sequence[Segment]) -> list[Segment]:
    """Divide `segments` into pieces of at most TILE columns."""
    tiles = []
    for segment in segments:
        for start in range(segment.start, segment.stop, TILE):
            stop = min(start + TILE, segment.stop)
            tiles.append(Segment(start, stop, segment.layer))
    return tiles
