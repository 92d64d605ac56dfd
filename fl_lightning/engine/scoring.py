"""Scores one model on one part of the data: by the run's metric, and by those of
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
Seen = list[tuple[Tensor, Tensor]]
"""Class scores (b, classes) and labels (b,) of each batch."""


def further_metrics(run: RunContext) -> list[Further]:
    """The further metrics of each client's own test data."""
    named = run.config.evaluation.metrics or ()
    return [FURTHER[name] for name in named if name != CLASS_SHARE.name]


@torch.no_grad()
def score(
    kind: str,
    client: Client,
    part: Part,
    pairs: Seen | None = None,
    answers: list[Tensor] | None = None,
) -> Tensor:
    """Share of right answers (or the other metric) of the bound model on `part`, shape (); NaN on
    an empty part.

    `pairs` and `answers`, where given, collect scores with labels, and the predicted class of each
    sample. The model's random numbers follow from seed and client (on the global test set from the
    seed), not from what was scored before.
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
    """Predictions of `vector`, scored as `kind`, for the client's test samples: columns of
    `final_predictions.parquet`."""
    data = client.run.data
    pairs: Seen = []
    client.ready(kind, vector)
    score(kind, client, client.data.test, pairs)
    scores, y = _joined(pairs)
    columns: dict[str, Any] = {"client": client.id, "row": data.tested_lines(client.id)}
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
    """Scores (n, classes) and labels (n,) of the bound network, on the CPU: without the method's
    own `outputs`, which an exported model lacks."""
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
    pairs: Seen | None = None,
) -> dict[Metric, Tensor]:
    """Scores of the bound model on `part` by metric, shape (): NaN where a further metric is not
    defined. Of a classification also, as `PREDICTED`, the predicted class of each sample, (n,).
    `pairs` as in `score`."""
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


class Remembered:
    """Each client's last scores, so that no model is scored twice on one part of the data.

    `before` of a round is mostly the last round's `global` (or, where clients keep their models,
    `after`), and so are final models. A model is recognised by a digest of its vector and buffers.
    Its score follows from these, the client and its data if the method has no `outputs` and
    `prepare` of its own and no model writes to a buffer when it is scored; else every model is
    scored anew. So it is on accelerators, where reading the bytes would wait for the device.
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
        """Whether nothing writes to vectors now, so that a vector keeps its digest."""
        self._last_hashed: tuple[Tensor | None, bytes] = None, b""

    @contextlib.contextmanager
    def sharing(self) -> Iterator[None]:
        """Within, nothing writes to vectors: a model that clients share is hashed once."""
        self.shares = True
        try:
            yield
        finally:
            self.shares = False
            self._last_hashed = None, b""

    def model(self, kind: str, client: Client, vector: Tensor, ahead: bool = False) -> Model:
        """The model `vector` (D,) of `client`, to be scored as `kind` (`ahead`: beside others).

        It has no digest, and is bound, where scores are not remembered, or where this one is of no
        use later, as the next download replaces the model.
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
        return Model(kind, client, vector, digest, self._last)

    def takes(self, client: Client) -> bool:
        """Whether models of the client can be scored ahead, beside others."""
        executor = self.trainers[client.group.index].executor
        data = client.data
        plain = self.enabled and not further_metrics(self.run)
        return plain and (executor.scores(data.test) or executor.scores(data.validation))

    def score_ahead(self, models: Sequence[Model]) -> None:
        """Score models beside each other, unless their scores are remembered; `Model.get` returns
        these scores.

        Errors are dropped: they occur again where client and round are named.
        """
        of_group: dict[int, list[Model]] = {}
        for model in models:
            of_group.setdefault(model.client.group.index, []).append(model)
        for index, members in of_group.items():
            with contextlib.suppress(Exception):
                self._score(self.trainers[index].executor, members)

    def _score(self, executor: Executor, models: Sequence[Model]) -> None:
        """Score on test data, and models of the judge's kind on validation data, too."""
        jobs = []
        places = []
        for kind, client, vector, digest, _ in models:
            data = client.data
            compared: list[tuple[Any, Part]] = [(measured, data.test)]
            if kind == self.run.judge:
                compared.append((score, data.validation))
            for compute, part in compared:
                last = self._last.setdefault((client.id, compute), {})
                if executor.scores(part) and _find(last, part, digest) is None:
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


