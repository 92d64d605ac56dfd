"""FedSA-LoRA: Guo, Zeng, Wang, Fan, Wang, Qu: Selective Aggregation for Low-Rank Adaptation in
Federated Learning.

ICLR 2025.
"""

from dataclasses import dataclass

from fl_lightning.methods import Block, Method, RunContext, Scope, Traits
from fl_lightning.methods.common.adapters import check_adapters, is_a


@dataclass(frozen=True)
class FedSALoRA(Method):
    """FedAvg on the A of low-rank adapters; each client keeps its B, and its classifier if one is
    trained.

    The classifier is not sent, as in the authors' configuration for GLUE. The mean is by samples.
    """

    traits = Traits(family="partial sharing", judge="after")

    def check(self, run: RunContext) -> None:
        """Raise `BadInput` unless the networks have adapters."""
        check_adapters(run)

    def scope(self, block: Block) -> Scope:
        return "shared" if is_a(block) else "personal"
