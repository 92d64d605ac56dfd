"""Scores one model on one part of the data by the run's metric and by those of
`evaluation.metrics`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor

from fl_lightning.core import Client, RunContext
from fl_lightning.data.part import Part
from fl_lightning.engine.trainer import Trainer
from fl_lightning.foundation import log
from fl_lightning.foundation.device import seed_all
from fl_lightning.foundation.metric import (
    ACCURACY,
    CLASS_SHARE,
    FURTHER,
    MOST_NAMED,
    NO_TARGET,
    ONE_CLASS,
    PREDICTED,
    Further,
    Metric,
    one_class_warning,
    recalls,
    reweighted_accuracy,
)
from fl_lightning.foundation.rng import key
from fl_lightning.methods.base import Method
from fl_lightning.training.executors.base import Executor, ScoreJob

T = TypeVar("T")
ScoredBatches = list[tuple[Tensor, Tensor]]
"""Class scores (b, classes) and labels (b,) of each batch."""


def further_metrics(run: RunContext) -> list[Further]:
    """Return the metrics of `evaluation.metrics` that are computed on each client's test data."""
    named = run.config.evaluation.metrics or ()
    return [FURTHER[name] for name in named if name != CLASS_SHARE.name]


@torch.no_grad()
def score(
    kind: str,
    client: Client,
    part: Part,
    pairs: ScoredBatches | None = None,
    answers: list[Tensor] | None = None,
) -> Tensor:
    """Score the bound model on `part` by the run's main metric, such as the accuracy; returns a
    tensor of shape (), NaN if the part is empty.

    Random numbers that the model draws follow from seed and client (on the global test set from
    the seed), not from earlier scoring.

    Args:
        kind: the kind of model, as which the method computes its outputs.
        pairs: list to which the scores and labels of each batch are added.
        answers: list to which the predicted classes of each batch are added.
    """
    run = client.run
    module = client.module
    outputs = run.method.outputs
    on_global_test = part is run.data.global_test(run.device, run.dtype)
    number = run.clients if on_global_test else client.id
    seed_all(_draws_key(run.config.seed, number), run.device)
    module.model.eval()
    total: Tensor | None = None
    for x, y in part.batches(run.config.evaluation.batch_size):
        with module.cast():
            scores = outputs(client, x, kind)
            batch_total = module.metric.total(scores, y, module.num_classes)
        total = batch_total if total is None else total + batch_total
        if pairs is not None:
            pairs.append((scores, y))
        if answers is not None and y.ndim == 1:
            answers.append(scores.argmax(1))
    if total is None:
        return torch.full((), torch.nan, device=run.device)
    return total / len(part)


def predictions(
    kind: str,
    client: Client,
    vector: Tensor,
) -> dict[str, Any]:
    """Predict the client's test samples with the model `vector` of this `kind`; returns the columns
    of `final_predictions.parquet`."""
    data = client.run.data
    pairs: ScoredBatches = []
    client.ready(kind, vector)
    score(kind, client, client.data.test, pairs)
    scores, y = _joined(pairs)
    columns: dict[str, Any] = {"client": client.id, "row": data.test_table_rows(client.id)}
    if data.client_names:
        columns["name"] = data.client_names[client.id]
    if data.task == "regression":
        columns["label"] = y.cpu().numpy()
        columns["prediction"] = scores[:, 0].cpu().numpy()
        return columns
    names = data.class_names
    columns["label"] = [names[number] for number in y.tolist()]
    probabilities = scores[:, : len(names)].softmax(1).T.cpu().numpy()
    for name, values in zip(names, probabilities, strict=True):
        columns[f"probability_{name}"] = values
    return columns


@torch.no_grad()
def network_scores(client: Client, part: Part) -> tuple[Tensor, Tensor]:
    """Return scores (n, classes) of the bound network and labels (n,), on the CPU. The method's
    `outputs` is not applied, as an exported model lacks it."""
    model = client.module.model.eval()
    batches = part.batches(client.run.config.evaluation.batch_size)
    pairs = [(model(x).cpu(), y.cpu()) for x, y in batches]
    if not pairs:
        return torch.zeros(0, client.module.num_classes), torch.zeros(0, dtype=torch.int64)
    return _joined(pairs)


