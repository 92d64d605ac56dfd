"""Partial pooling: a linear model with shared weights and a penalised deviation of each client; the
standard of multilevel statistics (Gelman, Hill: Data Analysis Using Regression and
Multilevel/Hierarchical Models, 2007)."""

import itertools
import math
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn

from fl_lightning.data import units
from fl_lightning.foundation.rng import key, numpy_rng
from fl_lightning.methods import (
    Beside,
    Client,
    Payload,
    Payloads,
    Phases,
    Rule,
    RunContext,
    Server,
    Tensors,
    Traits,
    WithoutModels,
    check,
)
from fl_lightning.models.mlp import MLP

PENALTIES = (0.3, 3.0, 30.0, 300.0, 1e4)
"""Penalties of deviations, in samples that weigh as much: from nearly separate models to nearly one
model."""
INTERCEPTS = (1.0, 0.01)
"""Factors on the penalty for the intercept's deviation: levels of clients often differ more than
slopes."""
CANDIDATES = list(itertools.product(PENALTIES, INTERCEPTS))
FIRST = CANDIDATES.index((30.0, 1.0))
"""The candidate that is scored before losses are known."""
FOLDS = 5
"""Parts of a client's training samples, by whose held-out losses a candidate is chosen."""
ALL = FOLDS
"""Index of the fit on all samples, after the fits without one part."""
SHARED = 1.0
"""Penalty of the shared slopes, worth one sample, so that they are defined if columns repeat."""
MOST_FEATURES = 100
"""Greatest number of features; the uploaded moments grow with its square."""


@dataclass(frozen=True)
class PartialPooling(WithoutModels):
    """A linear or multinomial logistic model w + d_i with a penalty (lam/2) ||d_i||^2 for each
    client. No model is sent; clients upload moments of samples, which the server adds up.

    Each client has weights v_i = w + d_i. It bounds its loss from above by a parabola that touches
    the loss at its last v_i (in a regression the loss is the parabola), and sets v_i to the minimum
    of parabola + (lam/2) ||v - w||^2 over v. The value of this minimum is a quadratic function of
    the shared weights w, w^T H w / 2 - t^T w + const. The client uploads H (`hessians`) and t
    (`targets`). The server sets w to the minimum of the sum of these functions, which is an exact
    step of the joint fit.

    lam is chosen among candidates, by losses on samples left out. A candidate is a value of
    `PENALTIES` for lam, and a factor of `INTERCEPTS` on the intercept's lam. It is fitted six
    times: to all samples, and without each of five parts of every client's samples. (The samples of
    one unit, such as a patient, are in one part.) The best candidate has the least summed loss on
    the parts left out. Scored: v_i of its fit to all samples.

    A linear model replaces the configured one.
    """

    traits = Traits(
        family="two models",
        judge="after",
        statistics=True,
        several=False,
        client_memory=True,
        newcomers=Rule("shared weights and its own deviation", gives=False),
        receives_beside="weights of linear models that all share",
        sample_use="uploads moments of samples",
    )

    def build(self, model: nn.Module, num_classes: int) -> nn.Module:
        """Return a linear model with the inputs of the first linear layer of `model`."""
        layers = (m for m in model.modules() if isinstance(m, nn.Linear))
        first = next(layers, nn.Linear(1, 1))
        return MLP([first.in_features], num_classes, hidden=())

    def check(self, run: RunContext) -> None:
        """Raise `BadInput` for texts, for a network whose first linear layer does not take the
        sample's numbers directly, or for too many features."""
        group = run.groups[0]
        features = math.prod(run.data.input_shape)
        is_linear = group.layout.blocks[0].shape == (run.data.num_classes, features)
        no_text = run.data.text is None
        check("method", "partialpooling", no_text, "it takes no texts; use another method")
        check(
            "model",
            group.name,
            is_linear,
            "partialpooling takes a sample's numbers directly; use a model such as mlp",
        )
        check(
            "data.columns",
            ...,
            features <= MOST_FEATURES,
            f"partialpooling takes {MOST_FEATURES} features, there are {features}; select fewer",
        )

    def _shape(self, run: RunContext) -> tuple[int, int, int, int]:
        """The shape of the weights: candidates, fits, outputs, and features with the intercept."""
        width = math.prod(run.data.input_shape) + 1
        return len(CANDIDATES), FOLDS + 1, run.data.num_classes, width

    def init_server(self, run: RunContext) -> Tensors:
        """The shared weights of each candidate's fits, all 0, and the index of the candidate that
        is scored."""
        shared = torch.zeros(self._shape(run), dtype=torch.float64)
        return {"pooling.shared": shared, "pooling.best": torch.tensor(FIRST)}

    def init_client(self, run: RunContext) -> Tensors:
        """The client's weights of each candidate's fits, all 0."""
        return {"pooling.own": torch.zeros(self._shape(run), dtype=torch.float64)}

    def broadcast(self, server: Server) -> Payloads:
        """Send the shared weights and the index of the best candidate."""
        payloads = super().broadcast(server)
        for payload in payloads.values():
            payload.extra |= {name: server.memory[f"pooling.{name}"] for name in ("shared", "best")}
        return payloads

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Take the client's part of one step of the joint fit, in closed form, and set its model;
        return no phase."""
        fits = ClientFits(client)
        weights = fits.step(client.memory["pooling.own"], payload.extra["shared"].cpu())
        client.memory["pooling.own"] = weights
        client.scratch |= fits.uploaded(weights)
        model = client["model"]
        scored = weights[int(payload.extra["best"]), ALL].to(model)
        weight, bias = client.layout.blocks
        model[weight.columns] = scored[:, :-1].flatten()
        model[bias.columns] = scored[:, -1]
        return []

    def beside(self) -> dict[str, Beside]:
        return {
            "hessians": Beside("moments", "second moments of the client's features", None),
            "targets": Beside("moments", "moments of its features and targets", None),
            "losses": Beside("losses", "the client's losses on samples set apart", None),
        }

    def upload(self, client: Client, payload: Payload) -> Payload:
        """Upload H and t of each candidate's fits (`hessians`, `targets`; see the class), and the
        candidates' `losses` on samples left out."""
        upload = super().upload(client, payload)
        upload.extra |= client.scratch
        return upload

    def aggregate(self, server: Server) -> None:
        """Solve (sum of H + a weak penalty) w = sum of t for the shared weights w of each
        candidate's fits, and choose the candidate with the least loss."""
        super().aggregate(server)
        sums = {}
        for name in self.beside():
            uploads = (server.statistics[c][name].double() for c in server.answered)
            sums[name] = reduce(torch.add, uploads)
        penalty = torch.full(sums["hessians"].shape[-1:], SHARED, dtype=torch.float64)
        penalty[-1] = 1e-6
        hessians = sums["hessians"] + torch.diag(penalty)
        server.memory["pooling.shared"] = torch.linalg.solve(hessians, sums["targets"].mT).mT
        server.memory["pooling.best"] = sums["losses"].argmin()


