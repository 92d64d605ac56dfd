"""The learned relation cube R[client, layer, client] of KAPC, and the small problem that each of
its rows solves.

For fixed models, row r of client i in one layer minimises

    lam ||r W - w_i||^2 + (beta / 2) ||r - p||^2        (KAPC, AAAI, Eq. 10, with prior p = 1/N)

Everything is done on the Gram matrix W W^T (n x n), never on models: `Gram.centred` is C below.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fl_lightning.callbacks.relations import Relation, check_finite
from fl_lightning.callbacks.simplex import simplex_rows, to_simplex
from fl_lightning.configuration.ranges import NonNegativeFloat, NonNegativeInt
from fl_lightning.configuration.search import LogRange, searched
from fl_lightning.core import Gram, RelationInputs, RunContext, Tensors
from fl_lightning.foundation import log
from fl_lightning.foundation.errors import RunFailed
from fl_lightning.foundation.rng import numpy_rng


def gradient(
    R: Tensor,
    gram: Gram,
    prior: Tensor,
    lam: float,
    beta: float | Tensor,
    places: Tensor,
) -> Tensor:
    """Return the gradient of the objective that each row r of the cube minimises, 2 lam (r G - G_i)
    + beta (r - p) (KAPC, AAAI, Eq. 12). It is computed from the centred Gram matrix, in which the
    models' large common part costs no precision.

    Args:
        R: rows r, (L, m, n).
        gram: inner products G of the n sources' models.
        prior: p, (n,).
        lam: weight of the proximal term.
        beta: weight of the prior: a number, or one for each layer, (L, 1, 1).
        places: for each of the m rows the index i of its client among the sources, (m,).

    Returns:
        Shape (L, m, n), float64.
    """
    D = R - torch.nn.functional.one_hot(places, R.shape[-1])
    excess = D.sum(-1, keepdim=True)  # 0 while rows sum to 1
    shift = (D @ gram.offset[:, :, None]) + gram.mean_square[:, None, None] * excess
    proximal = D @ gram.centred + excess * gram.offset[:, None, :] + shift
    return 2 * lam * proximal + beta * (R - prior)


def normalised(R: Tensor, projection: str) -> Tensor:
    """Return the rows after a gradient step, made to sum to 1.

    Args:
        R: rows (L, m, n).
        projection: `simplex`: the nearest point of the simplex; `clamp`: negative weights to 0,
            then division by the sum; `divide`: division by the sum; `none`: rows are not changed.
    """
    if projection == "simplex":
        return to_simplex(R)
    if projection == "clamp":
        R = R.clamp_min(0.0)
    return R if projection == "none" else R / R.sum(-1, keepdim=True)


def exact(
    C: Tensor,
    prior: Tensor,
    rho: Tensor,
    places: Tensor,
) -> Tensor:
    """Return the rows that minimise ||r W - w_i||^2 + rho ||r - p||^2 with sum r = 1 and r >= 0.

    Without r >= 0 the solution is closed: R = I - rho (I - 1 p^T)(C + rho I)^-1. Rows with negative
    entries are solved by `simplex_rows`.

    Args:
        C: centred Gram matrices (L, n, n).
        prior: p, (n,), summing to 1.
        rho: beta / (2 lam) of each layer, (L,); 0 gives the identity, infinity the prior.
        places: numbers of the m sources whose rows are returned, (m,).

    Returns:
        Rows (L, m, n), float64.
    """
    L = C.shape[0]
    n = C.shape[-1]
    eye = torch.eye(n, dtype=C.dtype)
    R = torch.empty(L, len(places), n, dtype=C.dtype)
    for layer in range(L):
        strength = float(rho[layer])
        if strength <= 1e-14 * float(C[layer].diagonal().max()):  # 0, or lost beside C in float64
            R[layer] = eye[places]
        elif strength == math.inf:
            R[layer] = prior
        else:
            H = C[layer] + strength * eye
            # (I - 1 p^T) H^-1, H symmetric
            closed = eye - strength * torch.linalg.solve(H, (eye - prior).T).T
            R[layer] = closed[places]
            negative = (R[layer] < 0).any(-1)
            if negative.any():
                R[layer, negative] = simplex_rows(H, C[layer][places[negative]] + strength * prior)
    return R


@dataclass(frozen=True)
class CubeSettings:
    """Settings of a learned relation.

    Args:
        lam: weight of KAPC's proximal term, which pulls local training towards the received mix. 1:
            the ablation's middle value (the headline tables do not state it).
        beta: weight of the prior on the relation. 0.01: the ablation's middle value at alpha = 0.1.
        eta_r: step size on the relation. 0.01: paper.
        relation_steps: steps on the relation in a round, E_r. 1: paper.
        projection: how a row is brought back to sum 1 after a step; `none` is unstable
            (docs/decisions/0004).
        solver: `step`: gradient steps, as in the paper; `exact`: the solution of each row's
            problem, which depends on beta / (2 lam) = rho only.
        prior: p is 1/N (`uniform`, paper) or each client's share of the training samples
            (`samples`).
        rho_units: `absolute` (paper), or rho in units of each layer's `spread`, its mean squared
            distance from the mean model (exact solver only).
        partial: how the rows of a cohort, which have weights for its members only, are written back
            into the cube: `preserve` keeps the sum of the members' weights in the cube's row,
            `literal` is the journal's Alg. 5 (docs/decisions/0004).
        init: rows begin at 1/N (`uniform`), or each is drawn evenly from the simplex (`random`: the
            papers). uniform: our choice, since with a step of 0.01 rows hardly move: random ones
            stay random (docs/decisions/0004).
        rho: strength of the prior in the exact problem; null: beta / (2 lam). If rho is given, lam
            may be 0: rows are learned without a proximal term.
        sources: the clients whose last uploads are mixed. `cohort`: the round's clients; the
            initial model stands for a client that has not uploaded yet (journal, Alg. 5).
            `uploaded`: all clients that have uploaded so far, and the receiver itself.
    """

    lam: NonNegativeFloat = searched(1.0, LogRange(0.05, 3), "the papers' ablation: 0.05 to 3")
    beta: NonNegativeFloat = searched(
        0.01, LogRange(0.005, 10), "the papers' ablation: 0.005 to 10"
    )
    eta_r: NonNegativeFloat = searched(
        0.01, LogRange(0.01, 1), "the papers', to 100 times, where the relation moves"
    )
    relation_steps: NonNegativeInt = 1
    projection: Literal["simplex", "clamp", "divide", "none"] = "simplex"
    solver: Literal["step", "exact"] = "step"
    prior: Literal["uniform", "samples"] = "uniform"
    rho_units: Literal["absolute", "spread"] = "absolute"
    partial: Literal["preserve", "literal"] = "preserve"
    init: Literal["uniform", "random"] = "uniform"
    sources: Literal["cohort", "uploaded"] = "cohort"
    rho: NonNegativeFloat | None = None

    @property
    def strength(self) -> float:
        """The prior's strength in the exact problem: rho, or beta / (2 lam)."""
        if self.rho is not None:
            return self.rho
        return self.beta / (2 * self.lam) if self.lam > 0 else math.inf


