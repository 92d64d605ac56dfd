"""The description of a model's data, exported with its weights: how raw rows become inputs, and the
names of the classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fl_lightning.data import FederatedData
from fl_lightning.data.federated import angle_of


def described(data: FederatedData, client: int, fitted: bool = True) -> dict[str, Any]:
    """Return JSON-ready data that describe how a client's raw rows become inputs of the model and
    what the classes are called; `plain.inputs` and `plain.names` follow them.

    Args:
        data: the run's data.
        client: number of the client among all clients of the data, held-out ones included, or
            `data.columns.NEWCOMER`.
        fitted: include the client's fitted numbers for empty cells and scaling. If false, the
            caller must have preprocessed the rows (`preprocessing.transformed`).

    Raises:
        BadInput: a transformer of the user's own does more than scale single columns.
    """
    reading = data.reading
    kind = "images" if len(data.input_shape) == 3 else "vectors"
    mean, std = data.statistics
    fills = scale = columns = None
    form: Mapping[str, Any] = {}
    if reading.columns is not None:
        kind, form = "table", reading.columns.form
        columns = [[name, reading.columns.values.get(name)] for name in reading.columns.names]
    if fitted and reading.preprocessing is not None:
        fills, scale = reading.preprocessing.affine(client)
        # without imputing, an empty cell is refused
        fills = fills if reading.preprocessing.data.impute is not None else None
    return {
        "input": "text" if data.vocabulary else kind,
        "shape": list(data.input_shape),
        "angle": angle_of(data, client),
        "class_names": data.class_names if data.task == "classification" else [],
        "columns": columns,
        **form,
        "empty": fills,
        "scale": scale,
        "mean": mean.tolist(),
        "std": std.tolist(),
        "tokens": None if reading.tokens is None else dataclasses.asdict(reading.tokens),
    }