def measured(
    kind: str,
    client: Client,
    part: Part,
    pairs: ScoredBatches | None = None,
) -> dict[Metric, Tensor]:
    """Score the bound model on `part` by all metrics.

    Args:
        pairs: list to which the scores and labels of each batch are added.

    Returns:
        By metric a tensor of shape (), NaN if a further metric is not defined on these samples. A
        classification also has the predicted class of each sample, (n,), under `PREDICTED`.
    """
    further = further_metrics(client.run)
    main = client.run.data.metric
    if further and pairs is None:
        pairs = []
    answers: list[Tensor] | None = [] if main is ACCURACY else None
    values: dict[Metric, Tensor] = {
        main: score(
            kind,
            client,
            part,
            pairs,
            answers,
        )
    }
    if answers:
        values[PREDICTED] = torch.cat(answers)
    if further and pairs:
        scores, y = _joined(pairs)
        values |= {metric: metric.value(scores, y) for metric in further}
    return values


class ScoreCache:
    """Keeps each client's last scores, so that no model is scored twice on the same part of the
    data.

    The model `before` a round often equals the last round's `global` (or `after`, if clients keep
    their models), and so does the final model. A digest of vector and buffers identifies a model.
    The cache is disabled if the score depends on more than model, client and data: if the method
    overrides `outputs` or `prepare`, or a model writes to a buffer when it is scored. It is also
    disabled on accelerators, where computing a digest would wait for the device.
    """

    def __init__(self, run: RunContext, trainers: Sequence[Trainer]) -> None:
        self.run = run
        self.trainers = trainers
        method = type(run.method)
        plain = method.outputs is Method.outputs and method.prepare is Method.prepare
        self.enabled = plain and run.device.type == "cpu"
        self._last: dict[tuple[int, Any], dict[str, tuple[Part, bytes, Any]]] = {}
        """By client and scoring function, for the last model of each kind: data, digest and
        result."""
        self.shares = False
        """Whether the context of `sharing` is active: no vector changes, so the last digest can be
        reused."""
        self._last_hashed: tuple[Tensor | None, bytes] = None, b""

    @contextlib.contextmanager
    def sharing(self) -> Iterator[None]:
        """Return a context in which the digest of a vector that several clients share, such as the
        global model, is computed once. The caller must not change any vector within it."""
        self.shares = True
        try:
            yield
        finally:
            self.shares = False
            self._last_hashed = None, b""

    def model(self, kind: str, client: Client, vector: Tensor, ahead: bool = False) -> ScoredModel:
        """Prepare a client's model for scoring.

        A model whose scores go to the cache gets a digest, and is bound to the module only when its
        score is computed. Otherwise the model gets no digest and is bound now: if the cache is
        disabled, or if the next download replaces the model, so that its scores would never be
        needed again.

        Args:
            kind: the kind of model, as which it is scored.
            vector: the model (D,).
            ahead: whether `score_ahead` will score the model together with others. It then gets a
                digest even if the next download replaces it.
        """
        run = client.run
        digest = b""
        is_replaced = kind == "after" and run.policy.starts_from_server and run.judge != "after"
        if self.enabled and (ahead or not is_replaced):
            last, digest = self._last_hashed
            if last is not vector:
                digest = _hashed(vector)
            if self.shares:
                self._last_hashed = vector, digest
            digest += b"".join(map(_hashed, client.state.buffers))
        else:
            client.ready(kind, vector)
        return ScoredModel(kind, client, vector, digest, self._last)

    def can_score_ahead(self, client: Client) -> bool:
        """Whether `score_ahead` can score models of the client."""
        executor = self.trainers[client.group.index].executor
        data = client.data
        plain = self.enabled and not further_metrics(self.run)
        return plain and (executor.can_score(data.test) or executor.can_score(data.validation))

    def score_ahead(self, models: Sequence[ScoredModel]) -> None:
        """Score models in stacked passes, except those whose scores are in the cache. Afterwards
        `ScoredModel.get` returns the scores.

        Errors are suppressed: `get` then scores the model by itself, and its errors name client
        and round.
        """
        of_group: dict[int, list[ScoredModel]] = {}
        for model in models:
            of_group.setdefault(model.client.group.index, []).append(model)
        for index, members in of_group.items():
            with contextlib.suppress(Exception):
                self._score(self.trainers[index].executor, members)

    def _score(self, executor: Executor, models: Sequence[ScoredModel]) -> None:
        """Score models of one group on test data, and those of the judge's kind also on validation
        data; the results go to the cache."""
        jobs = []
        places = []
        for kind, client, vector, digest, _ in models:
            data = client.data
            compared: list[tuple[Any, Part]] = [(measured, data.test)]
            if kind == self.run.judge:
                compared.append((score, data.validation))
            for compute, part in compared:
                last = self._last.setdefault((client.id, compute), {})
                if executor.can_score(part) and _find(last, part, digest) is None:
                    jobs.append(ScoreJob(vector, client.state.buffers, part))
                    places.append((last, kind, digest, compute is measured))
        results = executor.score(jobs) if jobs else []
        for place, job, (total, classes) in zip(places, jobs, results, strict=True):
            last, kind, digest, on_test = place
            result: Any = total / len(job.part)
            if on_test:
                result = {self.run.data.metric: result}
                if classes is not None:
                    result[PREDICTED] = classes
            last[kind] = job.part, digest, result


