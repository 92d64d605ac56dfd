"""Predictions on public data, by which clients of any architecture teach each other.

After its local training a client tells its predictions on the round's public subset. From them the
server makes a teacher for each client: row n of a matrix over the senders, times their predictions.
A client meets its teacher at the start of its next round, before it trains on its own data. That is
the papers' order (predict, weigh, distil, train) with the line between two rounds drawn where the
server has just received everybody's (docs/decisions/0016).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import kl_div, l1_loss, log_softmax, mse_loss

from fl_lightning.callbacks.relations import Alone
from fl_lightning.core import (
    Batch,
    Client,
    Module,
    Objective,
    Payload,
    Phase,
    PureLoss,
    RunContext,
    Server,
    Tensors,
)
from fl_lightning.data import ResidentPart
from fl_lightning.foundation.errors import BadInput, RunFailed
from fl_lightning.foundation.rng import numpy_rng
from fl_lightning.methods.common.basics import wide
from fl_lightning.results.record import RelationView

LAYER = "predictions"
"""What a teacher's row is drawn as, in place of a layer."""

_SUBSETS: WeakKeyDictionary[RunContext, dict[int, Tensor]] = WeakKeyDictionary()
"""Of each run that is alive the public inputs of its last two rounds: a client learns on the last
round's subset, and predicts on this round's."""


# ---------------------------------------------------------------- the public data


def check_public(run: RunContext, samples: int) -> None:
    """Raise `BadInput` where there are fewer public samples than the method draws in a round."""
    if not run.data.public_size:
        run.data.public()  # says what may be done about it
    if samples > run.data.public_size:
        allowed = f"there are {run.data.public_size} public samples"
        raise BadInput("method.samples", samples, f"{allowed}: at most as many")


def drawn(run: RunContext, samples: int | None) -> int:
    """How many public samples a method draws that asks for `samples` (None: all); in a smoke run at
    most all."""
    if samples is None or run.config.smoke:
        return min(samples or run.data.public_size, run.data.public_size) or 1
    return samples


def public_subset(run: RunContext, t: int, samples: int) -> Tensor:
    """The `samples` public inputs of round `t`, the same for everybody."""
    kept = _SUBSETS.get(run, {})
    if t not in kept:
        drawn = numpy_rng(run.config.seed, "public", t).choice(
            run.data.public_size, samples, replace=False
        )
        index = torch.from_numpy(np.sort(drawn))
        kept = {k: v for k, v in kept.items() if k == t - 1}  # nobody looks further back
        kept[t] = run.data.public(index, run.device, run.dtype)
        _SUBSETS[run] = kept
    return kept[t]


# ---------------------------------------------------------------- the client


def class_scores(module: Module, x: Tensor) -> Tensor:
    """Class scores (n, C) of the bound model, in 32 bits at least."""
    return wide(module.model(x)[:, : module.num_classes])


def gap(
    scores: Tensor, teacher: Tensor, loss: Literal["mae", "mse", "kl"], temperature: float
) -> Tensor:
    """Between class scores (n, C) and the teacher's predictions, shape ().

    `kl`: KL(teacher || student) of softmax(z / T), mean over samples; `mae`, `mse`: between z, mean
    over all numbers.
    """
    if loss == "kl":
        return kl_div(log_softmax(scores / temperature, 1), teacher, reduction="batchmean")
    return {"mae": l1_loss, "mse": mse_loss}[loss](scores, teacher)


def distilling(
    client: Client,
    payload: Payload,
    samples: int,
    loss: Callable[[Tensors, Module, Batch], Tensor],
    epochs: float,
    batch_size: int,
) -> Phase:
    """A phase down `loss` between the last round's public inputs and what the teacher in `payload`
    says of them."""
    x = public_subset(client.run, client.round - 1, drawn(client.run, samples))
    part = ResidentPart(x, payload.extra["teacher"].to(x.device), None)
    return Phase(
        objective=Objective(loss=PureLoss(loss)),
        part=part,
        epochs=epochs,
        batch_size=batch_size,
        purpose="distil",
        scores="distilled",
    )


