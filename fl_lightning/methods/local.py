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
        epochs: local epochs of a client in the whole run, after which its model stays fixed. null:
            in every round as many as with other methods. The KAPC papers: 5 on MNIST, 10 on CIFAR,
            beside 50 rounds of 5.
    """

    traits = Traits(family="training alone", judge="after")
    epochs: PositiveFloat | None = None

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Return one phase, which trains until `epochs` are used up."""
        return [Phase(budget=self.epochs)]
