"""Small networks that tests build upon."""

from torch import nn


class Small:
    """A body of 64 inputs and 8 features, and its classifier; beside nn.Module or what derives from
    it."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU())
        self.out = nn.Linear(8, 10)

    def forward(self, x):
        return self.out(self.body(x))
