"""Five-layer convolutional networks: of the KAPC papers on MNIST and Fashion-MNIST, of FEDORA on
CIFAR-10 and GTSRB."""

from collections.abc import Sequence

from torch import Tensor, nn

from fl_lightning.configuration.config import check
from fl_lightning.models.base import check_sizes


class CNN(nn.Module):
    """Two 5x5 convolutions, then fully connected layers of 512, 128 and the classes: the 5 layers
    of KAPC's MNIST model.

    The papers give neither channels nor padding nor pooling: 32 and 64 channels and 2x2 max-pooling
    after each convolution are those of McMahan et al. (2017).

    Args:
        channels: numbers of output channels of the two convolutions.
        padding: pixels of zeros around the input of each convolution. 0, as in LeNet, needs a third
            of the operations of 2 (McMahan's), and images of at least 16x16 pixels.
        hidden: widths of the one or two layers before the classifier: PFLlib's four-layer CNN has
            (512,).
        norm: whether batch normalisation follows each convolution. KAPC's paper names none, but has
            a row of FedBN.
    """

    head = "classifier"

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        channels: Sequence[int] = (32, 64),
        padding: int = 0,
        hidden: Sequence[int] = (512, 128),
        norm: bool = False,
    ) -> None:
        super().__init__()
        requirement = "give the widths of one or two layers before the classifier"
        check("model.init_args.hidden", list(hidden), len(hidden) in (1, 2), requirement)
        check_sizes("hidden", *hidden)
        check_sizes("channels", *channels)
        sides = [_pooled(_pooled(side, padding), padding) for side in input_shape[1:]]
        requirement = (
            f"its two 5x5 convolutions need larger images than {(*input_shape,)}; padding 2 needs "
            f"4x4 pixels"
        )
        is_large = len(input_shape) == 3 and min(sides, default=0) >= 1
        check("model.init_args.padding", padding, is_large, requirement)
        first, second = channels
        self.conv1 = nn.Conv2d(input_shape[0], first, 5, padding=padding)
        # its tensors belong to conv1's layer
        self.norm1 = nn.BatchNorm2d(first) if norm else nn.Identity()
        self.conv2 = nn.Conv2d(first, second, 5, padding=padding)
        self.norm2 = nn.BatchNorm2d(second) if norm else nn.Identity()
        self.fc1 = nn.Linear(second * sides[0] * sides[1], hidden[0])
        self.fc2 = nn.Linear(hidden[0], hidden[1]) if len(hidden) == 2 else nn.Identity()
        self.classifier = nn.Linear(hidden[-1], num_classes)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        """Images [b, channels, height, width] to logits [b, num_classes]."""
        x = self.pool(self.norm1(self.conv1(x)).relu())
        x = self.pool(self.norm2(self.conv2(x)).relu())
        x = self.fc1(x.flatten(1)).relu()
        return self.classifier(self.fc2(x).relu())


class CNN5(CNN):
    """Two 5x5 convolutions of 16 and 32 channels, then 120, 84 and the classes: FEDORA's CNN (Wu et
    al., KDD 2023).

    The paper runs it on CIFAR-10 and GTSRB and gives the widths; of these, 120 and 84 are LeNet's.
    So 5x5 convolutions, 2x2 max-pooling and no padding are taken from LeNet, too. On colour 32x32
    images with 10 classes it has 121,182 parameters.

    Args:
        padding: pixels of zeros around the input of each convolution.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        padding: int = 0,
    ) -> None:
        super().__init__(input_shape, num_classes, (16, 32), padding, (120, 84))


def _pooled(side: int, padding: int) -> int:
    """Return the pixels along a side after a 5x5 convolution and the pooling."""
    return (side + 2 * padding - 4) // 2
