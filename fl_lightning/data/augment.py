"""Augmentation of batches of training images on their device; random numbers are drawn on the CPU
for a whole epoch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.foundation.device import to_device

PAD = 4
"""Black pixels around an image before a random crop of its own size: the usual recipe for CIFAR (He
et al., 2016)."""


@dataclass(frozen=True)
class Augmentation:
    """Random horizontal flips; if `crop`, random crops of the padded image come before them."""

    crop: bool
    black: Tensor
    """Value of a black pixel after normalisation, [channels, 1, 1] float32."""

    def draw(
        self,
        samples: int,
        generator: torch.Generator,
    ) -> Tensor:
        """Draw the augmentation of an epoch's samples, int64 [samples, 3]: flip (0 or 1), shift
        down, shift right."""
        flips = torch.randint(0, 2, (samples, 1), generator=generator)
        shifts = torch.randint(0, 2 * PAD + 1, (samples, 2), generator=generator)
        return torch.cat([flips, shifts], dim=1)

    def apply(
        self,
        x: Tensor,
        draws: Tensor,
    ) -> Tensor:
        """Augment images `x` [b, channels, height, width] as `draws` [b, 3] says, a row for each
        image."""
        draws = to_device(draws, x.device)
        if self.crop:
            b, channels, height, width = x.shape
            black = to_device(self.black.to(x.dtype), x.device)
            frame = black.expand(b, channels, height + 2 * PAD, width + 2 * PAD).clone()
            frame[:, :, PAD:-PAD, PAD:-PAD] = x
            windows = frame.unfold(2, height, 1).unfold(3, width, 1)
            image = torch.arange(b, device=x.device)
            _, down, right = draws.unbind(1)
            x = windows[image, :, down, right]
        is_flipped = draws[:, 0, None, None, None] == 1
        return torch.where(is_flipped, x.flip(-1), x)

    def augmented(
        self,
        batches: Iterator[tuple[Tensor, Tensor]],
        draws: Sequence[Tensor],
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches (x, y) with x augmented; `draws` holds the rows of `draw` for each
        batch."""
        for (x, y), rows in zip(batches, draws, strict=True):
            yield self.apply(x, rows), y
