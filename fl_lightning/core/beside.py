"""Declares the tensors that clients upload in addition to models: privacy callbacks protect them or
refuse them by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Values = Literal[
    "real",
    "nonnegative",
    "counts",
    "shares",
    "covariance",
    "rows",
    "classes",
    "class_counts",
    "public",
]
"""The values that a tensor may have. real: any numbers; nonnegative: none below 0; counts: numbers
of samples; shares: each row is a distribution; covariance: a symmetric matrix without negative
eigenvalues; classes: the indices of the client's classes; rows: a row for each of these classes;
class_counts: a number of samples for each of these classes; public: values that follow from the
sample counts and the configuration."""


@dataclass(frozen=True)
class Beside:
    """Declares a tensor that clients upload beside the model, in `Payload.statistics` or
    `Payload.extra`.

    Args:
        kind: the name under which privacy callbacks configure the tensor's bound and noise; several
            tensors may have the same kind.
        description: the content in words.
        values: the values that the tensor may have. A privacy callback replaces noisy values by the
            nearest allowed ones (negative counts by 0, for example). None: the tensor has no bound,
            so noise cannot protect it.
        once: whether a client uploads the tensor in its first round only.
    """

    kind: str
    description: str
    values: Values | None = "real"
    once: bool = False
