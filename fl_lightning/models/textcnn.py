"""The convolutional network of text classification."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fl_lightning.configuration.config import check


class TextCNN(nn.Module):
    """Convolutions of 3, 4 and 5 tokens, the maximum of each over the text, and a classifier (Kim,
    EMNLP 2014).

    Sizes and dropout are the paper's; its word vectors are drawn, not read (its CNN-rand).

    Args:
        embedding: width of a token's vector.
        channels: number of output channels of each convolution.
        widths: lengths of the convolutions' kernels, in tokens.
        dropout: probability of dropout at the classifier's input.
    """

    head = "classifier"

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        vocabulary: int,
        per_position: bool = False,
        embedding: int = 300,
        channels: int = 100,
        widths: Sequence[int] = (3, 4, 5),
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        requirement = "it gives a text one label; for next tokens use transformer or lstm"
        check("model", "textcnn", not per_position, requirement)
        are_widths = bool(widths) and min(widths) >= 1 and max(widths) <= input_shape[0]
        requirement = f"each must lie from 1 to the {input_shape[0]} tokens of a text"
        check("model.widths", list(widths), are_widths, requirement)
        self.tokens = nn.Embedding(vocabulary, embedding)
        self.convs = nn.ModuleList(nn.Conv1d(embedding, channels, width) for width in widths)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(channels * len(widths), num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens int64 [b, T] to logits [b, num_classes]."""
        y = self.tokens(x).transpose(1, 2)
        y = torch.cat([conv(y).relu().amax(2) for conv in self.convs], 1)
        return self.classifier(self.dropout(y))
