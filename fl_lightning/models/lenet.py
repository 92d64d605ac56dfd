"""LeNet-5 (LeCun, Bottou, Bengio, Haffner, Proc. IEEE 1998) as KT-pFL runs it."""

from collections.abc import Sequence

from fl_lightning.models.cnn import CNN


class LeNet(CNN):
    """Two 5x5 convolutions of 6 and 16 channels, then 120, 84 and the classes, with ReLU and 2x2
    max-pooling.

    Widths, ReLU and max-pooling are those of KT-pFL's code (Zhang et al., NeurIPS 2021), one of its
    four architectures: 44,426 parameters on grey 28x28 images, 62,006 on colour 32x32 images, with
    10 classes.

    Args:
        padding: pixels of zeros around the input of each convolution. 0: KT-pFL's code; images need
            at least 16x16 pixels (with padding 2, 4x4).
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        padding: int = 0,
    ) -> None:
        super().__init__(input_shape, num_classes, (6, 16), padding, (120, 84))