class Model(NamedTuple):
    """A model that is scored, with its `digest` and the scores that are remembered (`last`, of
    `Remembered`)."""

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
        """The result of `compute` on `part`: remembered, or computed now."""
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
    """The entry of the model with this digest on `part`."""
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
    """The kinds of model that are scored on the global test set: the global one, or the judge's
    where there is none, and those that the configuration names; by class shares always the
    judge's."""
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
    """Score of the bound model on the global test set `part`, shape (), and its recalls (classes,)
    if class shares are asked for."""
    asks = CLASS_SHARE.name in (client.run.config.evaluation.metrics or ())
    pairs: Seen | None = [] if asks else None
    value = score(kind, client, part, pairs)
    return value, recalls(*_joined(pairs)) if pairs else None


def on_shares(
    kind: str,
    client: Client,
    recall: Tensor | None,
) -> dict[str, Tensor]:
    """`global_test_class_share_accuracy_KIND`: the score on the global test set, its classes
    weighted by the client's shares."""
    if recall is None:
        return {}
    counts = torch.from_numpy(client.run.data.class_counts[client.id]).to(recall)
    return {CLASS_SHARE.on_global_test(kind): reweighted_accuracy(recall, counts)}


def columns(names: Sequence[str] | None, kind: str) -> dict[str, str]:
    """Columns of the metrics `names` for models of this kind, by name."""
    columns = {}
    for name in names or ():
        metric = FURTHER[name]
        of_kind = metric.on_global_test if metric is CLASS_SHARE else metric.by
        columns[metric.name] = of_kind(kind)
    return columns


def averaged(rows: Sequence[Mapping[str, float]], columns: Mapping[Any, str]) -> dict[str, float]:
    """For each metric with its column, `mean_NAME` over the clients that have a value, and
    `clients_NAME`, their number."""
    means = {}
    for name, column in columns.items():
        values = np.sort([row[column] for row in rows if column in row])
        if len(values):
            means[f"mean_{name}"] = float(values.mean())
        means[f"clients_{name}"] = len(values)
    return means


def one_class(client: Client, measured: Mapping[Metric, Tensor]) -> dict[str, float]:
    """As `ONE_CLASS`, the share of the most frequent label of a client's test samples, if its model
    predicts a single class for them and they have several; else empty."""
    answers = measured.get(PREDICTED)
    if answers is None or bool((answers != answers[0]).any()):
        return {}
    batches = client.data.test.batches(client.run.config.evaluation.batch_size)
    labels = torch.cat([y for _, y in batches])
    share = float(labels.bincount().max()) / len(labels)
    if share < 1:
        return {ONE_CLASS: share}
    return {}


def tell_of_finals(
    run: RunContext,
    rows: Sequence[Mapping[str, float]],
    metrics: Sequence[str],
) -> None:
    """Log caveats about final models' scores, `rows` of all clients: which clients have no value of
    a metric, and whose model predicts one class."""
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
            f"samples of {len(without)} {reason}, and cannot show it (client {listed})"
        )
    shares = {}
    for name, row in zip(names, rows, strict=True):
        if ONE_CLASS in row:
            shares[name] = row[ONE_CLASS]
    if shares:
        log.say(f"predictions: {one_class_warning(shares, len(rows), metrics)}")


def set_apart(
    values: Mapping[str, Any], named: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`values` without the columns `named`, and those of the columns that are not NaN."""
    rest = dict(values)
    apart = {}
    for name in named:
        value = rest.pop(name, np.nan)
        if value == value:
            apart[name] = value
    return rest, apart


def _joined(pairs: Seen) -> tuple[Tensor, Tensor]:
    """Scores (n, classes) in 64 bits, and labels (n,), of all batches."""
    scores, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    # of texts: positions that have a target
    has_target = labels != NO_TARGET if labels.ndim > 1 else slice(None)
    return scores[has_target].double(), labels[has_target]
