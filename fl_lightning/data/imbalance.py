"""Classes that are so rare that accuracy hides how they fare, or that no client trains on."""

from collections.abc import Collection, Sequence

import numpy as np

from fl_lightning.data.federated import FederatedData

RARE = 0.05
"""A class with a smaller share of all clients' training samples is named: a model without it is 95
% right."""
MOST_NAMED = 5
"""Classes that the line names, at most."""
METRICS = ("balanced_accuracy", "auroc", "f1")
"""What shows them: each class counts alike."""


def rare(counts: Sequence[int] | np.ndarray) -> list[int]:
    """The classes with less than `RARE` of the samples `counts` [classes], and less than half of an
    equal share of them (of many classes each is below `RARE`); of those that have any."""
    counts = np.asarray(counts)
    present = counts > 0
    limit = min(RARE, 0.5 / max(int(present.sum()), 1)) * counts.sum()
    return np.flatnonzero(present & (counts < limit)).tolist()


def line(data: FederatedData, metrics: Collection[str]) -> str | None:
    """A line that names the rare classes of `data`, and metrics for them unless `metrics` has one;
    None: no rare class.

    Tokens of texts are no classes in this sense.
    """
    if data.task != "classification" or data.vocabulary == data.num_classes:
        return None
    counts = data.class_counts.sum(0)
    rarest = sorted(rare(counts), key=lambda k: int(counts[k]))
    if not rarest:
        return None
    shares = [
        f"{data.class_names[k]!r} {counts[k] / counts.sum():.2%}" for k in rarest[:MOST_NAMED]
    ]
    more = f" and {len(rarest) - MOST_NAMED} more" if len(rarest) > MOST_NAMED else ""
    take = (
        f"; --evaluation.metrics [{','.join(METRICS)}] shows them"
        if not set(metrics) & set(METRICS)
        else ""
    )
    return (
        f"data: rare classes, share of the training samples: {', '.join(shares)}{more}; accuracy "
        f"hides them{take}"
    )


def untrained(data: FederatedData) -> str | None:
    """A line that says how many validation and test samples are of classes that no client trains
    on; None: none are.

    With one sample of each class the same classes are held out at every client.
    """
    if data.task != "classification" or data.vocabulary == data.num_classes:
        return None
    nobodys = data.class_counts.sum(0) == 0
    parts = (("validation", data.validation_counts.sum(0)), ("test", data.test_counts.sum(0)))
    lost = [
        f"{counts[nobodys].sum()} of {counts.sum()} {part}"
        for part, counts in parts
        if counts[nobodys].sum()
    ]
    line = f"data: {' and '.join(lost)} samples are of classes that no client trains on"
    return f"{line}; they tell little" if lost else None


def scattered(data: FederatedData) -> str | None:
    """A line where classes have less than two training samples on average, as with numbers for
    labels; None: else."""
    if data.task != "classification" or data.vocabulary == data.num_classes:
        return None
    samples = int(data.class_counts.sum())
    classes = data.num_classes
    few = (
        f"data: {classes} classes in {samples} training samples; for a number to predict, "
        f"--data.task regression"
    )
    return few if samples < 2 * classes else None
