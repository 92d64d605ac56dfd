"""KAPC with a relation that sets its own strength from each client's measured noise (ours)."""

from dataclasses import dataclass

from fl_lightning.callbacks.measured import MeasuredCube
from fl_lightning.methods import (
    Beside,
    Client,
    NonNegativeFloat,
    OwnStatistics,
    Payload,
    Phase,
    Phases,
    Range,
    Relation,
    Rule,
    Traits,
    UnitInterval,
    searched,
)
from fl_lightning.methods.common.halves import noise_of, step_of, train_halves


@dataclass(frozen=True)
class SelfKAPC(OwnStatistics):
    """Every client starts, layer by layer, from its own mix of all models; a client with a noisier
    model takes more from others.

    Row r_i minimises ||r W - w_i||^2 + 2 kappa (r Sigma)_i over the simplex (Mallows' Cp for a
    mix), where Sigma is the covariance of the uploads' noise. In its first round a client trains
    two models on two random halves of its data, with half batches, and uploads their mean, whose
    variance is ||w_A - w_B||^2 / 4. This needs no extra passes over the data.

    Args:
        kappa: factor of the noise; 1 is Mallows'. 1.5: our choice, on validation data
            (docs/decisions/0024).
        keep: share of the received model's noise that is left after local training. 0.4: our
            choice, on validation data (docs/decisions/0024).
    """

    traits = Traits(
        family="mixing",
        judge="after",
        statistics=True,
        several=False,
        client_memory=True,
        newcomers=Rule(
            "the mean of all, then its own mix by its measured noise; local training",
            remembers=True,
        ),
        sample_use="measures its noise on two halves of the samples",
    )

    kappa: NonNegativeFloat = searched(1.5, Range(1, 3), "the plateau on validation data: 1.5 to 3")
    keep: UnitInterval = 0.4

    def relation(self) -> Relation:
        """Return the relation whose rows follow from measured noise."""
        return MeasuredCube(self.kappa, self.keep)

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Train locally; in the first round on two halves of the samples, whose mean model is
        kept."""
        start = client["model"].clone()
        if client.rounds:
            yield Phase()
        elif halves := (yield from train_halves(client)):
            client.scratch["noise"] = noise_of(client, halves)
        client.scratch["step"] = step_of(client, start)

    def beside(self) -> dict[str, Beside]:
        step = "squared norms of the client's step by layer"
        noise = "variance of the client's step by layer"
        return {
            "step": Beside("step_norms", step, "nonnegative"),
            "noise": Beside("noise_norms", noise, "nonnegative", once=True),
        }

    def upload(self, client: Client, payload: Payload) -> Payload:
        """Also upload squared norms by layer: of the client's step, and in the first round of its
        noise."""
        upload = super().upload(client, payload)
        upload.statistics |= client.scratch
        return upload