class LearnedCube(Relation):
    """KAPC's relation: a row for each client and layer, updated each round by steps or exactly, on
    the cohort's last-known models.

    If only a part of the clients takes part, the cohort's slice of a row is brought to sum 1 and
    updated. `preserve` writes it back scaled to its former sum; `literal` (the journal's Alg. 5)
    writes it back as it is and divides the whole row by its sum, which moves weight to the client
    itself without any gradient.
    """

    per_layer = measures = True

    def __init__(self, settings: CubeSettings) -> None:
        self.settings = settings
        self.sources = settings.sources
        self.sums_to_one = settings.solver == "exact" or settings.projection != "none"
        self._terms: dict[int, tuple[float, float]] = {}
        """By receiver, of its last round: its prior's part of the objective, and the squared norm
        of its gradient."""
        self._note = ""
        """A line for the user with the first weights."""

    def on_fit_start(self, run: RunContext) -> None:
        """Prepare a log line that states rho. It is printed when the first weights are computed, so
        that a run whose settings are refused before does not print it."""
        settings = self.settings
        units = " of each layer's spread" if settings.rho_units == "spread" else ""
        name = "rho = beta / (2 lam)" if settings.rho is None else "rho"
        if run.is_main:
            strength = f"{name} = {settings.strength:g}{units}"
            self._note = f"relation: solver {settings.solver}, {strength}"

    def init_server(self, run: RunContext) -> Tensors:
        """Return `relation`, the cube (N, layers, N): all 1/N, or rows drawn evenly from the
        simplex.

        Rows do not begin at the identity (a client's own model alone), since gradient steps would
        never leave it.
        """
        n = run.clients
        layers = len(run.layer_names) if self.per_layer else 1
        if self.settings.init == "random":
            drawn = numpy_rng(run.config.seed, "relation rows").dirichlet(np.ones(n), (n, layers))
            return {"relation": torch.from_numpy(drawn)}
        return {"relation": torch.full((n, layers, n), 1.0 / n, dtype=torch.float64)}

    def weights(self, inputs: RelationInputs) -> Tensor:
        """Update the cohort's rows in the cube, which is in the server's memory, and return them,
        (L, m, n).

        Raises:
            RunFailed: the rows are no longer finite (an unstable step without a projection).
        """
        if self._note:
            log.say(self._note)
            self._note = ""
        settings = self.settings
        cube = inputs.memory["relation"]
        receivers = torch.tensor(inputs.receivers)
        sources = torch.tensor(inputs.sources)
        part = cube[receivers][:, :, sources].transpose(0, 1)  # (L, m, n)
        mass = part.sum(-1, keepdim=True)
        if self._unbound(len(sources), cube):
            mass = torch.ones_like(mass)
        prior = torch.full_like(inputs.samples, 1.0 / len(sources))
        if settings.prior == "samples":
            prior = inputs.samples / inputs.samples.sum()
        R = torch.where(mass > 1e-12, part / mass.clamp_min(1e-12), prior)
        gram = self._gram(inputs)
        check_finite(gram.centred)
        beta = self._beta(gram)
        slope = partial(
            gradient,
            gram=gram,
            prior=prior,
            lam=settings.lam,
            beta=beta,
            places=inputs.places,
        )
        step = slope(R)
        squares = step.square().sum((0, 2))
        if settings.solver == "exact":
            R = exact(gram.centred, prior, self._rho(gram), inputs.places)
        else:
            for k in range(settings.relation_steps):
                if k > 0:
                    step = slope(R)
                R = normalised(R - settings.eta_r * step, settings.projection)
        if not R.isfinite().all():
            step_words = f"eta_r {settings.eta_r} with projection {settings.projection}"
            raise RunFailed(
                f"the relation is no longer finite: {step_words} is unstable; use projection "
                f"simplex, or a smaller eta_r"
            )
        self._write_back(
            cube,
            R,
            mass,
            receivers,
            sources,
        )
        terms = (beta / 2 * (R - prior).square()).sum((0, 2))
        for client, term, square in zip(inputs.receivers, terms, squares, strict=True):
            self._terms[client] = float(term), float(square)
        return R

    def _gram(self, inputs: RelationInputs) -> Gram:
        return inputs.gram()

    def _rho(self, gram: Gram) -> Tensor:
        """Return the prior's strength in each layer's exact problem, (L,)."""
        spread = _spread(gram)
        rho = torch.full_like(spread, self.settings.strength)
        if self.settings.rho_units == "absolute":
            return rho
        return torch.where(spread > 0, rho * spread, math.inf)

    def _beta(self, gram: Gram) -> float | Tensor:
        """Return the prior's weight: `beta`, or for the exact solver 2 lam `rho` if that is given;
        with `rho_units` spread, times each layer's spread, (L, 1, 1)."""
        settings = self.settings
        if settings.solver == "step":
            return settings.beta
        beta = settings.beta if settings.rho is None else 2 * settings.lam * settings.rho
        if settings.rho_units == "absolute":
            return beta
        return beta * _spread(gram)[:, None, None]

    def measured(self, clients: list[dict[str, Any]]) -> dict[str, float]:
        """Return KAPC's objective over the round's clients (AAAI, Eq. 7 and 8, without their m_i /
        m), its parts, and the norms of its gradients.

        F = sum_i [ f_i(w_i) + lam sum_l ||w_i^l - s_i^l||^2 + (beta / 2) ||r_i - p||^2 ]. The first
        two terms are means over the client's local steps (train_loss), and r_i are the rows by
        which s_i was mixed.
        """
        terms = [self._terms[c["client"]] for c in clients]
        prior = math.fsum(term for term, _ in terms)
        relation_square = math.fsum(square for _, square in terms)
        model_square = math.fsum(c.pop("gradient_norm", 0.0) ** 2 for c in clients)
        metrics: dict[str, float] = {}
        if all("train_loss" in c for c in clients):  # a client that took no step has none
            metrics["objective"] = math.fsum(c["train_loss"] for c in clients) + prior
            metrics["objective_coaching"] = math.fsum(c["coaching_loss"] for c in clients)
        return metrics | {
            "objective_relation": prior,
            "gradient_norm_relation": math.sqrt(relation_square),
            "gradient_norm_models_proxy": math.sqrt(model_square),
        }

    def flops(
        self,
        layers: int,
        receivers: int,
        sources: int,
    ) -> int:
        """Return the operations of the steps, or of the exact closed form (n^3 solves; further work
        on rows with negative entries is not counted)."""
        n = sources
        if self.settings.solver == "exact":
            return layers * (8 * n**3 // 3 + 3 * n * n)
        return self.settings.relation_steps * layers * receivers * (2 * n * n + 10 * n)

    def _unbound(
        self,
        sources: int,
        cube: Tensor,
    ) -> bool:
        """Return whether rows keep the sum that the steps gave them: without a projection, if all
        clients take part."""
        return not self.sums_to_one and sources == cube.shape[0]

    def _write_back(
        self,
        cube: Tensor,
        R: Tensor,
        mass: Tensor,
        receivers: Tensor,
        sources: Tensor,
    ) -> None:
        rows = cube[receivers]
        if self.settings.partial == "literal":
            rows[:, :, sources] = R.transpose(0, 1)
            rows /= 1 if self._unbound(len(sources), cube) else rows.sum(-1, keepdim=True)
        else:
            fair = len(sources) / cube.shape[0]  # for a slice whose weight had gone to 0
            has_mass = mass > 1e-12
            rows = torch.where(has_mass.transpose(0, 1), rows, rows * (1 - fair))
            rows[:, :, sources] = (R * torch.where(has_mass, mass, fair)).transpose(0, 1)
        cube[receivers] = rows


def _spread(gram: Gram) -> Tensor:
    """Return each layer's mean squared distance of the models from their mean, (L,)."""
    return gram.centred.diagonal(dim1=1, dim2=2).mean(-1)


class LearnedMatrix(LearnedCube):
    """KAPC's relation with one row for each client, for all layers together.

    Running statistics are mixed by the same rows; rows are learned from parameters alone.
    """

    per_layer = measures = False

    def _gram(self, inputs: RelationInputs) -> Gram:
        return inputs.gram("parameters")

    def measured(self, clients: list[dict[str, Any]]) -> dict[str, float]:
        """Return no metrics: KAPC's objective needs a row for each layer."""
        return {}