class ScoredModel(NamedTuple):
    """A model to be scored, with its digest (empty: not cached) and the cached scores `last` of
    `ScoreCache`."""

    kind: str
    client: Client
    vector: Tensor
    digest: bytes
    last: dict[tuple[int, Any], dict[str, tuple[Part, bytes, Any]]]

    def get(
        self,
        compute: Callable[[str, Client, Part], T],
        part: Part,
    ) -> T:
        """Return the result of `compute` on `part`, from the cache or computed now."""
        client = self.client
        if not self.digest:
            return compute(self.kind, client, part)
        last = self.last.setdefault((client.id, compute), {})
        entry = _find(last, part, self.digest)
        if entry is None:
            client.ready(self.kind, self.vector)
            entry = part, self.digest, compute(self.kind, client, part)
        last[self.kind] = entry
        result: T = entry[2]
        return result


def _find(
    last: Mapping[str, tuple[Part, bytes, Any]],
    part: Part,
    digest: bytes,
) -> tuple[Part, bytes, Any] | None:
    """Return the cached entry of the model with this digest on `part`, or None."""
    for entry in last.values():
        if entry[0] is part and entry[1] == digest:
            return entry
    return None


def _hashed(tensor: Tensor) -> bytes:
    return xxhash.xxh3_128_digest(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)


@lru_cache(maxsize=100_000)
def _draws_key(seed: int, client: int) -> int:
    return key(seed, "evaluation", client)


def kinds_on_global_test(run: RunContext, has_global: bool) -> set[str]:
    """Return the kinds of model that are scored on the global test set.

    These are `global` (or the judge's kind if there is no global model), the kinds in
    `evaluation.models`, and the judge's kind if `evaluation.metrics` contains the accuracy weighted
    by the client's class shares (see `class_share_score`).
    """
    config = run.config.evaluation
    kinds = {"global" if has_global else run.judge, *(config.models or ())}
    if CLASS_SHARE.name in (config.metrics or ()):
        kinds.add(run.judge)
    return kinds


def on_global_test(
    kind: str,
    client: Client,
    part: Part,
) -> tuple[Tensor, Tensor | None]:
    """Score the bound model on the global test set `part`.

    Returns:
        The score, shape (); and the recall of each class, (classes,), if `evaluation.metrics`
        contains the accuracy weighted by class shares, else None.
    """
    needs_recalls = CLASS_SHARE.name in (client.run.config.evaluation.metrics or ())
    pairs: ScoredBatches | None = [] if needs_recalls else None
    value = score(kind, client, part, pairs)
    return value, recalls(*_joined(pairs)) if pairs else None


