"""FedBN: Li, Jiang, Zhang, Kamp, Dou: FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization.

ICLR 2021.
"""

from dataclasses import dataclass

from fl_lightning.methods import Block, Method, Scope, Traits


@dataclass(frozen=True)
class FedBN(Method):
    """FedAvg on everything but normalisation, which every client keeps for itself."""

    traits = Traits(family="partial sharing", judge="after")

    def scope(self, block: Block) -> Scope:
        return "personal" if block.normalisation else "shared"
