"""A small convolutional network for windows of recordings."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from fl_lightning.configuration.config import check
from fl_lightning.models.base import check_sizes


class CNN1D(nn.Module):
    """Convolutions along time, each with 2-pooling, then the mean over the remaining time, and the
    classifier.

    Ours: convolutions of a window's axes are common in papers on activities by wearables (Ordonez,
    Roggen, Sensors 2016, have four of 64 channels and width 5, and then recurrent layers).

    Args:
        channels: number of output channels of each convolution.
        width: length of each convolution's kernel, in time steps.
    """

    head = "classifier"

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        channels: Sequence[int] = (32, 64),
        width: int = 5,
    ) -> None:
        super().__init__()
        least = 2 ** len(channels)
        are_windows = len(input_shape) == 2 and input_shape[1] >= least
        needs = f"it needs windows (channels, samples) of {least} or more samples"
        requirement = f"{needs}, but the data are {(*input_shape,)}"
        check("model", "cnn1d", are_windows, requirement)
        check_sizes("width", width)
        check_sizes("channels", *channels)
        sizes = pairwise([input_shape[0], *channels])
        self.convs = nn.ModuleList(
            nn.Conv1d(before, after, width, padding="same") for before, after in sizes
        )
        self.pool = nn.MaxPool1d(2)
        self.classifier = nn.Linear(channels[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Windows [b, channels, samples] to logits [b, num_classes]."""
        for conv in self.convs:
            x = self.pool(conv(x).relu())
        return self.classifier(x.mean(dim=2))
