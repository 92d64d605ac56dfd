"""Is federating worth it? For each silo: what it gains over training alone, with an interval and a
verdict."""

FOLDS = 5
"""Of a cycle. 5: with 10 intervals are no narrower for the same number of trainings
(docs/decisions/0027)."""
