"""pFedDF, a reference of Zhang, Guo, Ma, Wang, Xu, Wu: Parameterized Knowledge Transfer for
Personalized Federated Learning. NeurIPS 2021.
"""

from dataclasses import dataclass, replace

from fl_lightning.methods.feddf import FedDF


@dataclass(frozen=True)
class PFedDF(FedDF):
    """FedDF whose clients fine-tune a copy of their architecture's model on their own data before
    it is scored.

    `evaluation.finetune_epochs` sets the length of fine-tuning (the paper: several epochs); 0: as
    long as a round's local training. Arguments are FedDF's.
    """

    traits = replace(FedDF.traits, judge="finetuned")
