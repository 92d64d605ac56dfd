"""Rare classes, which accuracy hides, classes that no client trains on, and the default metric."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from fl_lightning.configuration.config import Config
from fl_lightning.data.federated import FederatedData
from fl_lightning.foundation.metric import FURTHER, JudgeMetric

RARE = 0.05
"""Share of all clients' training samples below which a class is rare: a model that never predicts
it is still 95 % right."""
AUROC_BELOW = 0.2
"""Share of the rarer of two classes below which AUROC is the default metric: a model that never
predicts the class is still 80 % right. Ours."""
MOST_NAMED = 5
"""Largest number of rare classes that the warning names."""
METRICS = ("balanced_accuracy", "auroc", "f1")
"""Metrics that show rare classes, since each class counts alike."""


def rare_classes(counts: Sequence[int] | np.ndarray) -> list[int]:
    """Return the rare classes, given the number of samples of each class.

    A class is rare if it has samples, but less than `RARE` of all and less than half of an equal
    share.
    """
    counts = np.asarray(counts)
    present = counts > 0
    half_of_equal = 0.5 / max(int(present.sum()), 1)
    limit = min(RARE, half_of_equal) * counts.sum()
    return np.flatnonzero(present & (counts < limit)).tolist()


def class_shares(data: FederatedData) -> np.ndarray:
    """Return each class's share of all clients' training samples, (classes,); empty without
    classes, or if this process does not hold all clients' data."""
    are_known = data.holds_all and data.task == "classification" and not data.vocabulary
    counts = data.class_counts.sum(0) if are_known else np.zeros(0)
    return np.asarray(counts / max(counts.sum(), 1))


def default_metric(data: FederatedData) -> JudgeMetric | None:
    """Return the metric of a run whose configuration names none: `auroc` if there are two classes
    and one has a share below `AUROC_BELOW`; otherwise None, for the task's own metric."""
    shares = class_shares(data)
    return "auroc" if len(shares) == 2 and shares.min() < AUROC_BELOW else None


def with_metric(config: Config, data: FederatedData) -> Config:
    """Return `config` with the metric that judges its run, from `evaluation.metric` or by default.

    A metric that is not the task's own is added to `evaluation.metrics`, so that it is scored.
    """
    evaluation = config.evaluation
    name = evaluation.metric or default_metric(data)
    if name not in FURTHER:
        return config
    metrics = [*dict.fromkeys([*(evaluation.metrics or ()), name])]
    return replace(config, evaluation=replace(evaluation, metric=name, metrics=metrics))


def metric_line(data: FederatedData) -> str:
    """Return the line that tells users that AUROC was chosen by default as the run's metric."""
    shares = class_shares(data)
    rarest = data.class_names[int(shares.argmin())]
    return (
        f"metric: auroc, since {shares.min():.1%} of the training samples are {rarest!r}; "
        f"evaluation.metric names another"
    )


def _has_classes(data: FederatedData) -> bool:
    """Return whether labels are classes, not numbers or next tokens."""
    return data.task == "classification" and data.vocabulary != data.num_classes


def rare_line(data: FederatedData, metrics: Collection[str]) -> str | None:
    """Return a warning that names the rare classes; None without one.

    It recommends `METRICS`, unless the run scores one of them already. Tokens of texts do not count
    as classes.

    Args:
        data: data of the run.
        metrics: names of the metrics that the run scores.
    """
    if not _has_classes(data):
        return None
    counts = data.class_counts.sum(0)
    rarest = sorted(rare_classes(counts), key=lambda k: int(counts[k]))
    if not rarest:
        return None
    shown = [f"{data.class_names[k]!r} {counts[k] / counts.sum():.2%}" for k in rarest[:MOST_NAMED]]
    more = f" and {len(rarest) - MOST_NAMED} more" if len(rarest) > MOST_NAMED else ""
    line = f"data: rare classes, share of the training samples: {', '.join(shown)}{more}"
    remedy = f"; --evaluation.metrics [{','.join(METRICS)}] shows them"
    return f"{line}; accuracy hides them{'' if set(metrics) & set(METRICS) else remedy}"


def untrained_line(data: FederatedData) -> str | None:
    """Return a warning with the numbers of validation and test samples whose class no client trains
    on; None without any.

    An example is a class of which each client has one sample and holds it out.
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


def scattered_line(data: FederatedData) -> str | None:
    """Return a warning if classes have less than two training samples on average, as if labels were
    numbers; None otherwise."""
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
