"""Measure for each silo whether federating pays: its gain over the best model it can train alone,
with an interval and a verdict.

A *row* of the tables is a candidate: a method trained for one of `LENGTHS`, or a *plain* model of
scikit-learn that a silo fits alone. A *cycle* tests each sample once: it trains each row `FOLDS`
times, each time without another fifth of every silo's samples.
"""

FOLDS = 5
"""Folds of a cycle. 5: with 10, intervals are no narrower for the same number of trainings
(docs/decisions/0027)."""
LENGTHS = (1, 3, 10)
"""Training lengths after which models are scored, in multiples of the configured rounds: a silo
alone has few samples, hence few steps in a round. 10: longer trainings changed no result on real
data (docs/results/real-silos.md)."""
LINEAR, BOOSTING = "own linear", "own boosting"


def row_name(label: str, length: int) -> str:
    """Name the row of a method's label and a training length, such as "ditto x3"."""
    return label if length == 1 else f"{label} x{length}"


LOCAL = [row_name("local", length) for length in LENGTHS]
ALONE = (*LOCAL, LINEAR, BOOSTING)
"""Rows that a silo trains alone: its network for each length, and the plain models."""
