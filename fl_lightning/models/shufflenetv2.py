"""ShuffleNetV2 x1.0 (Ma, Zhang, Zheng, Sun, ECCV 2018), torchvision's architecture without
weights."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn
from torchvision.models.shufflenetv2 import ShuffleNetV2 as Torchvision

from fl_lightning.configuration.config import check


class ShuffleNetV2(Torchvision):
    """ShuffleNetV2 x1.0.

    Args:
        representation: width of a linear layer before the classifier; null: no such layer. FedHKD's
            on SVHN is 32: 1,286,734 parameters with 10 classes.
        stem: the first convolution. `stride2` (then max-pooling): ImageNet's. `stride1` (without
            max-pooling): KT-pFL's code; it keeps the resolution of small images. Both have the same
            parameters.
    """

    head = "classifier"

    def __init__(
        self,
        num_classes: int,
        input_shape: Sequence[int],
        representation: int | None = None,
        stem: Literal["stride2", "stride1"] = "stride2",
    ) -> None:
        requirement = f"it needs images, but the data are {(*input_shape,)}"
        check("model", "ShuffleNetV2", len(input_shape) == 3, requirement)
        is_width = representation is None or representation >= 1
        requirement = "it must be at least 1, or null"
        check("model.init_args.representation", representation, is_width, requirement)
        check(
            "model.init_args.stem",
            stem,
            stem in ("stride2", "stride1"),
            "choose stride2 or stride1",
        )
        super().__init__(
            [4, 8, 4],
            [24, 116, 232, 464, 1024],
            num_classes=representation or 1,
        )
        if input_shape[0] != 3:
            self.conv1[0] = nn.Conv2d(
                input_shape[0],
                24,
                3,
                stride=2,
                padding=1,
                bias=False,
            )
        if stem == "stride1":
            self.conv1[0].stride = (1, 1)
            self.maxpool = nn.Identity()
        if representation is None:
            self.fc = nn.Identity()
        self.classifier = nn.Linear(representation or 1024, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores (batch, classes) of images (batch, channels, height, width)."""
        scores: Tensor = self.classifier(super().forward(x))
        return scores
