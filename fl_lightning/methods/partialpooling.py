"""Partial pooling: a linear model of shared weights and each client's own deviation, which is
penalised; the standard of multilevel statistics (Gelman, Hill: Data Analysis Using Regression and
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
"""Of deviations, in samples that they weigh as much as: from nearly apart to nearly one model."""
INTERCEPTS = (1.0, 0.01)
"""Times the penalty, for the deviation of the intercept: levels of clients often differ more than
slopes."""
CANDIDATES = list(itertools.product(PENALTIES, INTERCEPTS))
FIRST = CANDIDATES.index((30.0, 1.0))
"""The penalty before anything is known."""
FOLDS = 5
"""Parts of a client's training samples that tell the penalty."""
ALL = FOLDS
"""Index of the fit on all samples, after those without one part."""
SHARED = 1.0
"""Penalty of the shared slopes: a sample's worth, so that they are defined where columns repeat."""
MOST_FEATURES = 100
"""Features of a sample, above which the uploaded moments (features squared) are too large."""


@dataclass(frozen=True)
class PartialPooling(WithoutModels):
    """A linear or multinomial logistic model w + d_i, with (lam/2) ||d_i||^2 for each client; no
    model travels, but moments of samples, which the server adds up.

    Client: its loss is bounded by a parabola at its last weights v_i (for a regression it is one),
    and v_i <- argmin of that + (lam/2) ||v - w||^2. Uploaded: what the minimum over v is as a
    function of w, by Hessian and target. Server: w <- the minimum of the sum, an exact step of the
    joint fit. Each lam of a grid is fitted on all samples and without each of five parts of every
    client (units stay together); the lam with the least summed loss on these parts is what clients
    score. Scored: v_i.

    The model that is configured gives way to a linear one.
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
        """A linear model of what the first layer sees."""
        layers = (m for m in model.modules() if isinstance(m, nn.Linear))
        first = next(layers, nn.Linear(1, 1))
        return MLP([first.in_features], num_classes, hidden=())

    def check(self, run: RunContext) -> None:
        """Samples are few numbers, and the linear model takes them all."""
        group = run.groups[0]
        features = math.prod(run.data.input_shape)
        fits = group.layout.blocks[0].shape == (run.data.num_classes, features)
        requirement = "partialpooling takes samples of plain numbers: a model as mlp, and no texts"
        check("model", group.name, fits and run.data.text is None, requirement)
        requirement = f"partialpooling uploads moments of at most {MOST_FEATURES} features"
        check("data.columns", features, features <= MOST_FEATURES, requirement)

    def _shape(self, run: RunContext) -> tuple[int, int, int, int]:
        """Candidates, parts and all samples, outputs, and features with the intercept."""
        width = math.prod(run.data.input_shape) + 1
        return len(CANDIDATES), FOLDS + 1, run.data.num_classes, width

    def init_server(self, run: RunContext) -> Tensors:
        """The shared weights of every fit, and the candidate with the least loss."""
        shared = torch.zeros(self._shape(run), dtype=torch.float64)
        return {"pooling.shared": shared, "pooling.best": torch.tensor(FIRST)}

    def init_client(self, run: RunContext) -> Tensors:
        """The client's weights of every fit."""
        return {"pooling.own": torch.zeros(self._shape(run), dtype=torch.float64)}

    def broadcast(self, server: Server) -> Payloads:
        """The shared weights, and which candidate is the best."""
        payloads = super().broadcast(server)
        for payload in payloads.values():
            payload.extra |= {name: server.memory[f"pooling.{name}"] for name in ("shared", "best")}
        return payloads

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Take one step of the joint fit here, in closed form: it leaves the model that is scored
        and what `upload` sends. No phase of training follows."""
        fits = Fits(client)
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
        """Declares what is uploaded."""
        return {
            "hessians": Beside("moments", "second moments of the client's features", None),
            "targets": Beside("moments", "moments of its features and targets", None),
            "losses": Beside("losses", "the client's losses on samples set apart", None),
        }

    def upload(self, client: Client, payload: Payload) -> Payload:
        """Moments and held-out losses."""
        upload = super().upload(client, payload)
        upload.extra |= client.scratch
        return upload

    def aggregate(self, server: Server) -> None:
        """The shared weights that minimise the sum over clients."""
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


class Fits:
    """One client's samples, and its part in the joint fit of every candidate, on all samples and
    without each part."""

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
            bound = 0.5  # of a softmax's curvature
        rng = numpy_rng(key(run.config.seed, "pooling"), str(client.id))
        parts = units.folds(run.data.unit_ids(client.id)[0], strata.numpy(), FOLDS, rng)
        self.left_out = torch.from_numpy(parts)[None] == torch.arange(FOLDS + 1)[:, None]
        """(fits, n): which samples a fit goes without; the fit `ALL` leaves out none."""
        weights = (~self.left_out).double()
        self.curvature = bound * torch.einsum("fn,np,nq->fpq", weights, self.x, self.x)
        slopes, ratios = torch.tensor(CANDIDATES, dtype=torch.float64).T
        penalty = slopes[:, None].repeat(1, self.x.shape[1])
        penalty[:, -1] *= ratios
        self.penalty: Tensor = penalty[:, None, None]
        """Of each candidate and feature, (candidates, 1, 1, features)."""
        self.penalties = torch.diag_embed(penalty)[:, None]
        """The same as diagonal matrices."""
        self.inverse = torch.linalg.inv(self.curvature + self.penalties)

    def _residuals(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Predictions less targets (candidates, fits, n, outputs), and the loss of each sample."""
        outputs = self.x @ weights.mT
        if self.classes == 1:
            residuals = outputs - self.y
            return residuals, residuals.square().sum(-1)
        logs = outputs.log_softmax(-1)
        return logs.exp() - self.y, -(logs * self.y).sum(-1)

    def _pull(self, weights: Tensor) -> Tensor:
        """The Hessian of the parabola at `weights` times `weights`, less the gradient there."""
        residuals, _ = self._residuals(weights)
        fitted = residuals * (~self.left_out)[..., None]
        return weights @ self.curvature - fitted.mT @ self.x

    def step(self, weights: Tensor, shared: Tensor) -> Tensor:
        """The client's next weights (candidates, fits, outputs, features)."""
        step: Tensor = (self._pull(weights) + self.penalty * shared) @ self.inverse
        return step

    def uploaded(self, weights: Tensor) -> Tensors:
        """The server's summands: Hessian and target of the minimum as a function of the shared
        weights, and each candidate's loss on the parts that a fit went without."""
        _, losses = self._residuals(weights)
        hessians = self.penalties - self.penalty.mT * (self.inverse * self.penalty)
        targets = (self._pull(weights) @ self.inverse) * self.penalty
        losses = (losses * self.left_out).sum((1, 2))
        return {"hessians": hessians, "targets": targets, "losses": losses}
