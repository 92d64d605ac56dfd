"""Samples, and a client's part of them for one purpose, as batches on its device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from numpy import ndarray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fl_lightning.configuration.datakeys import Balance
from fl_lightning.data.augment import Augmentation
from fl_lightning.data.sampling import batch_sizes
from fl_lightning.foundation.device import to_device

Batches = Iterator[tuple[Tensor, Tensor]]
Relabelling = Callable[[Tensor], Tensor]
"""New labels (n,) for old ones."""


@dataclass(frozen=True)
class Samples:
    """Raw samples in memory, and how they become the network's input."""

    raw: Tensor
    """uint8 or float32, [n, channels, height, width], [n, channels, samples] or [n, features];
    int64 [n, length]: token numbers, which stay what they are."""
    labels: Tensor
    """int64 [n] (next tokens: [n, T]), or float32 [n] for regression."""
    mean: Tensor
    """Of each channel (or feature) over the training pool, float32, shaped to broadcast against one
    sample."""
    std: Tensor
    rows: ndarray | None = None
    """Number of each sample, int64 [n]: the same whatever the split; None: its place."""
    units: ndarray | None = None
    """Number of what each sample is of, int64 [n]; None: of itself."""
    lines: ndarray | None = None
    """Number of each sample's row in the user's table, int64 [n]; None: there is none."""

    def inputs(
        self,
        index: Tensor,
        angle: float,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Tensor:
        """Samples at `index`, turned by `angle` degrees (nearest pixel, black corners), normalised
        on `device`."""
        raw = self.raw[index]
        if raw.dtype == torch.int64:
            return to_device(raw, device)
        if angle and len(index):
            from torchvision.transforms.functional import rotate

            raw = rotate(raw, angle)
        return (
            to_device(raw, device)
            .float()
            .sub_(to_device(self.mean, device))
            .div_(to_device(self.std, device))
            .to(dtype)
        )


class Part(ABC):
    """One client's samples for one purpose (training, validation or test)."""

    def __init__(
        self,
        size: int,
        augmentation: Augmentation | None,
    ) -> None:
        self._size = size
        self._augmentation = augmentation
        self.chances: Tensor | None = None
        """By which samples are drawn for a pass, (n,); None: each once."""
        self.class_weights: Tensor | None = None
        """Of the classes in the task loss, (classes,); None: all alike."""

    def __len__(self) -> int:
        return self._size

    @property
    def augmented(self) -> bool:
        """Whether `batches` has a use for `augment`."""
        return self._augmentation is not None

    def batches(
        self,
        batch_size: int,
        generator: torch.Generator | None = None,
        augment: torch.Generator | None = None,
        whole_last: bool = False,
        only: slice = slice(None),
    ) -> Batches:
        """One pass in batches (x, y) on the device: in the order of `torch.randperm` from
        `generator`, else as stored.

        `augment` gives the draws of the augmentation that the data ask for (training parts only;
        unused otherwise). Both generators live on the CPU and are drawn from here, before the first
        batch. The last batch is what remains; with `whole_last` a lone last sample joins the batch
        before it, since BatchNorm cannot train on one. `only`: which of the
        batches are gathered and prepared; random numbers are drawn for the whole pass.
        """
        order = None if generator is None else self.order(generator)
        sizes = batch_sizes(len(self), batch_size, whole_last)
        draws = None
        if self._augmentation is not None and augment is not None:
            draws = self._augmentation.draw(len(self), augment)
        start, stop, _ = only.indices(len(sizes))
        if (start, stop) != (0, len(sizes)):
            first = sum(sizes[:start])
            sizes = sizes[start:stop]
            here = slice(first, first + sum(sizes))
            order = (torch.arange(len(self)) if order is None else order)[here]
            draws = None if draws is None else draws[here]
        if self._augmentation is None or draws is None:
            return self._in_order(order, sizes)
        batches = self._in_order(order, sizes)
        return self._augmentation.over(batches, draws.split(sizes))

    def order(
        self,
        generator: torch.Generator,
        out: Tensor | None = None,
    ) -> Tensor:
        """The samples of one pass, int64 (n,)."""
        if self.chances is None:
            return torch.randperm(len(self), generator=generator, out=out)
        return torch.multinomial(self.chances, len(self), True, generator=generator, out=out)

    def set_balance(
        self,
        how: Balance | None,
        labels: Tensor,
        classes: int,
    ) -> Part:
        """Set that classes count alike in training on this part, whose `labels` (n,) these are;
        returns this part."""
        weights = 1 / labels.bincount(minlength=classes).clamp(min=1)
        self.chances = weights[labels].cpu() if how == "sampler" and len(labels) else None
        self.class_weights = weights if how == "weights" else None
        return self

    @property
    def whole(self) -> Part:
        """The part of which this one is a `subset`; else this one."""
        return self

    @property
    def tensors(self) -> tuple[Tensor, Tensor] | None:
        """All samples as stored, x (n, ...) and y (n, ...), where they lie in memory as they are
        trained on."""
        return None

    def subset(self, index: Tensor) -> Part:
        """The samples at `index` (int64 [m], places in this part as stored), augmented as this part
        is."""
        return SubsetPart(self, index)

    @abstractmethod
    def _in_order(
        self,
        order: Tensor | None,
        sizes: list[int],
    ) -> Batches: ...


class SubsetPart(Part):
    """The samples of `part` at `index` (int64 [m])."""

    def __init__(
        self,
        part: Part,
        index: Tensor,
    ) -> None:
        super().__init__(len(index), part._augmentation)
        self._part = part
        self._index = index
        self.chances = None if part.chances is None else part.chances[index.cpu()]
        self.class_weights = part.class_weights

    @property
    def whole(self) -> Part:
        """The part that it was taken from first."""
        return self._part.whole

    def _in_order(
        self,
        order: Tensor | None,
        sizes: list[int],
    ) -> Batches:
        index = self._index if order is None else self._index[order]
        return self._part._in_order(index, sizes)


class ResidentPart(Part):
    """All samples as tensors on the device: a pass costs one permutation and slices."""

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        augmentation: Augmentation | None,
    ) -> None:
        super().__init__(len(y), augmentation)
        self.x = x
        self.y = y

    @property
    def tensors(self) -> tuple[Tensor, Tensor] | None:
        """Inputs and labels, unless they are augmented."""
        return None if self.augmented else (self.x, self.y)

    def _in_order(
        self,
        order: Tensor | None,
        sizes: list[int],
    ) -> Batches:
        x = self.x
        y = self.y
        if order is not None:
            order = to_device(order, x.device)
            # keeps the memory format, which pooling on grey images is 7 times faster in
            x = x[order]
            y = y[order]
        return zip(
            x.split_with_sizes(sizes),
            y.split_with_sizes(sizes),
            strict=True,
        )


