"""Prepares the batches of jobs that train in stacked passes, for several steps at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.sampling import batch_sizes
from fl_lightning.foundation.device import to_device
from fl_lightning.training.executors.base import LocalJob
from fl_lightning.training.schedule import BatchSchedule, order_keys, stream


class Feed:
    """Provides the batches of one job, each padded to `size` samples. They must be requested in
    order, each once."""

    def __init__(self, job: LocalJob, size: int) -> None:
        part = job.part
        schedule = job.schedule
        self.size = size
        self._job = job
        self._pieces = list(schedule.pieces(len(part)))
        self._sizes: list[int] = []
        if self._pieces:
            self._sizes = batch_sizes(len(part), schedule.batch_size, schedule.whole_last)
        self.counts: list[int] = []
        """Number of samples in each batch."""
        for _, first, count in self._pieces:
            self.counts += self._sizes[first : first + count]
        self._tensors = part.tensors
        self._index: Tensor | None = None
        self._rest = iter(()) if self._tensors is not None else stream(part, schedule)

    def __len__(self) -> int:
        """Number of batches."""
        return len(self.counts)

    @property
    def example(self) -> tuple[Tensor, Tensor]:
        """Some samples x and y, which show shapes and types."""
        return self._tensors or next(iter(self._job.part.batches(1)))

    def fill(
        self,
        x: Tensor,
        y: Tensor,
        first: int,
        count: int,
    ) -> None:
        """Write `count` batches from batch `first` on to x and y, (count * size, ...). If the job
        has fewer batches, the rest of x and y becomes 0.

        A batch with fewer than `size` samples is padded with copies of a sample of the client,
        which get weight 0; for a made-up sample the model might return NaN.
        """
        size = self.size
        available = max(0, min(count, len(self) - first))
        if available and self._tensors is not None:
            assert self._index is not None
            rows = self._index[first * size : (first + available) * size]
            for tensor, into in zip(self._tensors, (x, y), strict=True):
                target = into[: available * size]
                torch.index_select(tensor, 0, to_device(rows, tensor.device), out=target)
        elif available:
            for k, (images, labels) in enumerate(islice(self._rest, available)):
                fill_up(x[k * size :][:size], images)
                fill_up(y[k * size :][:size], labels)
        if available < count:
            x[available * size :].zero_()
            y[available * size :].zero_()

    @property
    def undrawn(self) -> list[tuple[BatchSchedule, int]]:
        """The epochs for which `draw` needs a key, as (schedule, epoch): all epochs of the job
        before `draw` is called, none afterwards. If the part's samples are not in memory, there are
        none either, as `stream` then draws their order."""
        if self._tensors is None or self._index is not None:
            return []
        return [(self._job.schedule, epoch) for epoch, *_ in self._pieces]

    def draw(self, keys: Sequence[int]) -> None:
        """Draw the order of samples in each epoch, and store `size` indices of samples for each
        batch; padding has the index 0.

        Args:
            keys: seeds of the `undrawn` epochs.
        """
        sizes = self._sizes
        draws = torch.Generator()
        total = sum(sizes)
        padded = torch.zeros(len(keys), len(sizes), self.size, dtype=torch.int64)
        # if only the last batch of an epoch is padded, an epoch's samples lie without a gap
        gapless = len(sizes) == 1 or self._job.schedule.batch_size == self.size
        orders = padded.flatten(1)[:, :total]
        if not gapless:
            orders = padded.new_empty(len(keys), total)
        for order, key in zip(orders.unbind(), keys, strict=True):
            self._job.part.order(draws.manual_seed(key), order)
        if not gapless:
            for k, places in enumerate(orders.split(sizes, 1)):
                padded[:, k, : places.shape[1]] = places
        if len(self) < len(keys) * len(sizes):
            pieces = enumerate(self._pieces)
            padded = torch.cat([padded[k, first:][:count] for k, (_, first, count) in pieces])
        self._index = padded.view(-1)


def fill_up(room: Tensor, batch: Tensor) -> None:
    """Write a batch to the beginning of `room`, and copies of its first sample to the rest."""
    room[: len(batch)] = batch
    if len(batch) < len(room):
        room[len(batch) :] = batch[:1]


def sample_weights(
    counts: np.ndarray,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return the weight of each sample in padded batches, (..., size): 1 / count for real samples,
    0 for padding.

    Args:
        counts: number of real samples in each batch, (...).
        size: number of samples in a padded batch.
    """
    counts = counts[..., None]
    is_sample = np.arange(size) < counts
    weights = is_sample / np.maximum(counts, 1)
    return torch.from_numpy(weights).to(dtype)


def lay_out(
    feeds: Mapping[int, Feed],
    width: int,
    first: int,
    count: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Stack the batches `first` to `first + count` of the feeds.

    Args:
        feeds: feeds by position in the stack; positions without a feed get zeros.
        width: number of positions in the stack.
        first: number of the first batch.
        count: number of batches of each feed.

    Returns:
        x (width, count, size, ...), and y and `sample_weights` (width, count, size). Weights have
        the type `dtype`, or float32 if that is wider.
    """
    undrawn = [feed for feed in feeds.values() if feed.undrawn]
    epochs = [epoch for feed in undrawn for epoch in feed.undrawn]
    keys = iter(order_keys(epochs))
    for feed in undrawn:
        feed.draw([next(keys) for _ in feed.undrawn])
    any_feed = next(iter(feeds.values()))
    size = any_feed.size
    image, label = any_feed.example
    x = image.new_empty(width, count * size, *image.shape[1:])
    y = label.new_empty(width, count * size, *label.shape[1:])
    counts = np.zeros((width, count), dtype=np.int64)
    for slot in range(width):
        if slot in feeds:
            feeds[slot].fill(x[slot], y[slot], first, count)
            samples = feeds[slot].counts[first : first + count]
            counts[slot, : len(samples)] = samples
        else:
            x[slot].zero_()
            y[slot].zero_()
    wide = torch.promote_types(dtype, torch.float32)
    weight = sample_weights(counts, size, wide)
    shape = count, size
    return x.unflatten(1, shape), y.unflatten(1, shape), to_device(weight, image.device)
