"""FedRep: Collins, Hassani, Mokhtari, Shakkottai: Exploiting Shared Representations for
Personalized Federated Learning. ICML 2021.
"""

from dataclasses import dataclass

from fl_lightning.methods import (
    Client,
    NonNegativeFloat,
    OwnClassifier,
    Payload,
    Phase,
    Phases,
    RunContext,
    Traits,
    check,
)


@dataclass(frozen=True)
class FedRep(OwnClassifier):
    """A shared body and a personal classifier: each client trains the classifier alone first, then
    the body alone.

    Scored after both phases. The kind `before` is the new body with the old classifier, which the
    authors score in all rounds but the last.

    Args:
        head_epochs: epochs of the classifier; 0: it stays as initialised (FedBABU). 10: the
            authors' code. The body trains as long as the federation's configuration says.
    """

    traits = Traits(family="partial sharing", judge="after")

    head_epochs: NonNegativeFloat = 10

    def check(self, run: RunContext) -> None:
        """Raise `BadInput` for a network that is only a classifier."""
        for group in run.groups:
            has_body = any(b.kind == "parameter" and not b.head for b in group.layout.blocks)
            check(
                "model",
                group.name,
                has_body,
                "fedrep needs a body below the classifier; use a model with more layers",
            )

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Yield two phases: the classifier's, then the body's."""
        head = client.mask(lambda b: b.head)
        if self.head_epochs:
            yield Phase(trains=head, epochs=self.head_epochs, purpose="head")
        yield Phase(trains=~head)

    def private_phases(self) -> tuple[float | None, ...]:
        """Return the epochs of each phase, for DP-SGD."""
        return (self.head_epochs, None) if self.head_epochs else (None,)
