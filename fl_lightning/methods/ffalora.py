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
    """FedAvg on the B of low-rank adapters; all clients share one A, which is fixed as drawn, so
    that the mean of B A is mean B times A.

    A is drawn from the run's seed, the same for all clients, and neither trained nor sent. The mean
    is by samples.
    """

    traits = Traits(family="one global model", judge="global", still=True, newcomers=GLOBAL)

    def check(self, run: RunContext) -> None:
        """Raise `BadInput` unless the networks have adapters."""
        check_adapters(run)

    def scope(self, block: Block) -> Scope:
        return "personal" if is_a(block) else "shared"

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Return one phase that trains all but A. A is left out of the optimiser, whose weight
        decay or momentum would change it."""
        return [Phase(trains=client.mask(lambda b: not is_a(b)))]