class LoadedPart(Part):
    """Samples that stay raw in main memory and are prepared batch by batch: the same numbers as
    `ResidentPart`."""

    def __init__(
        self,
        samples: ClientSamples,
        augmentation: Augmentation | None,
    ) -> None:
        super().__init__(len(samples.index), augmentation)
        self._samples = samples

    def _in_order(
        self,
        order: Tensor | None,
        sizes: list[int],
    ) -> Batches:
        order = torch.arange(len(self)) if order is None else order
        # A generator of its own: otherwise the loader draws from the global one, and dropout would
        # see other numbers.
        draws = torch.Generator()
        return iter(
            DataLoader(
                self._samples,
                batch_sampler=order.split(sizes),
                collate_fn=_as_is,
                generator=draws,
            )
        )


class TargetPart(Part):
    """`part` with `targets` (n, ...) in place of its labels, one for each sample as they are
    stored."""

    def __init__(
        self,
        part: Part,
        targets: Tensor,
    ) -> None:
        super().__init__(len(part), part._augmentation)
        if len(targets) != len(part):
            raise ValueError(f"{len(targets)} targets for {len(part)} samples")
        self._part = part
        self._targets = targets
        self.chances, self.class_weights = part.chances, part.class_weights

    @property
    def tensors(self) -> tuple[Tensor, Tensor] | None:
        """Inputs, and the targets."""
        tensors = self._part.tensors
        return None if tensors is None else (tensors[0], self._targets)

    def _in_order(
        self,
        order: Tensor | None,
        sizes: list[int],
    ) -> Batches:
        targets = (
            self._targets
            if order is None
            else self._targets[to_device(order, self._targets.device)]
        )
        inputs = (x for x, _ in self._part._in_order(order, sizes))
        return zip(inputs, targets.split(sizes), strict=True)


class ClientSamples(Dataset[tuple[Tensor, Tensor]]):
    """A part's samples: those of `samples` at `indices`, as they come to the `device`."""

    def __init__(
        self,
        samples: Samples,
        indices: ndarray,
        angle: float,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.samples = samples
        self.index = torch.from_numpy(indices)
        self.angle = angle
        self.device = device
        self.dtype = dtype

    def at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """x and y of the samples at `index`, places in `samples`."""
        x = self.samples.inputs(index, self.angle, self.device, self.dtype)
        return x, to_device(self.samples.labels[index], self.device)

    def __getitems__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """A whole batch at once: the DataLoader hands over all of its indices."""
        return self.at(self.index[rows])


def _as_is(batch: Any) -> Any:
    return batch
