"""One model on one part of the data: by the run's metric, and by whatever else `evaluation.metrics`
asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor

from fl_lightning.core.client import Client
from fl_lightning.core.run import RunContext
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
    by_shares,
    one_class_words,
    recalls,
)
from fl_lightning.foundation.rng import key
from fl_lightning.methods.base import Method
from fl_lightning.training.executors.base import ScoreJob

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
    seen: Seen | None = None,
    answers: list[Tensor] | None = None,
) -> Tensor:
    """Share of right answers (or the other metric) of what is bound on `part`, shape (); NaN on an
    empty part.

    Scores and labels are added to `seen`, and the predicted class of each sample to `answers`,
    where these are given. What a model draws follows from seed and client (on the test set of all
    from the seed), not from what was scored before.
    """
    run, module, outputs = client.run, client.module, client.run.method.outputs
    common = run.data.global_test(run.device, run.dtype)
    seed_all(_draws_key(run.config.seed, run.clients if part is common else client.id), run.device)
    module.model.eval()
    right: Tensor | None = None
    for x, y in part.batches(run.config.evaluation.batch_size):
        with module.cast():
            scores = outputs(client, x, kind)
            total = module.metric.total(scores, y, module.num_classes)
        right = total if right is None else right + total
        if seen is not None:
            seen.append((scores, y))
        if answers is not None and y.ndim == 1:
            answers.append(scores.argmax(1))
    return torch.full((), torch.nan, device=run.device) if right is None else right / len(part)


def predictions(kind: str, client: Client, vector: Tensor) -> dict[str, Any]:
    """What `vector`, scored as `kind`, makes of the client's test samples: columns of
    `final_predictions.parquet`."""
    data, seen = client.run.data, Seen()
    client.ready(kind, vector)
    score(kind, client, client.data.test, seen)
    scores, y = _whole(seen)
    columns: dict[str, Any] = {"client": client.id, "row": data.tested_lines(client.id)}
    if data.client_names:
        columns["name"] = data.client_names[client.id]
    if data.task == "regression":
        return columns | {"label": y.cpu().numpy(), "prediction": scores[:, 0].cpu().numpy()}
    names = data.class_names
    chances = scores[:, : len(names)].softmax(1).T.cpu().numpy()
    columns["label"] = [names[number] for number in y.tolist()]
    probabilities = zip(names, chances, strict=True)
    return columns | {f"probability_{name}": values for name, values in probabilities}


@torch.no_grad()
def network_scores(client: Client, part: Part) -> tuple[Tensor, Tensor]:
    """Scores (n, classes) and labels (n,) of the network that is bound, on the CPU: without what
    the method's own `outputs` adds, as an exported model has none of it."""
    model = client.module.model.eval()
    batches = part.batches(client.run.config.evaluation.batch_size)
    seen = [(model(x).cpu(), y.cpu()) for x, y in batches]
    if not seen:
        return torch.zeros(0, client.module.num_classes), torch.zeros(0, dtype=torch.int64)
    return _whole(seen)


def measured(
    kind: str, client: Client, part: Part, seen: Seen | None = None
) -> dict[Metric, Tensor]:
    """What is bound on the client's test data, by metric: NaN where a further metric is not
    defined. `seen` as in `score`. Of a classification also `PREDICTED`."""
    named, own = further_metrics(client.run), client.run.data.metric
    seen = [] if named and seen is None else seen
    answers: list[Tensor] | None = [] if own is ACCURACY else None
    values: dict[Metric, Tensor] = {own: score(kind, client, part, seen, answers)}
    if answers:
        values[PREDICTED] = torch.cat(answers)
    if named and seen:
        scores, y = _whole(seen)
        values |= {metric: metric.value(scores, y) for metric in named}
    return values


class ToScore(NamedTuple):
    """A model of a client that is about to be scored: with others it can be scored beforehand."""

    kind: str
    client: Client
    vector: Tensor


