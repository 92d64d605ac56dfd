"""KT-pFL for clients of one architecture: Zhang, Guo, Ma, Wang, Xu, Wu: Parameterized Knowledge
Transfer for Personalized Federated Learning. NeurIPS 2021, appendix C.
"""

from dataclasses import dataclass
from typing import Literal

from fl_lightning.callbacks.cube import CubeSettings, LearnedMatrix
from fl_lightning.methods import (
    Client,
    LogRange,
    Method,
    NonNegativeFloat,
    Payload,
    Phase,
    Phases,
    Relation,
    Traits,
    searched,
)


@dataclass(frozen=True)
class KTPFLModels(Method):
    """Every client starts its round from its own mix of all models, w_n <- sum_m c_nm w_m, with
    learned coefficients c.

    Row n of c minimises ||sum_m c_nm w_m - w_n||^2 + rho ||c_n - 1/N||^2 over the simplex (Eq. 7
    with parameters in place of predictions: ours, the appendix was not available).

    Args:
        rho: weight of the pull of the coefficients towards 1/N. With solver `exact` it is in units
            of the models' mean squared distance from their mean (our choice: one number then fits
            any model); with `step` it is taken as it is. 0.7: the paper's for predictions.
        solver: `exact`, or a `step` of size `eta`, which must be below one over the largest
            eigenvalue of the models' Gram matrix.
        eta: step size. 0.01: paper.
        lam: weight of a proximal term lam ||w_n - sum_m c_nm w_m||^2 in local training. 0: none.
    """

    traits = Traits(family="mixing", judge="after")

    rho: NonNegativeFloat = searched(
        0.7, LogRange(0.07, 7), "a decade around the default: its unit is not the paper's"
    )
    solver: Literal["exact", "step"] = "exact"
    eta: NonNegativeFloat = 0.01
    lam: NonNegativeFloat = 0.0

    def relation(self) -> Relation:
        """Return the learned matrix of coefficients."""
        units: Literal["spread", "absolute"] = "spread" if self.solver == "exact" else "absolute"
        return LearnedMatrix(
            CubeSettings(
                lam=1.0, beta=2 * self.rho, eta_r=self.eta, solver=self.solver, rho_units=units
            )
        )

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Return one phase with a proximal term of weight lam."""
        return [Phase(objective=client.proximal(payload, self.lam))]
