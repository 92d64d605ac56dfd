"""What our methods make of a client's samples, all in one place: see `Method.private_phases`."""

from __future__ import annotations

from typing import Any

from fl_lightning.methods.common.beside import of_class

Phases = tuple[float | None, ...]
"""Epochs of each phase of a round; None: the federation's length."""

STEPS = "takes steps of its own"
LOSS = "has a loss of its own, and single samples are bounded in the task loss alone"
MEANS = "uploads class means of samples"
SCORES = "uploads class scores"

OTHERWISE = {
    "APFL": STEPS,
    "ClassMeans": MEANS,
    "CrossKAPC": "measures its noise and held-out losses on two halves of the samples",
    "DBE": "uploads the mean feature of samples",
    "FedALA": "learns its mix on samples, in steps of its own",
    "FedAlign": LOSS,
    "FedAS": "aligns the body with class means of samples",
    "FedCAC": "chooses critical numbers by gradients of samples",
    "FedCP": LOSS,
    "FedEM": "weighs components by their losses on samples",
    "FedFomo": "weighs models by their losses on validation samples",
    "FedGen": "uploads class counts of samples",
    "FedMD": SCORES,
    "FEDORA": "measures its relation on samples",
    "FedRoD": "balances its loss by class counts of samples",
    "FLAYER": STEPS,
    "GPFL": "conditions its loss on class shares of samples",
    "IFCA": "chooses its cluster by losses on samples",
    "KNNPer": "predicts from stored features of samples",
    "MOON": LOSS,
    "PartialPooling": "uploads moments of samples",
    "PerFedAvg": STEPS,
    "PFedFDA": "estimates Gaussians of samples' features",
    "PFedGraph": LOSS,
    "PFedMe": STEPS,
    "SelfKAPC": "measures its noise on two halves of the samples",
}
"""By class: what else than steps of the optimiser down the task loss it makes of samples."""

PHASES = {
    "Ditto": lambda m: (None, m.personal_epochs),
    "FedRep": lambda m: (m.head_epochs, None) if m.head_epochs else (None,),
}
"""By class: the phases of a round, where they are not one of the federation's length."""


def private_phases(method: Any) -> Phases | str:
    """Of one of our methods; a class of one's own must say it itself."""
    if not type(method).__module__.startswith("fl_lightning.methods."):
        return "is a class of your own whose private_phases does not say what it makes of samples"
    phases: Phases | str = of_class(method, PHASES, lambda m: of_class(m, OTHERWISE, (None,)))(
        method
    )
    return phases
