"""Results of a round: gathers every client's results, computes the round's metrics, and names the
client, round and stage of each failure."""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core import Payload, RoundRecord, RunContext, Server
from fl_lightning.core.relation import agreement
from fl_lightning.engine.scoring import averaged, columns, split_columns
from fl_lightning.foundation import log
from fl_lightning.foundation.device import peak_bytes, why_lost, wide
from fl_lightning.foundation.errors import BadClient, BadInput, MachineFailed, RunFailed, redact
from fl_lightning.foundation.files import writing
from fl_lightning.foundation.metric import MODELS, Metric
from fl_lightning.results.folder import CLIENT_FLOPS, CLIENT_LOSSES
from fl_lightning.results.record import KINDS


@dataclass
class ClientResult:
    """The results of one client's visit."""

    client: int
    values: dict[str, Any]
    """Columns of `clients.csv`; tensors of shape (), which `numbers` replaces by floats."""
    norms: dict[str, Tensor] = field(default_factory=dict)
    """Norms of the client's tensors: one that is not finite shows that a tensor is not."""
    traffic: np.ndarray = field(default_factory=lambda: np.zeros((2, 1, len(KINDS)), np.int64))
    """Bytes by direction, layer and kind, (2, L + 1, 4), as in `Payload.by_layer`."""
    sent: np.ndarray = field(default_factory=lambda: np.zeros((2, 0), bool))
    """Layers whose weights were sent, bool (2, L) by direction."""
    statistics: dict[str, Tensor] = field(default_factory=dict)
    """Uploaded tensors other than vectors (on the CPU)."""
    uncounted: str = ""
    """Reason why some of the client's FLOPs are unknown; empty: all are known."""

    def count(self, download: Payload, upload: Payload) -> None:
        """Count the bytes of both payloads, and copy the uploaded statistics into the result."""
        self.traffic = np.array((download.by_layer, upload.by_layer))
        self.sent = np.array((download.layers_sent, upload.layers_sent))
        self.statistics = {k: v.cpu() for k, v in (upload.statistics | upload.extra).items()}


@dataclass
class Results:
    """The results of this rank's visits of a round."""

    clients: dict[int, ClientResult] = field(default_factory=dict)
    failures: list[tuple[BadClient, str]] = field(default_factory=list)
    """Tolerated failures with their outcome: `retried`, `skipped` or `not judged`."""


def gather(
    run: RunContext,
    server: Server,
    results: Results,
    timer: Timer,
) -> RoundRecord:
    """Gather every client's results from all ranks, in the order of clients, and compute the
    round's metrics; returns the round's record, equal on every rank."""
    visited = list(results.clients.values())
    numbers([result.values for result in visited])
    memory = {"memory_server_mib": server_bytes(run, server) / 2**20}
    memory |= _peak_memory_mib(run.device)
    # drop tensors: statistics have been gathered, and norms checked
    bare = [replace(result, statistics={}, norms={}) for result in visited]
    here = bare, results.failures, timer.seconds(), memory
    clients_of, failures_of, seconds, memories = zip(
        *run.processes.gather_objects(here), strict=True
    )
    by_client = sorted(chain(*clients_of), key=lambda result: result.client)
    failures = sorted(chain(*failures_of), key=lambda failure: failure[0].client)
    if run.is_main:
        _log_failures(run, failures, by_client)
    traffic, sent = _on_one_axis(run, by_client)
    clients = _client_rows(run, by_client, traffic, sent)
    metrics = _metrics(run, server, clients, seconds, memories)
    view = server.relation_view()
    rand_index = agreement(view, run.data.groups)
    if rand_index is not None:
        metrics["rand_index"] = rand_index
    metrics |= server.metrics
    failure_rows: list[dict[str, int | str]] = []
    for failure, outcome in failures:
        failure_rows.append(
            {
                "client": failure.client,
                "stage": failure.stage,
                "reason": failure.reason,
                "outcome": outcome,
            }
        )
    return RoundRecord(
        server.round,
        server.cohort,
        metrics,
        clients,
        view,
        run.layer_names,
        traffic,
        sent,
        failures=failure_rows,
    )


