"""FedAvg: McMahan, Moore, Ramage, Hampson, Aguera y Arcas: Communication-Efficient Learning of Deep
Networks from Decentralized Data. AISTATS 2017.

The global model is scored; `--evaluation.judge after` and `finetuned` score personalised models:
after local training, or after fine-tuning.
"""

from dataclasses import dataclass

from fl_lightning.methods import Method, Traits


@dataclass(frozen=True)
class FedAvg(Method):
    """One global model: the mean of the cohort's models, weighted by training samples."""

    traits = Traits(family="one global model")
