"""Classes that are so rare that accuracy hides how they fare, or that no client trains on."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from fl_lightning.configuration.config import Config
from fl_lightning.data.federated import FederatedData
from fl_lightning.foundation.metric import FURTHER, JudgeMetric

RARE = 0.05
"""A class with a smaller share of all clients' training samples is named: a model without it is 95
% right."""
FEW = 0.2
"""One of two classes with a smaller share has the run judged by AUROC, unless a metric is named: a
model without it is 80 % right. Ours."""
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


def shares(data: FederatedData) -> np.ndarray:
    """Of the classes among all clients' training samples (classes,), as far as they are known."""
    known = data.holds_all and data.task == "classification" and not data.vocabulary
    counts = data.class_counts.sum(0) if known else np.zeros(0)
    return np.asarray(counts / max(counts.sum(), 1))


def metric(data: FederatedData, named: JudgeMetric | None) -> JudgeMetric | None:
    """The metric by which a run is judged: `named` (`evaluation.metric`), else AUROC where one of
    two classes is `FEW`; None: the task's own."""
    own = shares(data)
    return "auroc" if named is None and len(own) == 2 and own.min() < FEW else named


def judged(config: Config, data: FederatedData) -> Config:
    """`config` with the metric by which its run is judged, and scored."""
    evaluation = config.evaluation
    name = metric(data, evaluation.metric)
    if name is None or name not in FURTHER:
        return config
    metrics = [*dict.fromkeys([*(evaluation.metrics or ()), name])]
    return replace(config, evaluation=replace(evaluation, metric=name, metrics=metrics))


def metric_line(data: FederatedData) -> str:
    """What is said where AUROC is the metric by default."""
    own = shares(data)
    return (
        f"metric: auroc, since {own.min():.1%} of the training samples are "
        f"{data.class_names[int(own.argmin())]!r}; evaluation.metric names another"
    )


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