@torch.no_grad()
def predicted(client: Client, samples: int) -> Tensor:
    """Class scores (|D_r|, C) of the client's model on this round's public subset, in evaluation
    mode."""
    module = client.bind()
    module.model.eval()
    x = public_subset(client.run, client.round, drawn(client.run, samples))
    return torch.cat(
        [class_scores(module, part) for part in x.split(client.run.config.evaluation.batch_size)]
    )


# ---------------------------------------------------------------- the server


def no_predictions(run: RunContext) -> dict[str, Tensor]:
    """The last uploads, `public.predictions` (m, |D_r|, C); from whom, `public.told` (m,);
    `public.rows` (N, m)."""
    return {
        "public.predictions": torch.zeros(0, 0, run.data.num_classes),
        "public.told": torch.zeros(0, dtype=torch.int64),
        "public.rows": torch.zeros(run.clients, 0, dtype=torch.float64),
    }


def weighed(
    P: Tensor, senders: list[int], rows: Tensor, *, distributions: bool
) -> dict[str, Tensor]:
    """The same after a round in which `senders` have uploaded `P`.

    Raises:
        RunFailed: a weight is not finite, or makes a teacher that is no distribution (where `P`
            holds `distributions`).
    """
    fine = bool(rows.isfinite().all())
    if fine and distributions and (rows < 0).any():
        fine = bool(((rows @ P.double().flatten(1)) >= 0).all())
    if not fine:
        raise RunFailed(
            "the coefficients have left the simplex too far; use method.projection simplex"
        )
    return {"public.predictions": P, "public.told": torch.tensor(senders), "public.rows": rows}


def uploaded(server: Server) -> tuple[Tensor, list[int]]:
    """The predictions P (m, |D_r|, C) that were uploaded, and their senders; a transform may have
    dropped some."""
    by_client = {c: t["predictions"] for c, t in server.statistics.items() if "predictions" in t}
    nothing = no_predictions(server.run)["public.predictions"]
    return torch.stack(list(by_client.values())) if by_client else nothing, list(by_client)


def keep(
    server: Server, weigh: Callable[[Server, Tensor, list[int]], Tensor], *, distributions: bool
) -> None:
    """The server keeps what was uploaded, and the rows (N, m) by which `weigh` weighs it."""
    P, senders = uploaded(server)
    rows = weigh(server, P.double(), senders) if senders else torch.empty(server.clients, 0)
    rows = server.run.relation.as_mixed(rows[None], range(server.clients), senders, server.round)[0]
    server.memory |= weighed(P, senders, rows, distributions=distributions)


def teach(server: Server, sent: Mapping[int, Payload]) -> None:
    """Put into what is `sent` to each client its teacher (|D_r|, C), once a client has uploaded
    predictions."""
    memory, P = server.memory, server.memory["public.predictions"]
    for client, payload in sent.items() if len(P) else ():
        row = rows_of(memory, [client])[0].to(P.dtype)
        payload.extra["teacher"] = (row @ P.flatten(1)).view(P.shape[1:])
    server.flops += 2 * len(server.cohort) * P.numel()
    server.view = teachers_view(memory, server.cohort)


def rows_of(memory: Mapping[str, Tensor], clients: list[int]) -> Tensor:
    """The rows of `clients` (n, m); to a client more than there are the mean of all is the
    teacher."""
    rows = memory["public.rows"]
    return torch.cat([rows, rows.new_full((1, rows.shape[1]), 1 / max(rows.shape[1], 1))])[clients]


def teachers_view(memory: Mapping[str, Tensor], cohort: list[int]) -> RelationView:
    """Whose predictions the teachers of `cohort` are made of; before the first upload each client
    is alone."""
    senders = memory["public.told"].tolist()
    if not senders:
        return RelationView(np.eye(len(cohort), dtype=np.float32)[:, None], cohort, [LAYER], cohort)
    rows = rows_of(memory, cohort).to(torch.float32).numpy()
    return RelationView(rows[:, None], cohort, [LAYER], senders)


# ---------------------------------------------------------------- weights


class Teachers(Alone):
    """Everybody keeps their own model; the rows by which the server mixes predictions are the
    method's."""

    fixed = ""


