"""The batches of jobs that train side by side, laid out for a stretch of steps at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.sampling import batch_sizes
from fl_lightning.foundation.device import sent
from fl_lightning.training.executors.base import LocalJob
from fl_lightning.training.schedule import BatchSchedule, order_keys, stream


class Feed:
    """The batches of one job, each of at most `size` samples. They are asked for in order, and each
    once."""

    def __init__(self, job: LocalJob, size: int) -> None:
        part, schedule = job.part, job.schedule
        self.size = size
        self._pieces = list(schedule.pieces(len(part)))
        sizes = (
            batch_sizes(len(part), schedule.batch_size, schedule.whole_last) if self._pieces else []
        )
        self.counts = [n for _, first, count in self._pieces for n in sizes[first : first + count]]
        """Samples of each batch."""
        self._job, self._sizes = job, sizes
        self._tensors = part.tensors
        self._index: Tensor | None = None
        self._rest = iter(()) if self._tensors is not None else stream(part, schedule)

    def __len__(self) -> int:
        """How many batches there are."""
        return len(self.counts)

    @property
    def like(self) -> tuple[Tensor, Tensor]:
        """Some of its samples."""
        return self._tensors or next(iter(self._job.part.batches(1)))

    def fill(self, x: Tensor, y: Tensor, first: int, count: int) -> None:
        """Write batches `first` to `first + count` to x and y (count * size, ...), as far as there
        are so many.

        A batch that is smaller is filled up with the first sample, which is finite if the others
        are.
        """
        stop = min(first + count, len(self)) - first
        if stop > 0 and self._tensors is not None:
            assert self._index is not None
            rows = self._index[first * self.size : (first + stop) * self.size]
            for tensor, into in zip(self._tensors, (x, y), strict=True):
                own = into if stop == count else into[: stop * self.size]
                torch.index_select(tensor, 0, sent(rows, tensor.device), out=own)
        elif stop > 0:
            for k, (images, labels) in enumerate(islice(self._rest, stop)):
                start, n = k * self.size, self.counts[first + k]
                for batch, into in ((images, x), (labels, y)):
                    into[start : start + n] = batch
                    into[start + n : start + self.size] = batch[:1]
        if stop < count:
            for into in (x, y):
                into[max(stop, 0) * self.size :].zero_()

    @property
    def undrawn(self) -> list[tuple[BatchSchedule, int]]:
        """The epochs whose orders are still to be drawn."""
        if self._tensors is None or self._index is not None:
            return []
        return [(self._job.schedule, epoch) for epoch, *_ in self._pieces]

    def draw(self, keys: Sequence[int]) -> None:
        """Draw the places of the samples, batch after batch, each of `size`, by the keys of the
        epochs."""
        sizes, draws, total = self._sizes, torch.Generator(), sum(self._sizes)
        padded = torch.zeros(len(keys), len(sizes), self.size, dtype=torch.int64)
        # but for what fills up the last
        gapless = len(sizes) == 1 or self._job.schedule.batch_size == self.size
        orders = padded.flatten(1)[:, :total] if gapless else padded.new_empty(len(keys), total)
        for order, key in zip(orders.unbind(), keys, strict=True):
            self._job.part.order(draws.manual_seed(key), order)
        if not gapless:
            for k, some in enumerate(orders.split(sizes, 1)):
                padded[:, k, : some.shape[1]] = some
        if len(self) < len(keys) * len(sizes):
            padded = torch.cat(
                [
                    padded[k, first : first + count]
                    for k, (_, first, count) in enumerate(self._pieces)
                ]
            )
        self._index = padded.view(-1)


def laid_out(
    feeds: Mapping[int, Feed],
    width: int,
    first: int,
    count: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Batches `first` to `first + count` of the feeds by slot: x (width, count, size, ...), y and
    weight (width, count, size).

    A sample's weight is 1 / its batch's samples, in numbers of `dtype` or of 32 bits; what fills up
    has weight 0.
    """
    undrawn = [feed for feed in feeds.values() if feed.undrawn]
    keys = iter(order_keys([epoch for feed in undrawn for epoch in feed.undrawn]))
    for feed in undrawn:
        feed.draw([next(keys) for _ in feed.undrawn])
    some = next(iter(feeds.values()))
    size, (like, label) = some.size, some.like
    x = like.new_empty(width, count * size, *like.shape[1:])
    y = label.new_empty(width, count * size, *label.shape[1:])
    counts = np.zeros((width, count), dtype=np.int64)
    for slot, (own_x, own_y) in enumerate(zip(x.unbind(), y.unbind(), strict=True)):
        if slot in feeds:
            feeds[slot].fill(own_x, own_y, first, count)
            here = feeds[slot].counts[first : first + count]
            counts[slot, : len(here)] = here
        else:
            own_x.zero_()
            own_y.zero_()
    each = torch.from_numpy(
        np.where(np.arange(size) < counts[..., None], 1 / np.maximum(counts, 1)[..., None], 0.0)
    )
    weight = sent(each.to(torch.promote_types(dtype, torch.float32)), like.device)
    return x.unflatten(1, (count, size)), y.unflatten(1, (count, size)), weight
