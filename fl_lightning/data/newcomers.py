"""Data of clients that join after the last round: held-out clients, or one whose data lie in a
file."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from fl_lightning.data import arrays
from fl_lightning.data.federated import ClientData, FederatedData
from fl_lightning.data.part import ResidentPart
from fl_lightning.data.source import HeldOut, Setting
from fl_lightning.foundation.rng import generator, numpy_rng

DealtParts = tuple[list[ndarray], list[ndarray], list[ndarray]]
"""Each client's indices for training, validation and test."""


def hold_out(
    shares: DealtParts,
    angles: Sequence[float],
    count: int,
    seed: int,
    named: Sequence[int] | None = None,
) -> tuple[DealtParts, list[HeldOut]]:
    """Take clients out of the run; return the remaining clients' sample indices, and the held-out
    clients.

    Args:
        shares: sample indices of all clients, for training, validation and test.
        angles: degrees by which each client's images are rotated.
        count: number of clients to draw, if `named` is None.
        seed: for the draw.
        named: numbers of the clients to hold out.
    """
    draws = numpy_rng(seed, "held-out clients")
    drawn = draws.choice(len(angles), count, replace=False).tolist()
    numbers = sorted(drawn if named is None else named)
    staying = [client for client in range(len(angles)) if client not in set(numbers)]
    trains, validations, tests = shares
    held_out = [HeldOut(c, trains[c], validations[c], tests[c], angles[c]) for c in numbers]
    trains, validations, tests = ([part[client] for client in staying] for part in shares)
    return (trains, validations, tests), held_out


def with_few_labels(
    data: FederatedData,
    who: HeldOut,
    per_class: int,
    validation: float,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[ClientData, bool]:
    """Return a held-out client's parts, with few labelled training samples, and whether they have
    labels.

    Args:
        data: data of the run.
        who: the client.
        per_class: number of labelled training samples of each class (all samples of a class that
            has fewer); with regression targets or next tokens, their total number. They are the
            first in a fixed random order, so a larger number includes the samples of a smaller one.
            0: all training samples, without labels.
        validation: share of these samples that becomes the validation part.
        seed: seed of the run.
        device: device of the tensors.
        dtype: type of the inputs.
    """
    (x, y), test = data.held_out_samples(who, device, dtype)
    if per_class:
        has_classes = data.task == "classification" and y.ndim == 1
        strata = y if has_classes else torch.zeros(len(y), device=y.device)
        index = drawn_per_class(strata, who, per_class, seed)
        x = x[index]
        y = y[index]
    else:
        y = torch.zeros_like(y)
    return _parts(data, x, y, test, validation, seed), per_class > 0


def drawn_per_class(
    strata: Tensor,
    who: HeldOut,
    per_class: int,
    seed: int,
) -> Tensor:
    """Draw at most `per_class` training samples of each class; return ascending indices.

    Args:
        strata: class of each training sample, (n,).
        who: the held-out client.
        per_class: most samples of a class.
        seed: seed of the run.
    """
    draws = generator(seed, "newcomer's samples", who.number)
    order = torch.randperm(len(strata), generator=draws).to(strata.device)
    places = []
    for kind in strata.unique():
        of_kind = order[strata[order] == kind]
        places.append(of_kind[:per_class])
    return torch.cat(places).sort().values


def from_file(
    data: FederatedData,
    file: str,
    validation: float,
    seed: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[ClientData, bool]:
    """Return a new client's parts from an npz file, prepared like the run's data, and whether its
    training samples have labels.

    Raises:
        BadInput: the file cannot be read, or its samples have another shape or class than the
            run's.
    """
    pools = arrays.newcomer(file, data.task)
    setting = Setting("data", file)
    samples, labels = pools["train"]
    if samples.shape[1:] == data.input_shape:
        data.fit_newcomer(samples)
    nothing = np.zeros((0, *data.input_shape), np.uint8), None
    parts = []
    for raw, y in (pools["train"], pools.get("test", nothing)):
        problem = f"its samples have the shape {raw.shape[1:]}, but the run's {data.input_shape}"
        setting.check(raw.shape[1:] == data.input_shape, problem)
        y = np.zeros(len(raw), np.int64) if y is None else y
        highest = y.max(initial=0)
        is_known = data.task == "regression" or highest < data.num_classes
        problem = (
            f"it holds the label {highest}, but the run's classes are 0 to {data.num_classes - 1}"
        )
        setting.check(is_known, problem)
        targets = torch.from_numpy(y)
        targets = targets.float() if data.task == "regression" else targets
        x = data.newcomer_inputs(torch.from_numpy(raw), torch.device("cpu"), dtype)
        parts.append((x, targets))
    (x, targets), test = parts
    return _parts(data, x, targets, test, validation, seed), labels is not None


def _parts(
    data: FederatedData,
    x: Tensor,
    y: Tensor,
    test: tuple[Tensor, Tensor],
    validation: float,
    seed: int,
) -> ClientData:
    """Split samples into a training and a validation part, and add the test part."""
    draws = generator(seed, "newcomer's validation")
    order = torch.randperm(len(y), generator=draws).to(y.device)
    count = round(validation * len(y))
    held_out = order[:count].sort().values
    rest = order[count:].sort().values
    return ClientData(
        data.newcomer_part(x[rest], y[rest]),
        ResidentPart(x[held_out], y[held_out], None),
        ResidentPart(*test, None),
    )
