"""Predictions on public data, by which clients of any architecture teach each other.

After its local training a client tells its predictions on the round's public subset. From them the
server makes a teacher for each client: row n of a matrix over the senders, times their predictions.
A client meets its teacher at the start of its next round, before it trains on its own data. That is
the papers' order (predict, weigh, distil, train) with the line between two rounds drawn where the
server has just received everybody's (docs/decisions/0016).
"""

from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import kl_div, l1_loss, log_softmax, mse_loss, normalize

from fl_lightning.configuration.config import check
from fl_lightning.core import Module, RunContext
from fl_lightning.foundation.rng import numpy_rng
from fl_lightning.methods.common.basics import wide

_SUBSETS: WeakKeyDictionary[RunContext, dict[int, Tensor]] = WeakKeyDictionary()
"""Of each run that is alive the public inputs of its last two rounds: a client learns on the last
round's subset, and predicts on this round's."""


def check_public(run: RunContext, samples: int | None) -> None:
    """Raise `BadInput` where there are fewer public samples than the method draws in a round."""
    size = run.data.public_size
    if not size:
        run.data.public()  # raises: it names the way to public data
    requirement = f"there are {size} public samples: at most as many"
    check("method.samples", samples, drawn(run, samples) <= size, requirement)


def drawn(run: RunContext, samples: int | None) -> int:
    """How many public samples a method draws that asks for `samples` (None: all); in a smoke run at
    most all."""
    size = run.data.public_size
    if samples is None or run.config.smoke:
        return min(samples or size, size) or 1
    return samples


def public_subset(run: RunContext, t: int, samples: int | None) -> Tensor:
    """The public inputs of round `t`, `drawn` of them, the same for everybody."""
    subsets = _SUBSETS.setdefault(run, {})
    if t not in subsets:
        draws = numpy_rng(run.config.seed, "public", t)
        index = draws.choice(run.data.public_size, drawn(run, samples), replace=False)
        last = {k: subset for k, subset in subsets.items() if k == t - 1}  # none older is needed
        subset = run.data.public(torch.from_numpy(np.sort(index)), run.device, run.dtype)
        subsets = _SUBSETS[run] = last | {t: subset}
    return subsets[t]


def class_scores(module: Module, x: Tensor) -> Tensor:
    """Class scores (n, C) of the bound model, in 32 bits at least."""
    return wide(module.model(x)[:, : module.num_classes])


def gap(
    scores: Tensor,
    teacher: Tensor,
    loss: Literal["mae", "mse", "kl"],
    temperature: float,
) -> Tensor:
    """Between class scores (n, C) and the teacher's predictions, shape ().

    `kl`: KL(teacher || student) of softmax(z / T), mean over samples; `mae`, `mse`: between z, mean
    over all numbers.
    """
    if loss == "kl":
        return kl_div(log_softmax(scores / temperature, 1), teacher, reduction="batchmean")
    return {"mae": l1_loss, "mse": mse_loss}[loss](scores, teacher)


@torch.no_grad()
def predicted(module: Module, x: Tensor, size: int) -> Tensor:
    """Class scores (n, C) of the bound model in evaluation mode, in batches of `size`."""
    module.model.eval()
    return torch.cat([class_scores(module, part) for part in x.split(size)])


def sum_to_one(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows brought to sum 1 (uniform where they have no mass), and the mass (k, 1) that they
    had."""
    mass = rows.sum(1, keepdim=True)
    equal = 1.0 / rows.shape[1]
    return torch.where(mass > 1e-12, rows / mass.clamp_min(1e-12), equal), mass


def cosines(P: Tensor) -> Tensor:
    """Cosine similarity (m, m) of flattened predictions P (m, D, C); the diagonal is 1."""
    directions = normalize(P.flatten(1), dim=1)
    return (directions @ directions.T).clamp(-1, 1).fill_diagonal_(1.0)