def _client_rows(
    run: RunContext,
    results: Sequence[ClientResult],
    traffic: np.ndarray,
    sent: np.ndarray,
) -> list[dict[str, Any]]:
    """Return the rows of `clients.csv`: values, traffic, and then the further metrics."""
    further = further_columns(run)
    if run.metric is not run.data.metric:
        further.append(run.metric.by("validation"))
    total = traffic.sum(axis=(2, 3)).tolist()
    parameters = traffic[..., 0].sum(axis=2).tolist()
    layers = sent.sum(axis=2).tolist()
    rows = []
    for k, result in enumerate(results):
        row, apart = split_columns({"client": result.client, **result.values}, further)
        for way, direction in enumerate(("download", "upload")):
            row[f"{direction}_bytes"] = total[k][way]
            row[f"{direction}_parameter_bytes"] = parameters[k][way]
            row[f"layers_{direction}ed"] = layers[k][way]
        rows.append(row | apart)
    return rows


def _log_failures(
    run: RunContext,
    failures: Sequence[tuple[BadClient, str]],
    results: Sequence[ClientResult],
) -> None:
    """Log failures, and once for the run each reason why FLOPs are unknown."""
    for failure, outcome in failures:
        log.say(f"{failure}; {outcome}")
    for reason in sorted({r.uncounted for r in results if r.uncounted} - run.warned):
        run.warned.add(reason)
        log.say(f"operations: {reason}; cells of flops_... that need it stay empty")


def _metrics(
    run: RunContext,
    server: Server,
    clients: list[dict[str, Any]],
    seconds: Sequence[dict[str, float]],
    memories: Sequence[dict[str, float]],
) -> dict[str, float]:
    """Return the row of `metrics.csv`."""
    metrics: dict[str, float] = {}
    if run.tolerant:
        metrics["clients_failed"] = len(server.cohort) - len(clients)
    metrics |= _scores(run, clients)
    for name in CLIENT_LOSSES:
        values = [row[name] for row in clients if name in row]
        if values:
            metrics[name] = float(np.mean(values))
    metrics |= run.relation.measured(clients)
    for name in (*COUNTED, *CLIENT_FLOPS):
        if all(name in row for row in clients):
            metrics[name] = sum(row[name] for row in clients)
    metrics["flops_server"] = server.flops
    for name in seconds[0]:
        metrics[name] = max(of_rank[name] for of_rank in seconds)
    for name in memories[0]:
        metrics[name] = sum(of_rank[name] for of_rank in memories)
    metrics |= means(clients, further_columns(run))
    if any(run.data.metric.by(run.judge) in row for row in clients):
        metrics |= averaged(clients, columns(run.config.evaluation.metrics, run.judge))
    return metrics


def _scores(run: RunContext, clients: list[dict[str, Any]]) -> dict[str, float]:
    """Return statistics of the judged models' scores, and the mean score of each kind of model."""
    main = run.data.metric
    metrics: dict[str, float] = {}
    for metric in dict.fromkeys([run.metric, main]):
        column = metric.by(run.judge)
        scored = [row for row in clients if column in row]
        if not scored:
            continue
        scores = [row[column] for row in scored]
        for statistic, value in spread(scores, metric).items():
            metrics[metric.of(statistic)] = value
        samples = [row["test_samples"] for row in scored]
        metrics[metric.of("weighted")] = float(np.average(scores, weights=samples))
        for value in means(scored, [metric.by("validation")]).values():
            metrics[metric.of("validation")] = value
    kinds = [*map(main.by, MODELS), *map(main.on_global_test, MODELS)]
    return metrics | means(clients, kinds)


COUNTED = (
    "upload_bytes",
    "upload_parameter_bytes",
    "download_bytes",
    "download_parameter_bytes",
)
"""Columns of `clients.csv` whose sums over clients are columns of `metrics.csv`."""


def further_columns(run: RunContext) -> list[str]:
    """Return the columns of `clients.csv` for the metrics of `evaluation.metrics` and all kinds of
    model."""
    names: list[str] = []
    for kind in MODELS:
        names += columns(run.config.evaluation.metrics, kind).values()
    return names