class ClientFits:
    """A client's samples, and its part in each candidate's fits: on all samples and without each
    part."""

    def __init__(self, client: Client) -> None:
        run = client.run
        self.classes = run.data.num_classes
        xs, ys = zip(*client.data.train.batches(4096), strict=True)
        x = torch.cat(xs).flatten(1).double().cpu()
        y = torch.cat(ys).cpu()
        self.x = torch.cat([x, x.new_ones(len(x), 1)], 1)
        if self.classes == 1:
            self.y = y.double()[:, None]
            strata = torch.zeros_like(y).long()
            bound = 1.0
        else:
            self.y = nn.functional.one_hot(y, self.classes).double()
            strata = y
            bound = 0.5  # upper bound on a softmax's curvature
        rng = numpy_rng(key(run.config.seed, "pooling"), str(client.id))
        parts = units.folds(run.data.unit_ids(client.id)[0], strata.numpy(), FOLDS, rng)
        self.left_out = torch.from_numpy(parts)[None] == torch.arange(FOLDS + 1)[:, None]
        """(fits, n): the samples that a fit leaves out; the fit `ALL` leaves out none."""
        weights = (~self.left_out).double()
        self.curvature = bound * torch.einsum("fn,np,nq->fpq", weights, self.x, self.x)
        slopes, ratios = torch.tensor(CANDIDATES, dtype=torch.float64).T
        penalty = slopes[:, None].repeat(1, self.x.shape[1])
        penalty[:, -1] *= ratios
        self.penalty: Tensor = penalty[:, None, None]
        """Penalty of each candidate and feature, (candidates, 1, 1, features)."""
        self.penalties = torch.diag_embed(penalty)[:, None]
        """The same penalties as diagonal matrices."""
        self.inverse = torch.linalg.inv(self.curvature + self.penalties)

    def _residuals(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Predictions minus targets (candidates, fits, n, outputs), and the loss of each sample."""
        outputs = self.x @ weights.mT
        if self.classes == 1:
            residuals = outputs - self.y
            return residuals, residuals.square().sum(-1)
        logs = outputs.log_softmax(-1)
        return logs.exp() - self.y, -(logs * self.y).sum(-1)

    def _pull(self, weights: Tensor) -> Tensor:
        """The parabola's Hessian times `weights`, minus the gradient at `weights`."""
        residuals, _ = self._residuals(weights)
        fitted = residuals * (~self.left_out)[..., None]
        return weights @ self.curvature - fitted.mT @ self.x

    def step(self, weights: Tensor, shared: Tensor) -> Tensor:
        """Minimise the parabola at `weights` plus the penalty of the distance to `shared`; return
        the client's new weights.

        Args:
            weights: the client's last ones, (candidates, fits, outputs, features).
            shared: the server's, of the same shape.
        """
        step: Tensor = (self._pull(weights) + self.penalty * shared) @ self.inverse
        return step

    def uploaded(self, weights: Tensor) -> Tensors:
        """Return the tensors that the server sums over clients.

        Returns:
            `hessians` H and `targets` t of the client's minimum as a function of the shared
            weights, w^T H w / 2 - t^T w + const: (candidates, fits, features, features) and
            (candidates, fits, outputs, features). `losses` (candidates,): summed over the samples
            that a candidate's fits leave out.
        """
        _, losses = self._residuals(weights)
        hessians = self.penalties - self.penalty.mT * (self.inverse * self.penalty)
        targets = (self._pull(weights) @ self.inverse) * self.penalty
        losses = (losses * self.left_out).sum((1, 2))
        return {"hessians": hessians, "targets": targets, "losses": losses}
