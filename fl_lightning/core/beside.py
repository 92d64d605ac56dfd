"""What uploads hold beside models: a method declares it, so that it can be protected, listed, or
refused by name."""

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
"""What an entry's numbers are. real, nonnegative: any, or none below 0. counts: of samples. shares:
each row is a distribution. covariance: symmetric, no negative eigenvalue. classes: numbers of the
classes that the upload is about; rows, class_counts: a row, or a count, for each of these. public:
it follows from the numbers of samples and the configuration."""


@dataclass(frozen=True)
class Beside:
    """One named tensor of an upload's `statistics` or `extra`.

    Args:
        kind: the name under which its bound and its noise are configured; entries may share one.
        words: what it is.
        values: what its numbers are, and so what they are again after noise; None: no bound makes
            sense of it, and noise cannot protect it.
        once: whether a client uploads it in its first round alone.
    """

    kind: str
    words: str
    values: Values | None = "real"
    once: bool = False
