"""A small vision transformer."""

from collections.abc import Sequence

from torch import Tensor, nn
from torchvision.models import VisionTransformer

from fl_lightning.configuration.config import check
from fl_lightning.models.base import SelfAttention, check_heads


class ViT(nn.Module):
    """Torchvision's vision transformer, small: 6 layers of width 128 with 4 heads, on patches of
    4x4 pixels.

    The architecture is Dosovitskiy et al.'s (ICLR 2021), with their ratio of 4 between the widths
    of the MLP and of the layers. Work on transformers for 32x32 pixels uses patches of 4x4 (Lee et
    al., 2021); depth and width are our choice. With them, adapters of rank 4 for queries and values
    have 12,288 numbers.

    Args:
        patch: side of a patch, in pixels, of which the image's sides are multiples.
        depth: number of layers.
        width: length of a token's vector, a multiple of `heads`.
        dropout: probability of dropout at the tokens and in the MLPs. 0: our choice; small
            federations lack steps rather than data.
    """

    head = "net.heads.head"
    adapter_targets = ("query", "value")

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        patch: int = 4,
        depth: int = 6,
        width: int = 128,
        heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        shape = (*input_shape,)
        square = len(shape) == 3 and shape[1] == shape[2] and patch >= 1 and shape[1] % patch == 0
        requirement = f"images must be square, with a side that is a multiple of it, not {shape}"
        check("model.patch", patch, square, requirement)
        check_heads(heads, width)
        net = VisionTransformer(
            shape[1], patch, depth, heads, width, 4 * width, dropout, num_classes=num_classes
        )
        if shape[0] != 3:
            net.conv_proj = nn.Conv2d(shape[0], width, patch, patch)
        for layer in net.encoder.layers:
            layer.self_attention = SelfAttention(width, heads)
        # with torchvision's zeros, all scores and earlier gradients would begin as 0
        nn.init.trunc_normal_(net.heads.head.weight, std=0.02)
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """Images [b, channels, side, side] to logits [b, num_classes]."""
        scores: Tensor = self.net(x)
        return scores
