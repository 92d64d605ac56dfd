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
"""The kind of numbers in a tensor. real: any; nonnegative: none below 0. counts: numbers of
samples. shares: each row is a distribution. covariance: symmetric, no negative eigenvalue. classes:
the indices of the client's classes; rows: a row for each of these classes; class_counts: a number
of samples for each of them. public: the tensor follows from the sample counts and the
configuration."""


@dataclass(frozen=True)
class Beside:
    """Declares one named tensor of an upload's `statistics` or `extra`, which travels beside the
    model.

    Args:
        kind: the name under which its bound and its noise are configured; tensors may share one.
        description: the content in words.
        values: the kind of its numbers; after noise was added they are projected onto this kind.
            None: the tensor has no bound, so noise cannot protect it.
        once: whether a client uploads it in its first round only.
    """

    kind: str
    description: str
    values: Values | None = "real"
    once: bool = False
