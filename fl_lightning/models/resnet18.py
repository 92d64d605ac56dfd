"""ResNet-18 (He et al., CVPR 2016), torchvision's architecture without weights."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet

from fl_lightning.configuration.config import check


class ResNet18(ResNet):
    """ResNet-18. On colour images with 10 classes it has 11,181,642 parameters with the 7x7 stem
    and 11,173,962 with the 3x3 stem.

    Args:
        stem: the first convolution. `7x7` (stride 2, then max-pooling): ImageNet's and, as the
            bytes in its papers show, KAPC's on 32x32 images. `3x3` (stride 1, no max-pooling): the
            usual one for CIFAR, and KT-pFL's.
        representation: width of a linear layer before the classifier; null: no such layer. FedHKD's
            is 64, with 11,209,994 parameters.
    """

    head = "fc"

    def __init__(
        self,
        num_classes: int,
        input_shape: Sequence[int],
        stem: Literal["7x7", "3x3"] = "7x7",
        representation: int | None = None,
    ) -> None:
        requirement = f"it needs images, but the data are {(*input_shape,)}"
        check("model", "ResNet18", len(input_shape) == 3, requirement)
        check("model.init_args.stem", stem, stem in ("7x7", "3x3"), "choose 7x7 or 3x3")
        is_width = representation is None or representation >= 1
        requirement = "it must be at least 1, or null"
        check("model.init_args.representation", representation, is_width, requirement)
        super().__init__(BasicBlock, [2, 2, 2, 2], num_classes=num_classes)
        if stem == "3x3":
            self.conv1 = self._stem(input_shape[0], kernel_size=3, stride=1)
            self.maxpool = nn.Identity()
        elif input_shape[0] != 3:
            self.conv1 = self._stem(input_shape[0], kernel_size=7, stride=2)
        if representation is not None:
            self.fc = nn.Linear(512, representation)
            self.classifier = nn.Linear(representation, num_classes)
            self.head = "classifier"

    def forward(self, x: Tensor) -> Tensor:
        """Class scores (batch, classes) of images (batch, channels, height, width)."""
        y: Tensor = super().forward(x)
        return self.classifier(y) if self.head == "classifier" else y

    @staticmethod
    def _stem(
        channels: int,
        kernel_size: int,
        stride: int,
    ) -> nn.Conv2d:
        conv = nn.Conv2d(
            channels,
            64,
            kernel_size,
            stride,
            padding=kernel_size // 2,
            bias=False,
        )
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        return conv