class Remembered:
    """Each client's last scores, so that no model is scored twice on one part of the data.

    `before` of a round is mostly the last round's `global` (or, where clients keep their models,
    `after`), and so are final models. A model is known by the bytes of its vector and buffers. Its
    score follows from these, the client and its data wherever the method leaves `outputs` and
    `prepare` alone and no model writes to a buffer when it is scored; elsewhere every model is
    scored anew. So it is on accelerators, where reading the bytes would wait for the device.
    """

    def __init__(self, run: RunContext, trainers: Sequence[Trainer]) -> None:
        self.run, self.trainers, method = run, trainers, type(run.method)
        plain = method.outputs is Method.outputs and method.prepare is Method.prepare
        self.enabled = plain and run.device.type == "cpu"
        self.ahead = False
        """Whether models are scored beforehand, beside each other: then all are known by their
        bytes."""
        self._last: dict[tuple[int, Any], dict[str, tuple[Part, bytes, Any]]] = {}
        """By client and what was computed, for the last model of each kind: data, digest and
        result."""
        self.shared: tuple[Tensor | None, bytes] | None = None
        """The last vector and its digest while nothing writes to vectors, for models that clients
        share; else None."""

    def digest(self, kind: str, client: Client, vector: Tensor) -> bytes:
        """Of the model `vector` (D,) with the client's buffers; empty where nothing is remembered:
        also of a model that clients replace by the server's, so that it is not scored again."""
        run = client.run
        replaced = (
            kind == "after"
            and run.policy.starts_from_server
            and run.judge != "after"
            and not self.ahead
        )
        if not self.enabled or replaced:
            return b""
        shared = self.shared
        own = shared[1] if shared is not None and shared[0] is vector else _hashed(vector)
        self.shared = shared and (vector, own)
        return own + b"".join(map(_hashed, client.state.buffers))

    def takes(self, client: Client) -> bool:
        """Whether models of the client can be scored beside others."""
        executor, data = self.trainers[client.group.index].executor, client.data
        plain = self.enabled and not further_metrics(self.run)
        return plain and (executor.scores(data.test) or executor.scores(data.validation))

    def score_ahead(self, models: Sequence[ToScore]) -> None:
        """Score models beside each other, where they are not known: `get` will find them.

        What fails here will fail again where client and round are named.
        """
        for group in {model.client.group.index for model in models}:
            with contextlib.suppress(Exception):
                self._score(group, [model for model in models if model.client.group.index == group])

    def _score(self, group: int, models: Sequence[ToScore]) -> None:
        """On their clients' test data, the judge's on validation data too."""
        self.ahead, executor, judge = True, self.trainers[group].executor, self.run.judge
        jobs: list[ScoreJob] = []
        places: list[tuple[Any, str, Client, bytes]] = []
        for kind, client, vector in models:
            digest, data = self.digest(kind, client, vector), client.data
            for what, part in ((measured, data.test), (score, data.validation)):
                if not (executor.scores(part) and (what is measured or kind == judge)):
                    continue
                if self._known(what, client, part, digest) is None:
                    jobs.append(ScoreJob(vector, client.state.buffers, part))
                    places.append((what, kind, client, digest))
        scored = executor.score(jobs) if jobs else []
        for (what, kind, client, digest), job, (total, classes) in zip(
            places, jobs, scored, strict=True
        ):
            value = total / len(job.part)
            values = {client.run.data.metric: value} | (
                {} if classes is None else {PREDICTED: classes}
            )
            result = values if what is measured else value
            self._last.setdefault((client.id, what), {})[kind] = job.part, digest, result

    def _known(
        self, what: Any, client: Client, part: Part, digest: bytes
    ) -> tuple[Part, bytes, Any] | None:
        last = self._last.get((client.id, what), {})
        return next(
            (entry for entry in last.values() if entry[0] is part and entry[1] == digest), None
        )

    def get(
        self,
        compute: Callable[[str, Client, Part], T],
        kind: str,
        client: Client,
        vector: Tensor,
        part: Part,
        digest: bytes,
    ) -> T:
        """`compute` of the model `vector`, whose `digest` it is, on `part`: as it was, or computed
        now.

        What has no digest is bound already (`Evaluator`).
        """
        if not digest:
            return compute(kind, client, part)
        last = self._last.setdefault((client.id, compute), {})
        known = self._known(compute, client, part, digest)
        if known is None:
            client.ready(kind, vector)
            known = part, digest, compute(kind, client, part)
        last[kind] = known
        result: T = known[2]
        return result


def _hashed(tensor: Tensor) -> bytes:
    return xxhash.xxh3_128_digest(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)


@lru_cache(maxsize=100_000)
def _draws_key(seed: int, client: int) -> int:
    return key(seed, "evaluation", client)


def kinds_on_common(run: RunContext, has_global: bool) -> set[str]:
    """The kinds of model that are scored on the test set of all: the global one, or the judge's
    where there is none, and those that the configuration names; by class shares always the
    judge's."""
    config = run.config.evaluation
    shares = CLASS_SHARE.name in (config.metrics or ())
    return {
        "global" if has_global else run.judge,
        *(config.models or ()),
        *([run.judge] if shares else []),
    }


