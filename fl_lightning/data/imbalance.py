"""Classes that are so rare that accuracy hides how they fare, or that no client trains on; and by
which metric a run is judged where none is named."""

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
    half_of_equal = 0.5 / max(int(present.sum()), 1)
    limit = min(RARE, half_of_equal) * counts.sum()
    return np.flatnonzero(present & (counts < limit)).tolist()


def shares(data: FederatedData) -> np.ndarray:
    """Of the classes among all clients' training samples (classes,); empty where they are not
    known, or there are no classes."""
    are_known = data.holds_all and data.task == "classification" and not data.vocabulary
    counts = data.class_counts.sum(0) if are_known else np.zeros(0)
    return np.asarray(counts / max(counts.sum(), 1))


def default_metric(data: FederatedData) -> JudgeMetric | None:
    """Returns the metric of a run for which none is named: AUROC where one of two classes is `FEW`;
    None: the task's own."""
    class_shares = shares(data)
    return "auroc" if len(class_shares) == 2 and class_shares.min() < FEW else None


def judged(config: Config, data: FederatedData) -> Config:
    """`config` with the metric by which its run is judged, and scored."""
    evaluation = config.evaluation
    name = evaluation.metric or default_metric(data)
    if name not in FURTHER:
        return config
    metrics = [*dict.fromkeys([*(evaluation.metrics or ()), name])]
    return replace(config, evaluation=replace(evaluation, metric=name, metrics=metrics))


def metric_line(data: FederatedData) -> str:
    """What is said where AUROC is the metric by default."""
    class_shares = shares(data)
    rarest = data.class_names[int(class_shares.argmin())]
    return (
        f"metric: auroc, since {class_shares.min():.1%} of the training samples are {rarest!r}; "
        f"evaluation.metric names another"
    )


def _has_classes(data: FederatedData) -> bool:
    """Whether labels are classes, and not targets or next tokens."""
    return data.task == "classification" and data.vocabulary != data.num_classes


def line(data: FederatedData, metrics: Collection[str]) -> str | None:
    """A line that names the rare classes of `data`, and metrics for them unless `metrics` has one;
    None: no rare class.

    Tokens of texts are no classes in this sense.
    """
    if not _has_classes(data):
        return None
    counts = data.class_counts.sum(0)
    rarest = sorted(rare(counts), key=lambda k: int(counts[k]))
    if not rarest:
        return None
    shown = [f"{data.class_names[k]!r} {counts[k] / counts.sum():.2%}" for k in rarest[:MOST_NAMED]]
    more = f" and {len(rarest) - MOST_NAMED} more" if len(rarest) > MOST_NAMED else ""
    line = f"data: rare classes, share of the training samples: {', '.join(shown)}{more}"
    remedy = f"; --evaluation.metrics [{','.join(METRICS)}] shows them"
    return f"{line}; accuracy hides them{'' if set(metrics) & set(METRICS) else remedy}"


def untrained(data: FederatedData) -> str | None:
    """A line that says how many validation and test samples are of classes that no client trains
    on; None: none are.

    With one sample of each class the same classes are held out at every client.
    """
    if not _has_classes(data):
        return None
    is_untrained = data.class_counts.sum(0) == 0
    lost = []
    for part, counts in (("validation", data.validation_counts), ("test", data.test_counts)):
        samples = counts[:, is_untrained].sum()
        if samples:
            lost.append(f"{samples} of {counts.sum()} {part}")
    if not lost:
        return None
    line = f"data: {' and '.join(lost)} samples are of classes that no client trains on"
    return f"{line}; they tell little"


def scattered(data: FederatedData) -> str | None:
    """A line where classes have less than two training samples on average, as with numbers for
    labels; None: else."""
    if not _has_classes(data):
        return None
    samples = int(data.class_counts.sum())
    classes = data.num_classes
    if samples >= 2 * classes:
        return None
    return (
        f"data: {classes} classes in {samples} training samples; for a number to predict, "
        f"--data.task regression"
    )
