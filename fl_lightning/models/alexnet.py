"""AlexNet (Krizhevsky, Sutskever, Hinton, NeurIPS 2012) for small images, as KT-pFL runs it."""

from collections.abc import Sequence

from torch import Tensor, nn

from fl_lightning.configuration.config import check
from fl_lightning.models.base import check_sizes


class AlexNet(nn.Module):
    """Five 3x3 convolutions, the first with stride 2, then two fully connected layers of `width`
    with dropout, and the classifier.

    Sizes are those of KT-pFL's code (Zhang et al., NeurIPS 2021), one of its four architectures:
    torchvision's channels 64, 192, 384, 256, 256 with small kernels, for images of at least 15x15
    pixels. 32x32 colour images and 10 classes make 23,272,266 parameters.

    Args:
        width: number of outputs of each of the two fully connected layers. 4096: Krizhevsky et al.
        dropout: probability of dropout before each of these layers. 0.5: Krizhevsky et al.
    """

    head = "classifier"

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        width: int = 4096,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        # the strided convolution rounds up, and each of the three poolings down
        sides = [(side + 1) // 2 // 8 for side in input_shape[1:]]
        is_large = len(input_shape) == 3 and min(sides, default=0) >= 1
        requirement = (
            f"it needs images of at least 15x15 pixels, but the data are {(*input_shape,)}"
        )
        check("model", "AlexNet", is_large, requirement)
        check_sizes("width", width)
        check("model.init_args.dropout", dropout, 0 <= dropout < 1, "it must lie in [0, 1)")
        self.conv1 = nn.Conv2d(
            input_shape[0],
            64,
            3,
            stride=2,
            padding=1,
        )
        self.conv2 = nn.Conv2d(64, 192, 3, padding=1)
        self.conv3 = nn.Conv2d(192, 384, 3, padding=1)
        self.conv4 = nn.Conv2d(384, 256, 3, padding=1)
        self.conv5 = nn.Conv2d(256, 256, 3, padding=1)
        self.fc1 = nn.Linear(256 * sides[0] * sides[1], width)
        self.fc2 = nn.Linear(width, width)
        self.classifier = nn.Linear(width, num_classes)
        self.pool = nn.MaxPool2d(2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Images [b, channels, height, width] to logits [b, num_classes]."""
        x = self.pool(self.conv1(x).relu())
        x = self.pool(self.conv2(x).relu())
        x = self.conv4(self.conv3(x).relu()).relu()
        x = self.pool(self.conv5(x).relu())
        x = self.fc1(self.dropout(x.flatten(1))).relu()
        x = self.fc2(self.dropout(x)).relu()
        return self.classifier(x)
