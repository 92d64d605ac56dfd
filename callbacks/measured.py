"""A relation that sets its own strength: rows by Mallows' Cp, from the noise that clients measure of themselves.

An upload is w_j = theta_j + noise; Sigma[i, j] is the covariance (trace) of the noises of uploads i and j in a layer.
For a row r that was fixed beforehand

    E ||r W - theta_i||^2  =  E ||r W - w_i||^2 + 2 (r Sigma)_i - Sigma_ii        (Mallows, Technometrics 1973)

So the row that minimises ||r W - w_i||^2 + 2 kappa (r Sigma)_i needs no prior: without noise it is the client's own
model, with much noise a mix of the nearest clients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fl_lightning import log
from fl_lightning.callbacks.cube import simplex_rows
from fl_lightning.callbacks.relations import Relation
from fl_lightning.core import RelationInputs, RunContext, Server
from fl_lightning.errors import RunFailed

RIDGE = 1e-7
"""Of a layer's mean squared distance from the mean model: makes rows unique where sources are more than dimensions."""


def measured_rows(C: Tensor, Sigma: Tensor, places: Tensor, kappa: float) -> Tensor:
    """The rows that minimise ||r W - w_i||^2 + 2 kappa (r Sigma)_i over the simplex.

    Args:
        C: centred Gram matrices (L, n, n), float64.
        Sigma: covariances of the sources' noises (L, n, n), float64.
        places: which source each of the m rows belongs to, (m,).
        kappa: factor of the noise; 1 is Mallows' criterion.

    Returns:
        Rows (L, m, n). Where all sources are equal in a layer every row gives the same mix: it is the own model.
    """
    n = C.shape[-1]
    own = torch.eye(n, dtype=C.dtype)[places]
    rows = own.expand(len(C), -1, -1).clone()
    for layer, (G, S) in enumerate(zip(C, Sigma, strict=True)):
        scale = float(G.diagonal().mean())
        if n > 1 and scale > 0:
            H = _definite(G / scale + 1 / n + RIDGE * torch.eye(n, dtype=C.dtype))  # 1/n: a constant on the simplex
            rows[layer] = simplex_rows(H, (G - kappa * S)[places] / scale + 1 / n)
    return rows


def _definite(H: Tensor) -> Tensor:
    """`H`, or where rounding of float32 products has left it eigenvalues below `RIDGE`, with these raised to it."""
    values, vectors = torch.linalg.eigh(H)  # of the lower half
    if values[0] >= RIDGE / 2:
        return H
    return (vectors * values.clamp_min(RIDGE)) @ vectors.T


@dataclass
class MeasuredCube(Relation):
    """A row per client and layer by `measured_rows`, on what the server last received of everyone who has uploaded.

    Clients upload the squared norm of their step by layer, and with their first upload the variance of their noise:
    `learn` keeps what follows from both. A client that has never uploaded receives the mean of those that have, by
    samples. With layer selection Sigma follows the mix that was composed, also where a layer of it was withheld.

    Args:
        kappa: factor of the noise.
        keep: share of the noise variance of what a client received that is left after its local training.
    """

    per_layer = measures = True
    sources = "uploaded"

    kappa: float
    keep: float
    _shares: dict[str, float] = field(default_factory=dict, init=False, repr=False)

    def init_server(self, run: RunContext) -> dict[str, Tensor]:
        """`noise.covariance` (L, N, N): Sigma; `noise.measured` (2, L): the sum of n_i v_i / ||step_i||^2 over clients
        that have measured v_i, and how many have; `noise.rounds` (N,): uploads of each."""
        n, layers = run.clients, len(run.layer_names)
        return {
            "noise.covariance": torch.zeros(layers, n, n, dtype=torch.float64),
            "noise.measured": torch.zeros(2, layers, dtype=torch.float64),
            "noise.rounds": torch.zeros(n, dtype=torch.int64),
        }

    def weights(self, inputs: RelationInputs) -> Tensor:
        """Rows of the receivers, (L, m, n).

        Raises:
            RunFailed: a model is not finite.
        """
        sources = torch.tensor(inputs.sources)
        uploaded = inputs.memory["noise.rounds"][sources] > 0
        if not bool(uploaded[inputs.places].all()):  # it comes alone, beside those that have uploaded
            who = uploaded if bool(uploaded.any()) else torch.isin(torch.arange(len(sources)), inputs.places)
            mean = torch.where(who, inputs.samples, torch.zeros_like(inputs.samples))
            return (mean / mean.sum()).expand(inputs.layers, len(inputs.receivers), -1)
        gram = inputs.gram()
        if not gram.centred.isfinite().all():
            raise RunFailed("a client's model is no longer finite; lower optimizer.lr")
        Sigma = inputs.memory["noise.covariance"][:, sources[:, None], sources]
        return measured_rows(gram.centred, Sigma, inputs.places, self.kappa)

    def learn(self, server: Server) -> None:
        """The uploads have arrived: Sigma follows the mixes that their clients began from, and their own new noise.

        With T the rows of those who answered (others: unchanged), Sigma <- keep T Sigma T' + diag(v).
        """
        weighed, answered = server.only.weighed, server.answered
        if weighed is None or not answered:
            return
        memory, samples = server.memory, server.samples(answered)[:, None]
        steps = torch.stack([server.statistics[c]["step"] for c in answered]).double()  # (m, L)
        sums, count = memory["noise.measured"]
        for c, n, step in zip(answered, samples, steps, strict=True):
            noise = server.statistics[c].get("noise")
            if noise is not None:
                moved = step > 0
                sums += torch.where(moved, n * noise.double() / step.clamp_min(1e-300), 0.0)
                count += moved
        # A step is noise at most. Where nobody could measure, it counts as noise: one sample tells little.
        shares = torch.where(count > 0, sums / count.clamp_min(1), math.inf) / samples
        shares = shares.clamp_max(1.0)
        if bool((count == 0).all()) and server.run.is_main and "noise" not in server.run.warned:
            log.say(
                "selfkapc: no client has enough samples to measure its noise: all of a client's step counts as noise"
            )
        server.run.warned.add("noise")
        index, sources = torch.tensor(answered), torch.tensor(weighed.sources)
        where = [weighed.receivers.index(c) for c in answered]
        rows = math.sqrt(self.keep) * weighed.weights[:, where]  # (L, m, n)
        covariance = memory["noise.covariance"]
        mixed = rows @ covariance[:, sources]  # (L, m, N): with everybody's noise
        among = mixed[:, :, sources] @ rows.transpose(1, 2)
        covariance[:, index] = mixed
        covariance[:, :, index] = mixed.transpose(1, 2)
        covariance[:, index[:, None], index] = among + torch.diag_embed((shares * steps).T)
        memory["noise.rounds"][index] += 1
        names = server.run.layer_names
        self._shares = {f"noise_share_{name}": float(s) for name, s in zip(names, shares.mean(0), strict=True)}
        server.flops += 2 * rows.numel() * (len(covariance[0]) + len(answered))

    def measured(self, clients: list[dict[str, Any]]) -> dict[str, float]:
        """`noise_share_LAYER`: the share of a client's step that is noise of its few samples, mean over the round's."""
        for client in clients:
            client.pop("gradient_norm", None)
        return self._shares

    def flops(self, layers: int, receivers: int, sources: int) -> int:
        """Of one solve for each row (further ones of the pivoting uncounted)."""
        return layers * receivers * (2 * sources**3 // 3 + 4 * sources**2)