def on_common(kind: str, client: Client, part: Part) -> tuple[Tensor, Tensor | None]:
    """What is bound on the test set of all: its score, shape (), and where it is asked for, its
    recalls (classes,)."""
    wants = CLASS_SHARE.name in (client.run.config.evaluation.metrics or ())
    seen: Seen | None = [] if wants else None
    value = score(kind, client, part, seen)
    return value, recalls(*_whole(seen)) if seen else None


def on_shares(kind: str, client: Client, recall: Tensor | None) -> dict[str, Tensor]:
    """`global_test_class_share_accuracy_KIND`: on the test set of all as if its classes were the
    client's own mix."""
    if recall is None:
        return {}
    counts = torch.from_numpy(client.run.data.class_counts[client.id]).to(recall)
    return {CLASS_SHARE.on_global_test(kind): by_shares(recall, counts)}


def columns(names: Sequence[str] | None, kind: str) -> dict[str, str]:
    """Of each of the metrics `names`, its column by models of this kind."""
    named = [FURTHER[name] for name in names or ()]
    return {m.name: m.on_global_test(kind) if m is CLASS_SHARE else m.by(kind) for m in named}


def averaged(rows: Sequence[Mapping[str, float]], columns: Mapping[Any, str]) -> dict[str, float]:
    """Of each metric with its column, `mean_NAME` over the clients that have it, and
    `clients_NAME`, their number."""
    means: dict[str, float] = {}
    for name, column in columns.items():
        values = np.sort([row[column] for row in rows if column in row])
        means |= {f"mean_{name}": float(values.mean())} if len(values) else {}
        means[f"clients_{name}"] = len(values)
    return means


def tell_left_out(
    rows: Sequence[Mapping[str, float]], names: Iterable[str], clients: Sequence[str] = ()
) -> None:
    """Say of each metric that some clients have no value of how many its mean is over, and who is
    left out."""
    for name in names:
        without = [client for client, row in enumerate(rows) if name not in row]
        if not without:
            continue
        those = ", ".join(clients[c] if clients else str(c) for c in without[:MOST_NAMED])
        those += ", ..." if len(without) > MOST_NAMED else ""
        over = f"mean over {len(rows) - len(without)} of {len(rows)} clients"
        why = (
            "lack a class of the client"
            if name == CLASS_SHARE.name
            else "have a single class, or none"
        )
        log.say(
            f"{name}: {over}; the test samples of {len(without)} {why}, and cannot show it "
            f"(client {those})"
        )


def one_class(client: Client, measured: Mapping[Metric, Tensor]) -> dict[str, float]:
    """`ONE_CLASS` of a client whose model predicts one class, where its test samples have
    several."""
    answers = measured.get(PREDICTED)
    if answers is None or bool((answers != answers[0]).any()):
        return {}
    batches = client.data.test.batches(client.run.config.evaluation.batch_size)
    labels = torch.cat([y for _, y in batches])
    share = float(labels.bincount().max()) / len(labels)
    return {ONE_CLASS: share} if share < 1 else {}


def tell_one_class(
    rows: Sequence[Mapping[str, float]], clients: Sequence[str], metrics: Sequence[str]
) -> None:
    """Name clients whose final model predicts one class.

    Args:
        rows: of all clients, some with `ONE_CLASS`.
        clients: their names; empty: they have none.
        metrics: what else the run is scored by.
    """
    names = clients or [str(client) for client in range(len(rows))]
    shares = {
        name: row[ONE_CLASS] for name, row in zip(names, rows, strict=True) if ONE_CLASS in row
    }
    if shares:
        log.say(f"predictions: {one_class_words(shares, len(rows), metrics)}")


def tell_of_finals(
    run: RunContext, rows: Sequence[Mapping[str, float]], metrics: Sequence[str]
) -> None:
    """Say what must be known of the scores of final models, `rows` of all clients by `metrics`."""
    if run.is_main:
        tell_left_out(rows, metrics, run.data.client_names)
        tell_one_class(rows, run.data.client_names, metrics)


def set_apart(
    values: Mapping[str, Any], named: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`values` without the columns `named`, and those of them that are defined (not NaN)."""
    apart = {
        name: values[name] for name in named if name in values and values[name] == values[name]
    }
    return {name: value for name, value in values.items() if name not in set(named)}, apart


def _whole(seen: Seen) -> tuple[Tensor, Tensor]:
    scores, labels = (torch.cat(parts) for parts in zip(*seen, strict=True))
    # of texts: positions that have a target
    has_target = labels != NO_TARGET if labels.ndim > 1 else slice(None)
    return scores[has_target].double(), labels[has_target]