def uniform(clients: int, senders: list[int]) -> Tensor:
    """Every client weighs all senders the same, (N, m), float64."""
    return torch.full((clients, len(senders)), 1.0 / len(senders), dtype=torch.float64)


def sum_to_one(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows brought to sum 1 (uniform where they have no mass), and the mass (k, 1) that they
    had."""
    mass = rows.sum(1, keepdim=True)
    return torch.where(
        mass > 1e-12, rows / mass.clamp_min(1e-12), torch.full_like(rows, 1.0 / rows.shape[1])
    ), mass


def cosines(P: Tensor) -> Tensor:
    """Cosine similarity (m, m) of flattened predictions P (m, D, C); the diagonal is 1."""
    flat = torch.nn.functional.normalize(P.flatten(1), dim=1)
    S = (flat @ flat.T).clamp(-1, 1)
    return S.fill_diagonal_(1.0)


def shifted(S: Tensor) -> Tensor:
    """Rows of `S` (m, m) less their least entry, divided by their sum; uniform where all are equal
    (to rounding)."""
    R = S - S.min(1, keepdim=True).values
    R = torch.where(R < 1e-12, torch.zeros_like(R), R)
    return sum_to_one(R)[0]


def nearest(S: Tensor, k: int) -> Tensor:
    """Rows with 1/k at the `k` greatest entries of `S` (m, m), oneself first; ties to the lower
    number."""
    k = min(k, len(S))
    others = S.clone().fill_diagonal_(2.0)  # above any cosine
    order = torch.sort(others.round(decimals=12), dim=1, descending=True, stable=True).indices[
        :, :k
    ]
    return torch.zeros_like(S).scatter(1, order, 1.0 / k)


def kl_gradient(c: Tensor, P: Tensor) -> Tensor:
    """Gradient by c (m, m) of sum_n KL(sum_j c_nj P_j || P_n), mean over the samples of P (m, D,
    C); (m, m)."""
    floor = torch.finfo(P.dtype).tiny
    teachers = torch.einsum("nj,jdk->ndk", c, P)
    ratio = teachers.clamp_min(floor).log() - P.clamp_min(floor).log()
    return (ratio + 1).flatten(1) @ P.flatten(1).T / P.shape[1]


def paper_step(
    c: Tensor, P: Tensor, shares: Tensor, lam: float, rho: float, step: float, prior: float
) -> Tensor:
    """KT-pFL Eq. 7: c - step lam (D_n / D) grad_n KL - 2 step rho (c - prior), (m, m); `shares` D_n
    / D (m,)."""
    pull = 2 * rho * (c - prior)
    return c - step * (lam * shares[:, None] * kl_gradient(c, P) + pull)


def code_step(c: Tensor, P: Tensor, rho: float, size: float) -> Tensor:
    """The authors' code: a scaled step down MSE(P_n, sum_j c_nj P_j) + rho MSE(c_n, 1/m), then
    softmax(5 row), (m, m).

    A row's step is multiplied by a power of 5, of -5 to 5, that brings its mean into [size, 5
    size).
    """
    flat = P.flatten(1)
    G = flat @ flat.T
    gradient = 2 * (c @ G - G) / flat.shape[1] + 2 * rho * (c - 1.0 / len(c)) / len(c)
    mean = gradient.abs().mean(1, keepdim=True)
    power = torch.ceil(torch.log(size / mean.clamp_min(1e-300)) / np.log(5.0)).clamp(-5, 5)
    scale = torch.where(mean > 1e-15, 5.0**power, torch.zeros_like(mean)) * (size > 0)
    return torch.softmax(5 * (c - scale * gradient), dim=1)


def put_back(c: Tensor, here: Tensor, part: Tensor, mass: Tensor) -> Tensor:
    """`c` (N, N) with the rows `part` (m, m), which sum to 1, of the clients `here` (m,) scaled to
    the `mass` they had.

    A row whose weight had all gone to others gets m / N of it back: else it would stay there for
    ever.
    """
    fair = len(here) / len(c)
    c[here] = torch.where(mass > 1e-12, c[here], c[here] * (1 - fair))
    c[here[:, None], here] = part * torch.where(mass > 1e-12, mass, torch.full_like(mass, fair))
    return c
