"""Declares the tensors of uploads beside models, so that they can be protected, listed, or refused
by name."""

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
"""Kinds of numbers in a tensor. real, nonnegative: any, or none below 0. counts: of samples.
shares: each row is a distribution. covariance: symmetric, no negative eigenvalue. classes: numbers
of the classes that the upload is about; rows, class_counts: a row, or a count, for each of these.
public: it follows from the numbers of samples and the configuration."""


@dataclass(frozen=True)
class Beside:
    """One named tensor of an upload's `statistics` or `extra`.

    Args:
        kind: the name under which its bound and its noise are configured; entries may share one.
        words: its description.
        values: the kind of its numbers, onto which noisy numbers are projected; None: it has no
            bound, and noise cannot protect it.
        once: whether a client uploads it in its first round only.
    """

    kind: str
    words: str
    values: Values | None = "real"
    once: bool = False
