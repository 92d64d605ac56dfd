"""The recurrent network of next-character prediction."""

from torch import Tensor, nn


class LSTM(nn.Module):
    """An embedding of 8 numbers and two LSTM layers of 256: FedAvg's on Shakespeare (McMahan et
    al., AISTATS 2017).

    If targets are next tokens, every position is scored; if a text has one label, only its last
    position.
    """

    head = "classifier"

    def __init__(
        self,
        num_classes: int,
        vocabulary: int,
        per_position: bool = False,
        embedding: int = 8,
        width: int = 256,
        layers: int = 2,
    ) -> None:
        super().__init__()
        self.per_position = per_position
        self.tokens = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, width, layers, batch_first=True)
        self.classifier = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens int64 [b, T] to logits [b, T, num_classes], or [b, num_classes] if a text has one
        label."""
        y, _ = self.lstm(self.tokens(x))
        return self.classifier(y if self.per_position else y[:, -1])
