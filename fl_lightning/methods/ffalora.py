"""FFA-LoRA: Sun, Li, Li, Ding: Improving LoRA in Privacy-preserving Federated Learning. ICLR
2024."""

from dataclasses import dataclass

from fl_lightning.core.newcomer import GLOBAL
from fl_lightning.methods import (
    Block,
    Client,
    Method,
    Payload,
    Phase,
    Phases,
    RunContext,
    Scope,
    Traits,
)
from fl_lightning.methods.common.adapters import check_adapters, is_a


@dataclass(frozen=True)
class FFALoRA(Method):
    """FedAvg on the B of low-rank adapters under one A, which stays as it was drawn: the mean of B
    A is mean B times A.

    Neither trained nor sent, A is everybody's, drawn from the run's seed. The mean is by samples.
    """

    traits = Traits(family="one global model", judge="global", still=True, newcomers=GLOBAL)

    def check(self, run: RunContext) -> None:
        """There must be adapters."""
        check_adapters(run)

    def scope(self, block: Block) -> Scope:
        """A is never sent: everybody has it."""
        return "personal" if is_a(block) else "shared"

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Trains all but A, which is left out of the optimiser, whose decay or momentum would move
        it."""
        return [Phase(trains=client.mask(lambda b: not is_a(b)))]
