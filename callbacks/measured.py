"""A relation that needs no prior: rows by Mallows' Cp, from the noise that clients measure in their
own steps.

An upload is w_j = theta_j + noise; Sigma[i, j] is the covariance (trace) of the noises of uploads i
and j in a layer. For a row r that was fixed beforehand

    E ||r W - theta_i||^2  =  E ||r W - w_i||^2 + 2 (r Sigma)_i - Sigma_ii

(Mallows, Technometrics 1973). So the row that minimises ||r W - w_i||^2 + 2 kappa (r Sigma)_i needs
no prior: without noise it is the client's own model, with much noise a mix of the nearest clients.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fl_lightning.callbacks.base import internal
from fl_lightning.callbacks.relations import Relation, check_finite
from fl_lightning.callbacks.simplex import simplex_rows
from fl_lightning.core import RelationInputs, RunContext, Server, Tensors
from fl_lightning.foundation import log

RIDGE = 1e-7
"""Ridge, in units of a layer's mean squared distance from the mean model: makes rows unique if
there are more sources than dimensions."""


def measured_rows(
    C: Tensor,
    Sigma: Tensor,
    places: Tensor,
    kappa: float,
) -> Tensor:
    """Return the rows that minimise ||r W - w_i||^2 + 2 kappa (r Sigma)_i over the simplex.

    Args:
        C: centred Gram matrices (L, n, n), float64.
        Sigma: covariances of the sources' noises (L, n, n), float64.
        places: which source each of the m rows belongs to, (m,).
        kappa: factor of the noise; 1 is Mallows' criterion.

    Returns:
        Rows (L, m, n). In a layer in which all sources are equal, every row gives the same mix, and
            the own model is taken.
    """
    n = C.shape[-1]
    identity = torch.eye(n, dtype=C.dtype)[places]
    rows = identity.expand(len(C), -1, -1).clone()
    for layer, (G, S) in enumerate(zip(C, Sigma, strict=True)):
        scale = float(G.diagonal().mean())
        if n > 1 and scale > 0:
            # 1/n: a constant on the simplex
            H = _definite(G / scale + 1 / n + RIDGE * torch.eye(n, dtype=C.dtype))
            rows[layer] = simplex_rows(H, (G - kappa * S)[places] / scale + 1 / n)
    return rows


def _definite(H: Tensor) -> Tensor:
    """Return `H`, with eigenvalues below `RIDGE` raised to it where rounding of float32 products
    has left any."""
    values, vectors = torch.linalg.eigh(H)  # of the lower half
    if values[0] >= RIDGE / 2:
        return H
    return (vectors * values.clamp_min(RIDGE)) @ vectors.T


def add_noise_ratio(
    sums: Tensor,
    count: Tensor,
    samples: Tensor,
    step: Tensor,
    noise: Tensor,
) -> None:
    """Add a client's ratio of noise, n v / ||step||^2, to `sums` and 1 to `count`, in place, in
    each layer in which its step is not 0.

    Args:
        sums: running sums of the ratios over clients, by layer (L,).
        count: running number of the clients in these sums, by layer (L,).
        samples: n, the client's number of training samples.
        step: squared norm of the client's step by layer, float64 (L,).
        noise: v, the variance that the choice of its samples gives the step, by layer (L,).
    """
    moved = step > 0
    sums += torch.where(moved, samples * noise.double() / step.clamp_min(1e-300), 0.0)
    count += moved


def noise_shares(
    sums: Tensor,
    count: Tensor,
    samples: Tensor,
) -> Tensor:
    """Return the estimated share of noise in each client's step by layer, (m, L), in 0..1: the mean
    ratio of noise over the client's samples.

    In a layer that no client could measure, the whole step counts as noise, since the clients have
    too few samples.

    Args:
        sums: from `add_noise_ratio`.
        count: from `add_noise_ratio`.
        samples: training samples of the clients, (m, 1).
    """
    mean = torch.where(count > 0, sums / count.clamp_min(1), math.inf)
    return (mean / samples.clamp_min(1)).clamp_max(1.0)


@dataclass
class MeasuredCube(Relation):
    """A row for each client and layer by `measured_rows`, on the last uploads of everyone who has
    uploaded.

    Clients upload the squared norm of their step by layer, and with their first upload the variance
    of its noise; `learn` computes Sigma from both. A client that has never uploaded receives the
    mean, by samples, of those that have. With layer selection, noise is computed as if withheld
    layers had been sent.

    A client's noise comes from its samples, which are the same in every round. So noise is tracked
    by the client whose samples it comes from: the noise of upload i is sum_k A_ik e_k, with e_k
    independent and of trace variance 1, and Sigma = A A'.

    Args:
        kappa: factor of the noise.
        keep: share of a received model's noise that is still in the client's upload, after local
            training (0: training removes all of it).
    """

    per_layer = measures = True
    sources = "uploaded"

    kappa: float
    keep: float
    _shares: dict[str, float] = internal(default_factory=dict)

    def init_server(self, run: RunContext) -> Tensors:
        """Return `noise.loadings` (L, N, N): A; `noise.measured` (2, L): the sum of n_i v_i /
        ||step_i||^2 over the clients that have measured v_i, and their number; `noise.rounds` (N,):
        number of uploads of each client."""
        n = run.clients
        layers = len(run.layer_names)
        return {
            "noise.loadings": torch.zeros(layers, n, n, dtype=torch.float64),
            "noise.measured": torch.zeros(2, layers, dtype=torch.float64),
            "noise.rounds": torch.zeros(n, dtype=torch.int64),
        }

    def on_fit_start(self, run: RunContext) -> None:
        """Print a warning if a layer has fewer numbers than there are clients, since noise may then
        make the relation worse than FedAvg."""
        numbers = dict.fromkeys(run.layer_names, 0)
        for group in run.groups:
            for block in group.layout.blocks:
                if block.kind == "parameter":
                    numbers[run.layer_names[group.axis.start + block.layer]] += block.size
        small = []
        for name, count in numbers.items():
            if count < run.clients:
                small.append(f"{name} ({count} numbers)")
        if small and run.is_main:
            log.say(
                f"{run.method_name}: {', '.join(small)}: fewer numbers than the {run.clients} "
                "clients. There a client may take its own noise back in the others' models, with a "
                "weight of 0 for its own, and end below FedAvg (1.3 to 3.4 points with 30 equal "
                "silos and 18 numbers); compare with --method fedavg"
            )

    def weights(self, inputs: RelationInputs) -> Tensor:
        """Return the receivers' rows, (L, m, n).

        Raises:
            RunFailed: a model is not finite.
        """
        places = inputs.places
        uploaded = inputs.memory["noise.rounds"][inputs.sources] > 0
        if not uploaded[places].all():  # a newcomer comes alone, beside those that have uploaded
            counted = uploaded if uploaded.any() else torch.ones_like(uploaded)
            samples = inputs.samples * counted
            return (samples / samples.sum()).expand(inputs.layers, len(places), -1)
        gram = inputs.gram()
        check_finite(gram.centred)
        A = inputs.memory["noise.loadings"][:, inputs.sources]
        return measured_rows(gram.centred, A @ A.mT, places, self.kappa)

    def learn(self, server: Server) -> None:
        """Update the noise loadings A after a round's uploads, from the mixes that clients began
        from and the noise v of their own steps.

        For the clients that have answered, with T their rows of the mix, A <- keep T A +
        diag(sqrt(v)); the other clients' rows of A stay.
        """
        weighed = server.only.weighed
        answered = server.answered
        if weighed is None:
            return
        run = server.run
        memory = server.memory
        samples = server.samples(answered)[:, None]
        steps = torch.stack([server.statistics[c]["step"] for c in answered]).double()  # (m, L)
        sums, count = memory["noise.measured"]
        for c, n, step in zip(answered, samples, steps, strict=True):
            if (noise := server.statistics[c].get("noise")) is not None:
                add_noise_ratio(
                    sums,
                    count,
                    n,
                    step,
                    noise,
                )
        shares = noise_shares(sums, count, samples)
        if run.is_main and "noise" not in run.warned and not count.any() and steps.any():
            problem = "no client has enough samples to measure its noise"
            log.say(f"{run.method_name}: {problem}: all of a client's step counts as noise")
        run.warned.add("noise")
        receivers = [weighed.receivers.index(c) for c in answered]
        rows = weighed.weights[:, receivers]  # (L, m, n)
        A = self.keep * (rows @ memory["noise.loadings"][:, weighed.sources])
        A[:, torch.arange(len(answered)), answered] += (shares * steps).T.sqrt()
        memory["noise.loadings"][:, answered] = A
        memory["noise.rounds"][answered] += 1
        self._shares = {}
        for name, share in zip(run.layer_names, shares.mean(0).tolist(), strict=True):
            self._shares[f"noise_share_{name}"] = share
        server.flops += 2 * rows.numel() * A.shape[-1]

    def measured(self, clients: list[dict[str, Any]]) -> dict[str, float]:
        """Return `noise_share_LAYER`: the share of a client's step that is noise of its few
        samples, mean over the round's clients."""
        for client in clients:
            client.pop("gradient_norm", None)
        return self._shares

    def flops(
        self,
        layers: int,
        receivers: int,
        sources: int,
    ) -> int:
        """Return the operations of Sigma and of one solve for each row (further steps of pivoting
        are not counted)."""
        return layers * (2 * sources**3 + receivers * (2 * sources**3 // 3 + 4 * sources**2))