def class_share_score(
    kind: str,
    client: Client,
    recall: Tensor | None,
) -> dict[str, Tensor]:
    """Return the column `global_test_class_share_accuracy_KIND`: the accuracy on the global test
    set if its classes were as frequent as in the client's data, which is the mean of the recalls
    weighted by the client's shares of the classes.

    Args:
        kind: the kind of model, which is part of the column's name.
        recall: recall of each class on the global test set, (classes,); None: return {}.
    """
    if recall is None:
        return {}
    counts = torch.from_numpy(client.run.data.class_counts[client.id]).to(recall)
    return {CLASS_SHARE.on_global_test(kind): reweighted_accuracy(recall, counts)}


def columns(names: Sequence[str] | None, kind: str) -> dict[str, str]:
    """Return the columns of further metrics, by metric name.

    Args:
        names: names of metrics in `evaluation.metrics`; None: no metrics.
        kind: the kind of model whose scores the columns hold.
    """
    columns = {}
    for name in names or ():
        metric = FURTHER[name]
        of_kind = metric.on_global_test if metric is CLASS_SHARE else metric.by
        columns[metric.name] = of_kind(kind)
    return columns


def averaged(rows: Sequence[Mapping[str, float]], columns: Mapping[Any, str]) -> dict[str, float]:
    """Return for each metric `mean_NAME`, the mean over the clients that have a value, and
    `clients_NAME`, the number of these clients.

    Args:
        rows: the scores of each client by column.
        columns: the column of each metric by its NAME.
    """
    means = {}
    for name, column in columns.items():
        values = np.sort([row[column] for row in rows if column in row])
        if len(values):
            means[f"mean_{name}"] = float(values.mean())
        means[f"clients_{name}"] = len(values)
    return means


def one_class(client: Client, measured: Mapping[Metric, Tensor]) -> dict[str, float]:
    """Return the column `ONE_CLASS` for a model that predicts the same class for all test samples
    of a client although these have several classes. Its value is the share of the most frequent
    class among the samples. Return an empty dict for any other model.

    Args:
        measured: the model's scores on the client's test data, as from `measured`.
    """
    answers = measured.get(PREDICTED)
    if answers is None or bool((answers != answers[0]).any()):
        return {}
    batches = client.data.test.batches(client.run.config.evaluation.batch_size)
    labels = torch.cat([y for _, y in batches])
    share = float(labels.bincount().max()) / len(labels)
    if share < 1:
        return {ONE_CLASS: share}
    return {}


def log_caveats(
    run: RunContext,
    rows: Sequence[Mapping[str, float]],
    metrics: Sequence[str],
) -> None:
    """Log which clients have no value of a metric, and whose final model predicts a single class.

    Args:
        rows: each client's scores by the further `metrics`.
    """
    names = run.data.client_names or [str(client) for client in range(len(rows))]
    for metric in metrics:
        without = [name for name, row in zip(names, rows, strict=True) if metric not in row]
        if not without:
            continue
        listed = ", ".join(without[:MOST_NAMED])
        listed += ", ..." if len(without) > MOST_NAMED else ""
        reason = "have a single class, or none"
        if metric == CLASS_SHARE.name:
            reason = "lack a class of the client"
        log.say(
            f"{metric}: mean over {len(rows) - len(without)} of {len(rows)} clients; the test "
            f"samples of {len(without)} {reason}, so it is not defined there (client {listed})"
        )
    shares = {}
    for name, row in zip(names, rows, strict=True):
        if ONE_CLASS in row:
            shares[name] = row[ONE_CLASS]
    if shares:
        log.say(f"predictions: {one_class_warning(shares, len(rows), metrics)}")


def split_columns(
    values: Mapping[str, Any], columns: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split `values` in two dicts: all but the named columns, and the named columns without
    NaN."""
    rest = dict(values)
    split = {}
    for name in columns:
        value = rest.pop(name, np.nan)
        if value == value:
            split[name] = value
    return rest, split


def _joined(pairs: ScoredBatches) -> tuple[Tensor, Tensor]:
    """Join all batches: scores (n, classes) in 64 bits, and labels (n,)."""
    scores, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    # in texts, some positions have no target
    has_target = labels != NO_TARGET if labels.ndim > 1 else slice(None)
    return scores[has_target].double(), labels[has_target]