def means(clients: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, float]:
    """Return for each name the mean over the clients that have a value, equal for any order of
    clients; names without values are absent."""
    means = {}
    for name in names:
        values = [row[name] for row in clients if name in row]
        if values:
            means[name] = float(np.mean(np.sort(values)))
    return means


def _on_one_axis(run: RunContext, results: Sequence[ClientResult]) -> tuple[np.ndarray, np.ndarray]:
    """Return `traffic` and `sent` of `RoundRecord`, with the layers of all architectures on one
    axis."""
    L = len(run.layer_names)
    traffic = np.zeros((len(results), 2, L + 1, len(KINDS)), dtype=np.int64)
    sent = np.zeros((len(results), 2, L), dtype=bool)
    for k, result in enumerate(results):
        layers = run.group_of(result.client).axis
        traffic[k, :, layers] = result.traffic[:, :-1]
        traffic[k, :, -1] = result.traffic[:, -1]
        sent[k, :, layers] = result.sent
    return traffic, sent


def spread(scores: Sequence[float], metric: Metric) -> dict[str, float]:
    """Return `mean`, `worst` (mean of the worst tenth, at least one client) and `std` (standard
    deviation) over clients, unweighted."""
    values = np.sort(np.asarray(scores, dtype=np.float64))
    tenth = max(1, len(values) // 10)
    worst = values[:tenth] if metric.rises else values[-tenth:]
    return {"mean": float(values.mean()), "worst": float(worst.mean()), "std": float(values.std())}


def numbers(results: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Replace the tensors in `results` by numbers, in place, with one wait for the device; returns
    `results`."""
    cells_of: dict[torch.dtype, list[tuple[dict[str, Any], str]]] = {}
    for result in results:
        for name, value in result.items():
            if isinstance(value, Tensor):
                cells_of.setdefault(value.dtype, []).append((result, name))
    if not cells_of:
        return results
    parts = []
    for cells in cells_of.values():
        part = torch.stack([result[name] for result, name in cells])
        parts.append(part.to(wide(part.device)))
    values = iter(torch.cat(parts).tolist())
    for cells in cells_of.values():
        for result, name in cells:
            result[name] = next(values)
    return results


def server_bytes(run: RunContext, server: Server) -> int:
    """Return the bytes of memory that a server on a machine of its own would need for this rank's
    clients: for each client's last upload, for the mixes that are downloaded, for the server's own
    vectors and named tensors, and for work space.

    A last upload counts even if it shares its memory with the client's own model, which it could
    not on two machines. If clients are kept only because the judge `after` scores their models at
    the end, only uploads of the round's cohort count. Tensors that are equal on all ranks count on
    rank 0 alone.
    """
    vectors: list[Tensor] = []
    counted = set(server.cohort) if run.policy.for_judge else set(run.states)
    for client, state in run.states.items():
        if client in counted:
            vectors += state.received.values()
    for group in run.groups:
        vectors += group.spare
        vectors += group.buffers.values()
        if run.is_main:
            vectors.append(group.initial)
            vectors += [v for v in group.vectors.values() if v is not group.initial]
    if run.is_main:
        vectors += run.server.memory.values()
    return sum(vector.nbytes for vector in vectors) + server.working_bytes


def _peak_memory_mib(device: torch.device) -> dict[str, float]:
    """Return the peak memory of this process so far, and on a GPU the peak that torch has
    allocated."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    memory = {"memory_mib": resident / 2**20}
    peak = peak_bytes(device)
    if peak is not None:
        memory["memory_device_mib"] = peak / 2**20
    return memory


class Timer:
    """Measures how many seconds of a round pass in the clients' visits, on the server and in
    evaluation. It never waits for the device, so on a GPU these are the host's times."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._phases = {"client": 0.0, "server": 0.0, "evaluation": 0.0}

    def lap(self, phase: str) -> None:
        """Add the time since the last call to one of the three sums.

        Args:
            phase: `client`, `server` or `evaluation`.
        """
        now = time.perf_counter()
        self._phases[phase] += now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        """Return the columns `seconds`, the time since the round began, and `seconds_client`,
        `seconds_server` and `seconds_evaluation`."""
        total = {"seconds": time.perf_counter() - self._start}
        return total | {f"seconds_{k}": v for k, v in self._phases.items()}


# ---------------------------------------------------------------- clients that fail

_CHECKS = (
    ("train_loss", "training", "its loss"),
    ("model_norm", "training", "its model"),
    ("kept_norm", "training", "what else it keeps"),
    ("upload_norm", "upload", "its upload"),
)


class Staged(Protocol):
    """Work that names its current stage."""

    stage: str


class GuardedVisit(Staged, Protocol):
    """A client's visit whose errors `Guard.catch` handles."""

    t: int
    """The round."""
    id: int
    """The client."""
    failure: BadClient | None
    """Set by `Guard.catch` if the visit fails."""


@dataclass
class Guard:
    """Adds client, round and stage to any error in a client's model, data or hooks."""

    run: RunContext

    @contextlib.contextmanager
    def catch(self, visit: GuardedVisit) -> Iterator[None]:
        """Turn errors of the `with` block into `BadClient`; if failing clients are tolerated, store
        it in `visit.failure` instead of raising it."""
        try:
            with self.naming(visit.t, visit.id, visit):
                yield
        except BadClient as failure:
            if not self.run.tolerant:
                raise
            visit.failure = failure.bare()  # a traceback would keep the visit's tensors alive

    @contextlib.contextmanager
    def naming(
        self,
        t: int,
        client: int,
        work: Staged,
    ) -> Iterator[None]:
        """Turn errors of the `with` block into `BadClient`, which names the client, the round and
        `work.stage`. The traceback is added to `failure.txt` in the run folder.

        Raises:
            BadClient: the client failed.
            MachineFailed: the device failed.
        """
        try:
            yield
        except (BadInput, RunFailed):
            raise
        except Exception as error:
            called = self.run.data.client_label(client)
            device_error = why_lost(self.run.device)
            if device_error:
                raise MachineFailed(
                    f"the device {self.run.device} failed in round {t}, {called}, stage "
                    f"{work.stage}: {redact(device_error)}; the run can be continued with --resume"
                ) from error
            note = self.run.folder / "failure.txt"
            trace = redact(traceback.format_exc())
            with writing(note), note.open("a", encoding="utf-8") as file:
                file.write(f"{called}, round {t}, stage {work.stage}\n{trace}\n")
            first_line = redact(f"{type(error).__name__}: {error}".splitlines()[0])
            reason = f"{first_line} (traceback in failure.txt)"
            raise BadClient(
                client,
                t,
                work.stage,
                reason,
                called,
            ) from error

    def check_finite(self, t: int, results: Sequence[ClientResult]) -> None:
        """Raise `BadClient` for the first client with a loss, model, further vector, memory or
        upload that is not finite."""
        numbers([values for result in results for values in (result.values, result.norms)])
        for result in results:
            values = result.values | result.norms
            for name, stage, part in _CHECKS:
                if not math.isfinite(values.get(name, 0.0)):
                    raise _not_finite(
                        self.run,
                        t,
                        result.client,
                        stage,
                        part,
                    )
            for tensor in result.statistics.values():
                if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                    raise _not_finite(
                        self.run,
                        t,
                        result.client,
                        "upload",
                        "a tensor beside its model",
                    )


def require_finite(
    run: RunContext,
    t: int,
    client: int,
    model: Tensor,
    part: str,
) -> None:
    """Raise `BadClient` if a client's trained `model` (D,) is not finite; the message calls it
    `part`."""
    if not bool(model.isfinite().all()):
        raise _not_finite(
            run,
            t,
            client,
            "training",
            part,
        )


def _not_finite(
    run: RunContext,
    t: int,
    client: int,
    stage: str,
    part: str,
) -> BadClient:
    reason = f"{part} is not finite; lower optimizer.lr"
    return BadClient(
        client,
        t,
        stage,
        reason,
        run.data.client_label(client),
    )
