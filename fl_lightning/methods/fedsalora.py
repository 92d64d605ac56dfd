"""FedSA-LoRA: Guo, Zeng, Wang, Fan, Wang, Qu: Selective Aggregation for Low-Rank Adaptation in
Federated Learning.

ICLR 2025.
"""

from dataclasses import dataclass

from fl_lightning.methods import Block, Method, RunContext, Scope, Traits
from fl_lightning.methods.common.adapters import check_adapters, is_a


@dataclass(frozen=True)
class FedSALoRA(Method):
    """FedAvg on the A of low-rank adapters; every client keeps its B, and a classifier of its own
    where one trains.

    The classifier stays at home as in the authors' configuration for GLUE. The mean is by samples.
    """

    traits = Traits(family="partial sharing", judge="after")

    def check(self, run: RunContext) -> None:
        """There must be adapters."""
        check_adapters(run)

    def scope(self, block: Block) -> Scope:
        """A alone travels."""
        return "shared" if is_a(block) else "personal"
