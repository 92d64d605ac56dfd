"""Samples, and one client's training, validation or test part of them, as batches on its device."""

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
"""Function from labels (n,) to new labels."""


@dataclass(frozen=True)
class Samples:
    """Raw samples in memory, and the normalisation that turns them into inputs."""

    raw: Tensor
    """uint8 or float32, [n, channels, height, width], [n, channels, samples] or [n, features]; or
    int64 [n, length]: token numbers, which are not normalised."""
    labels: Tensor
    """int64 [n], or [n, T] for next tokens; float32 [n] for a regression."""
    mean: Tensor
    """Mean of each channel or feature over the training samples, float32, shaped to broadcast
    against one sample."""
    std: Tensor
    rows: ndarray | None = None
    """Number of each sample, int64 [n], the same in every split; None: its index."""
    units: ndarray | None = None
    """Number of each sample's unit (person, recording), int64 [n]; None: each sample is a unit of
    its own."""
    lines: ndarray | None = None
    """Row of each sample in the user's table, int64 [n]; None: the data are no table."""

    def inputs(
        self,
        index: Tensor,
        angle: float,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the samples at `index` as inputs on `device`: rotated by `angle` degrees (nearest
        pixel, black corners), and normalised."""
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
    """One client's training, validation or test samples."""

    def __init__(
        self,
        size: int,
        augmentation: Augmentation | None,
    ) -> None:
        self._size = size
        self._augmentation = augmentation
        self.chances: Tensor | None = None
        """Probability of each sample, (n,), when the samples of a pass are drawn; None: each comes
        once."""
        self.class_weights: Tensor | None = None
        """Weights of the classes in the task loss, (classes,); None: equal ones."""

    def __len__(self) -> int:
        return self._size

    @property
    def augmented(self) -> bool:
        """Whether this part has an augmentation, which `batches` applies if it is given a generator
        `augment`."""
        return self._augmentation is not None

    def batches(
        self,
        batch_size: int,
        generator: torch.Generator | None = None,
        augment: torch.Generator | None = None,
        whole_last: bool = False,
        only: slice = slice(None),
    ) -> Batches:
        """Return the batches (x, y) of one pass, on the device. The last batch holds the remaining
        samples.

        All random numbers are drawn on the CPU before the first batch.

        Args:
            batch_size: samples of a batch.
            generator: shuffles the samples; None: in stored order.
            augment: draws the augmentation, if this part has one; None: no augmentation.
            whole_last: let a single last sample join the batch before it, since BatchNorm cannot
                train on one.
            only: which batches are returned; the random numbers are those of the whole pass.
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
            chosen = slice(first, first + sum(sizes))
            order = (torch.arange(len(self)) if order is None else order)[chosen]
            draws = None if draws is None else draws[chosen]
        if self._augmentation is None or draws is None:
            return self._in_order(order, sizes)
        batches = self._in_order(order, sizes)
        return self._augmentation.augmented(batches, draws.split(sizes))

    def order(
        self,
        generator: torch.Generator,
        out: Tensor | None = None,
    ) -> Tensor:
        """Draw the samples of one pass, int64 (n,): a permutation, or, with `chances`, n draws with
        replacement. `out`: tensor that the result is written to; None: a new one."""
        if self.chances is None:
            return torch.randperm(len(self), generator=generator, out=out)
        return torch.multinomial(self.chances, len(self), True, generator=generator, out=out)

    def set_balance(
        self,
        how: Balance | None,
        labels: Tensor,
        classes: int,
    ) -> Part:
        """Let all classes count alike when a model trains on this part; returns this part.

        Args:
            how: `sampler` draws samples of rare classes more often, `weights` weights the loss;
                None removes the balance.
            labels: labels of this part's samples, (n,).
            classes: number of classes.
        """
        weights = 1 / labels.bincount(minlength=classes).clamp(min=1)
        self.chances = weights[labels].cpu() if how == "sampler" and len(labels) else None
        self.class_weights = weights if how == "weights" else None
        return self

    @property
    def whole(self) -> Part:
        """The part that this one is a subset of, directly or through other subsets; else this
        part."""
        return self

    @property
    def tensors(self) -> tuple[Tensor, Tensor] | None:
        """All inputs (n, ...) and labels (n, ...) in stored order; None if they are not in memory
        as inputs, or are augmented."""
        return None

    def subset(self, index: Tensor) -> Part:
        """Return the samples at `index` (int64 [m], in stored order) as a part with the same
        augmentation."""
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
        """The part that this one is a subset of, directly or through other subsets."""
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
        """Inputs and labels; None if they are augmented."""
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
            # indexing keeps the memory format, in which pooling grey images is 7 times faster
            x = x[order]
            y = y[order]
        return zip(
            x.split_with_sizes(sizes),
            y.split_with_sizes(sizes),
            strict=True,
        )


class LoadedPart(Part):
    """Samples that stay raw in main memory and are prepared batch by batch; the numbers equal those
    of `ResidentPart`."""

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
        # without this generator the loader would draw from the global one, and change dropout
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
    """The samples of `part` with `targets` (n, ...) in place of the labels, in stored order."""

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
        """Inputs and targets; None if `part` has no tensors."""
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
    """The samples of one part as a torch data set, whose items are ready on `device`."""

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
        """Return inputs and labels at `index`: positions among the samples of all clients
        (`self.samples`), not among those of this part."""
        x = self.samples.inputs(index, self.angle, self.device, self.dtype)
        return x, to_device(self.samples.labels[index], self.device)

    def __getitems__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return a whole batch, of all indices that the DataLoader passes at once."""
        return self.at(self.index[rows])


def _as_is(batch: Any) -> Any:
    return batch
