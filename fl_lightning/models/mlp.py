"""The multilayer perceptron of FEDORA."""

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from fl_lightning.models.base import check_sizes


class MLP(nn.Module):
    """Fully connected layers with ReLU; 784-128-128-10 on MNIST is FEDORA's (Wu et al., KDD 2023).

    Args:
        hidden: widths between the flattened input and the classes; empty: multinomial logistic
            regression.
    """

    head = "classifier"

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        hidden: Sequence[int] = (128, 128),
    ) -> None:
        super().__init__()
        check_sizes("hidden", *hidden)
        widths = [math.prod(input_shape), *hidden]
        self.hidden = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(widths))
        self.classifier = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Samples [b, ...] to logits [b, num_classes]."""
        x = x.flatten(1)
        for layer in self.hidden:
            x = layer(x).relu()
        return self.classifier(x)
