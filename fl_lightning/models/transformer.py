"""A small causal transformer over tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fl_lightning.models.base import SelfAttention, check_heads


class _Block(nn.Module):
    """Attention and an MLP, each applied to the normalised input and added to it."""

    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, causal=True)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.gelu = nn.GELU()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention.attended(self.norm1(x))
        x = x + self.dropout(attended)
        hidden = self.gelu(self.up(self.norm2(x)))
        return x + self.dropout(self.down(hidden))


class Transformer(nn.Module):
    """A causal transformer over tokens, as GPT-2's but small: 4 layers of width 128 with 4 heads.

    The sizes are those that nanoGPT trains on Shakespeare's characters on a CPU. If targets are
    next tokens, every position is scored; if a text has one label, only its last position.

    Args:
        depth: number of layers.
        width: length of a token's vector, a multiple of `heads`.
        dropout: probability of dropout after attention and MLPs. 0: nanoGPT's on a CPU.
    """

    head = "classifier"
    adapter_targets = ("query", "value")

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        vocabulary: int,
        per_position: bool = False,
        depth: int = 4,
        width: int = 128,
        heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_heads(heads, width)
        self.per_position = per_position
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(input_shape[0], width)
        self.blocks = nn.Sequential(*[_Block(width, heads, dropout) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, num_classes)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)  # GPT-2's

    def forward(self, x: Tensor) -> Tensor:
        """Tokens int64 [b, T] to logits [b, T, num_classes], or [b, num_classes] if a text has one
        label."""
        places = torch.arange(x.shape[1], device=x.device)
        embedded = self.tokens(x) + self.positions(places)
        y = self.norm(self.blocks(embedded))
        return self.classifier(y if self.per_position else y[:, -1])
