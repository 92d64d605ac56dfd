"""FedPer: Arivazhagan, Aggarwal, Singh, Choudhary: Federated Learning with Personalization Layers.
2019."""

from dataclasses import dataclass

from fl_lightning.methods import OwnClassifier, Traits


@dataclass(frozen=True)
class FedPer(OwnClassifier):
    """FedAvg on the body of the model; every client keeps a classifier of its own."""

    traits = Traits(family="partial sharing", judge="after")
