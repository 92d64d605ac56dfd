"""Every client alone: the lower reference of all personalised methods."""

from dataclasses import dataclass

from fl_lightning.methods import (
    Client,
    Payload,
    Phase,
    Phases,
    PositiveFloat,
    Traits,
    WithoutModels,
)


@dataclass(frozen=True)
class Local(WithoutModels):
    """Nothing is sent; every client trains its own model.

    Args:
        epochs: local epochs that a client trains in all; then it stops, and its model stays what it
            is. None: in every round, as long as with other methods. The KAPC papers: 5 on MNIST, 10
            on CIFAR, beside 50 rounds of 5.
    """

    traits = Traits(family="training alone", judge="after")
    epochs: PositiveFloat | None = None

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Until `epochs` are spent."""
        return [Phase(budget=self.epochs)]
