"""Predictions on public data, by which clients with any architectures teach each other.

After local training each client uploads its predictions on the round's public subset. From all
uploads the server computes a teacher for each client: a weighted mean of the predictions, with the
client's row of weights. In its next round the client first distils from its teacher, then trains on
its own data. Predicting, weighing, distilling and training follow each other as in the papers; only
a round here ends after the weighing (docs/decisions/0016).
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
"""The public inputs of the last two rounds, for each run: a client distils on the last round's
subset, and predicts on this round's."""


def check_public(run: RunContext, samples: int | None) -> None:
    """Raise `BadInput` if there are no public data, or fewer samples than the method asks for in a
    round."""
    size = run.data.public_size
    if not size:
        run.data.public()  # raises: it names the way to public data
    check(
        "method.samples",
        samples,
        subset_size(run, samples) <= size,
        f"there are only {size} public samples; set it to {size} or less",
    )


def subset_size(run: RunContext, samples: int | None) -> int:
    """Return the number of public samples that a round draws.

    Args:
        run: with public data.
        samples: configured number; None: all public samples. With `--smoke` at most as many as
            there are.
    """
    size = run.data.public_size
    if samples is None or run.config.smoke:
        return min(samples or size, size)
    return samples


def public_subset(run: RunContext, t: int, samples: int | None) -> Tensor:
    """Return the public inputs of round `t`, drawn at random, the same for all clients."""
    subsets = _SUBSETS.setdefault(run, {})
    if t not in subsets:
        draws = numpy_rng(run.config.seed, "public", t)
        index = draws.choice(run.data.public_size, subset_size(run, samples), replace=False)
        last = {k: subset for k, subset in subsets.items() if k == t - 1}  # none older is needed
        subset = run.data.public(torch.from_numpy(np.sort(index)), run.device, run.dtype)
        subsets = _SUBSETS[run] = last | {t: subset}
    return subsets[t]


def class_scores(module: Module, x: Tensor) -> Tensor:
    """Return class scores (n, C) of the model loaded into `module`, in float32 or wider."""
    return wide(module.model(x)[:, : module.num_classes])


def distillation_loss(
    scores: Tensor,
    teacher: Tensor,
    loss: Literal["mae", "mse", "kl"],
    temperature: float,
) -> Tensor:
    """Return the distance between a student's scores and its teacher's predictions, shape ().

    Args:
        scores: class scores (n, C) of the student.
        teacher: class scores (n, C), or for `kl` softmax(scores / T).
        loss: `kl`: KL(teacher || student) of softmax(scores / T), mean over samples; `mae`, `mse`:
            of class scores, mean over all entries.
        temperature: T.
    """
    if loss == "kl":
        return kl_div(log_softmax(scores / temperature, 1), teacher, reduction="batchmean")
    return {"mae": l1_loss, "mse": mse_loss}[loss](scores, teacher)


@torch.no_grad()
def predict_scores(module: Module, x: Tensor, size: int) -> Tensor:
    """Return class scores (n, C) of the model loaded into `module`, in evaluation mode, in batches
    of `size`."""
    module.model.eval()
    return torch.cat([class_scores(module, part) for part in x.split(size)])


def sum_to_one(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Divide rows by their sums (k, 1); return the rows, uniform where a sum is 0, and the sums."""
    mass = rows.sum(1, keepdim=True)
    equal = 1.0 / rows.shape[1]
    return torch.where(mass > 1e-12, rows / mass.clamp_min(1e-12), equal), mass


def cosines(P: Tensor) -> Tensor:
    """Return the cosine similarities (m, m) between the predictions of m clients; the diagonal is
    1.

    Args:
        P: predictions (m, n, C) on n samples; each client's are flattened to one vector.
    """
    directions = normalize(P.flatten(1), dim=1)
    return (directions @ directions.T).clamp(-1, 1).fill_diagonal_(1.0)
