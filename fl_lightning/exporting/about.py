"""What is said of a model's data beside its weights: how raw rows become inputs, and what its
classes are called."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fl_lightning.data import FederatedData
from fl_lightning.data.federated import angle_of


def about(data: FederatedData, who: int, fitted: bool = True) -> dict[str, Any]:
    """Plain data, ready for JSON, as `plain.inputs` and `plain.names` read them.

    Args:
        data: of the run.
        who: number of the client among all that the data were dealt to, or `data.columns.NEWCOMER`.
        fitted: with the numbers of what imputes and scales; else it is left to its own
            `transformed`.

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
        fills, scale = reading.preprocessing.affine(who)
        # an empty cell is refused
        fills = fills if reading.preprocessing.data.impute is not None else None
    return {
        "input": "text" if data.vocabulary else kind,
        "shape": list(data.input_shape),
        "angle": angle_of(data, who),
        "class_names": data.class_names if data.task == "classification" else [],
        "columns": columns,
        **form,
        "empty": fills,
        "scale": scale,
        "mean": mean.tolist(),
        "std": std.tolist(),
        "tokens": None if reading.tokens is None else dataclasses.asdict(reading.tokens),
    }
