"""Data of clients that come after the last round: those that were held out, or one whose data lie
in a file."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data import arrays
from fl_lightning.data.federated import ClientData, FederatedData
from fl_lightning.data.part import ResidentPart
from fl_lightning.data.source import HeldOut
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.rng import generator, numpy_rng

Shares = tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]


def apart(
    shares: Shares,
    angles: Sequence[float],
    count: int,
    seed: int,
    named: Sequence[int] | None = None,
) -> tuple[Shares, list[HeldOut]]:
    """What each client was dealt (training, validation and test) without the `named`, or else
    without `count` of them, who are drawn; and those."""
    draws = numpy_rng(seed, "held-out clients")
    drawn = draws.choice(len(angles), count, replace=False).tolist()
    away = sorted(drawn if named is None else named)
    here = [client for client in range(len(angles)) if client not in set(away)]
    trains, validations, tests = shares
    held_out = [HeldOut(c, trains[c], validations[c], tests[c], angles[c]) for c in away]
    left = (
        [trains[client] for client in here],
        [validations[client] for client in here],
        [tests[client] for client in here],
    )
    return left, held_out


def few(
    data: FederatedData,
    who: HeldOut,
    per_class: int,
    validation: float,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[ClientData, bool]:
    """What a held-out client brings, and whether it has labels.

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
    (x, y), test = data.of_held_out(who, device, dtype)
    if not per_class:
        return _parts(
            data,
            x,
            torch.zeros_like(y),
            test,
            validation,
            seed,
        ), False
    classed = data.task == "classification" and y.ndim == 1
    kept = labelled(
        y if classed else torch.zeros(len(y), device=y.device),
        who,
        per_class,
        seed,
    )
    return _parts(
        data,
        x[kept],
        y[kept],
        test,
        validation,
        seed,
    ), True


def labelled(
    strata: Tensor,
    who: HeldOut,
    per_class: int,
    seed: int,
) -> Tensor:
    """Places of `per_class` of a held-out client's training samples of each class (n,),
    ascending."""
    draws = generator(seed, "newcomer's samples", who.number)
    order = torch.randperm(len(strata), generator=draws).to(strata.device)
    places = [order[strata[order] == k][:per_class] for k in strata.unique()]
    return torch.cat(places).sort().values


def from_file(
    data: FederatedData, file: str, validation: float, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[ClientData, bool]:
    """A new client's parts from an npz file, prepared as everybody's; and whether it has labels.

    Raises:
        BadInput: the file cannot be read, or its samples are of another shape or class.
    """
    pools = arrays.newcomer(file, data.task)
    parts = []
    if pools["train"][0].shape[1:] == data.input_shape:
        data.fit_newcomer(pools["train"][0])
    for name in ("train", "test"):
        raw, labels = pools.get(
            name, (np.zeros((0, *data.input_shape), np.uint8), np.zeros(0, np.int64))
        )
        if raw.shape[1:] != data.input_shape:
            raise BadInput(
                "data",
                file,
                f"samples of shape {raw.shape[1:]}, but the run has {data.input_shape}",
            )
        if (
            data.task == "classification"
            and labels is not None
            and labels.max(initial=0) >= data.num_classes
        ):
            raise BadInput(
                "data", file, f"label {labels.max()}, but the run has {data.num_classes} classes"
            )
        targets = torch.from_numpy(labels if labels is not None else np.zeros(len(raw), np.int64))
        targets = targets.float() if data.task == "regression" else targets
        parts.append(
            (
                data.inputs(
                    torch.from_numpy(raw),
                    torch.device("cpu"),
                    dtype,
                ),
                targets,
            )
        )
    (x, y), test = parts
    return _parts(data, x, y, test, validation, seed), pools["train"][1] is not None


def _parts(
    data: FederatedData,
    x: Tensor,
    y: Tensor,
    test: tuple[Tensor, Tensor],
    validation: float,
    seed: int,
) -> ClientData:
    """Samples x with labels y, of which a share is set apart for validation, and a test part."""
    order = torch.randperm(len(y), generator=generator(seed, "newcomer's validation")).to(y.device)
    count = round(validation * len(y))
    held_out = order[:count].sort().values
    rest = order[count:].sort().values
    return ClientData(
        data.training(x[rest], y[rest]),
        ResidentPart(x[held_out], y[held_out], None),
        ResidentPart(*test, None),
    )
