"""LeNet-5 (LeCun, Bottou, Bengio, Haffner, Proc. IEEE 1998) as KT-pFL runs it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fl_lightning.errors import BadInput


class LeNet(nn.Module):
    """Two 5x5 convolutions of 6 and 16 channels, then 120, 84 and the classes, with ReLU and 2x2 max-pooling.

    Widths, ReLU and max-pooling are those of KT-pFL's code (Zhang et al., NeurIPS 2021), one of its four architectures:
    44,426 parameters on grey 28x28 images, 62,006 on colour 32x32 images, with 10 classes.

    Args:
        input_shape: (channels, height, width) of an image.
        num_classes: outputs.
        padding: of the two convolutions. 0: KT-pFL's code; it wants 16x16 pixels, 2 takes 4x4.
    """

    head = "classifier"

    def __init__(self, input_shape: Sequence[int], num_classes: int, padding: int = 0) -> None:
        super().__init__()
        sides = [_pooled(_pooled(side, padding), padding) for side in input_shape[1:]]
        if len(input_shape) != 3 or min(sides, default=0) < 1:
            allowed = f"its two 5x5 convolutions need larger images than {(*input_shape,)}; padding 2 takes 4x4 pixels"
            raise BadInput("model.init_args.padding", padding, allowed)
        self.conv1 = nn.Conv2d(input_shape[0], 6, 5, padding=padding)
        self.conv2 = nn.Conv2d(6, 16, 5, padding=padding)
        self.fc1 = nn.Linear(16 * sides[0] * sides[1], 120)
        self.fc2 = nn.Linear(120, 84)
        self.classifier = nn.Linear(84, num_classes)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        """Images [b, channels, height, width] to logits [b, num_classes]."""
        x = self.pool(self.conv1(x).relu())
        x = self.pool(self.conv2(x).relu())
        x = self.fc1(x.flatten(1)).relu()
        return self.classifier(self.fc2(x).relu())


def _pooled(side: int, padding: int) -> int:
    """Pixels along a side after a 5x5 convolution and the pooling."""
    return (side + 2 * padding - 4) // 2
