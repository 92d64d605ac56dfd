"""Data of clients that come after the last round: those that were held out, or one whose data lie
in a file."""

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
"""Each client's indices for training, for validation and for test, as they were dealt."""


def apart(
    shares: DealtParts,
    angles: Sequence[float],
    count: int,
    seed: int,
    named: Sequence[int] | None = None,
) -> tuple[DealtParts, list[HeldOut]]:
    """Take clients out of the run: the `named` ones, or, if None, `count` that are drawn.

    Returns the parts of the clients that stay, and the held-out clients.
    """
    draws = numpy_rng(seed, "held-out clients")
    drawn = draws.choice(len(angles), count, replace=False).tolist()
    away = sorted(drawn if named is None else named)
    staying = [client for client in range(len(angles)) if client not in set(away)]
    trains, validations, tests = shares

    held_out = [HeldOut(c, trains[c], validations[c], tests[c], angles[c]) for c in away]

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
    """Returns what a held-out client brings, of few labelled samples, and whether it has labels.

    Args:
        data: of the run.
        who: the client.
        per_class: labelled samples of each class (of a regression or of next tokens: in all), or as
            many as it has: the first of an order that is drawn, so that more samples hold the fewer
            ones. 0: all of its training samples, without labels.
        validation: share of these that is set apart.
        seed: of the run.
        device: where it trains.
        dtype: of its inputs.
    """
    (x, y), test = data.held_out_samples(who, device, dtype)
    if not per_class:
        return _parts(
            data,
            x,
            torch.zeros_like(y),
            test,
            validation,
            seed,
        ), False
    has_classes = data.task == "classification" and y.ndim == 1
    strata = y if has_classes else torch.zeros(len(y), device=y.device)
    index = drawn_per_class(strata, who, per_class, seed)
    return _parts(
        data,
        x[index],
        y[index],
        test,
        validation,
        seed,
    ), True


def drawn_per_class(
    strata: Tensor,
    who: HeldOut,
    per_class: int,
    seed: int,
) -> Tensor:
    """Returns places of `per_class` drawn samples of each class of a held-out client's training
    samples, whose classes are `strata` (n,); ascending."""
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
    """A new client's parts from an npz file, prepared as everybody's; and whether it has labels.

    Raises:
        BadInput: the file cannot be read, or its samples are of another shape or class.
    """
    pools = arrays.newcomer(file, data.task)
    setting = Setting("data", file)
    samples, labels = pools["train"]
    if samples.shape[1:] == data.input_shape:
        data.fit_newcomer(samples)
    nothing = np.zeros((0, *data.input_shape), np.uint8), None
    parts = []
    for raw, y in (pools["train"], pools.get("test", nothing)):
        problem = f"samples of shape {raw.shape[1:]}, but the run has {data.input_shape}"
        setting.check(raw.shape[1:] == data.input_shape, problem)
        y = np.zeros(len(raw), np.int64) if y is None else y
        highest = y.max(initial=0)
        is_known = data.task == "regression" or highest < data.num_classes
        problem = f"label {highest}, but the run has {data.num_classes} classes"
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
    """Samples x with labels y, of which a share is set apart for validation, and a test part."""
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
