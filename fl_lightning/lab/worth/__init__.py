"""Is federating worth it? For each silo: its gain over the best of training alone, with an interval
and a verdict.

A *row* is one candidate: a method trained for one of `LENGTHS`, or a model of scikit-learn that a
silo fits alone.
"""

FOLDS = 5
"""Of a cycle. 5: with 10 intervals are no narrower for the same number of trainings
(docs/decisions/0027)."""
LENGTHS = (1, 3, 10)
"""Times the configured rounds after which a training is scored: a silo alone has few samples, and
so few steps in a round. 10: from there on no real set changed (docs/results/real-silos.md)."""
LINEAR, BOOSTING = "own linear", "own boosting"


def row(label: str, length: int) -> str:
    """The name of a row that has trained for so many times the configured rounds."""
    return label if length == 1 else f"{label} x{length}"


LOCAL = [row("local", length) for length in LENGTHS]
ALONE = (*LOCAL, LINEAR, BOOSTING)
"""What a silo can do without others: its network for three lengths, and models of scikit-learn."""
