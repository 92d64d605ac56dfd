"""What a round came to: every client's results on every rank, the round's metrics from them, and
clients that fail: who, in which round, at which stage, and whether the run goes on."""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core import RoundRecord, RunContext, Server
from fl_lightning.core.relation import agreement
from fl_lightning.engine.scoring import averaged, columns, set_apart
from fl_lightning.foundation import log
from fl_lightning.foundation.device import peak_bytes, why_lost, wide
from fl_lightning.foundation.errors import BadClient, BadInput, MachineFailed, RunFailed, redact
from fl_lightning.foundation.files import writing
from fl_lightning.foundation.metric import MODELS, Metric
from fl_lightning.results.folder import CLIENT_FLOPS, CLIENT_LOSSES
from fl_lightning.results.record import KINDS


@dataclass
class ClientResult:
    """What one client's visit came to."""

    client: int
    values: dict[str, Any]
    """Columns of `clients.csv`; tensors of shape () until they are needed as numbers."""
    norms: dict[str, Tensor] = field(default_factory=dict)
    """By which one sees that all its numbers are finite."""
    traffic: np.ndarray = field(default_factory=lambda: np.zeros((2, 1, len(KINDS)), np.int64))
    """Bytes by direction, layer and kind, (2, L + 1, 4), as in `Payload.by_layer`."""
    sent: np.ndarray = field(default_factory=lambda: np.zeros((2, 0), bool))
    """Layers whose own parameters travelled, (2, L)."""
    statistics: dict[str, Tensor] = field(default_factory=dict)
    """What it uploaded beside vectors (on the CPU)."""
    uncounted: str = ""
    """Why some of its operations are not known, where they are not."""


@dataclass
class Results:
    """What this rank's visits of a round came to."""

    clients: dict[int, ClientResult] = field(default_factory=dict)
    failures: list[tuple[BadClient, str]] = field(default_factory=list)
    """Failures that the run goes on after, and what became of the client: `retried`, `skipped` or
    `not judged`."""


def gather(run: RunContext, server: Server, results: Results, timer: Timer) -> RoundRecord:
    """Every client's results on every rank, in the order of clients, and the round's metrics from
    them."""
    numbers([r.values for r in results.clients.values()])
    memory = {
        "memory_server_mib": server_bytes(run, server) / 2**20,
        **_peak_memory_mib(run.device),
    }
    # statistics have been gathered, and norms looked at
    mine = [replace(r, statistics={}, norms={}) for r in results.clients.values()]
    here = (mine, timer.seconds(), memory, results.failures)
    parts = run.processes.gather_objects(here)
    by_client: list[ClientResult] = sorted(
        (r for part, *_ in parts for r in part), key=lambda r: r.client
    )
    failures = sorted((f for *_, part in parts for f in part), key=lambda f: f[0].client)
    traffic, sent = _on_one_axis(run, by_client)
    further = further_columns(run)
    if run.metric is not run.data.metric:
        further.append(run.metric.by("validation"))
    parted = [set_apart({"client": r.client, **r.values}, further) for r in by_client]
    clients = [own for own, _ in parted]
    by_kind = traffic.sum(axis=2)
    counted = (by_kind.sum(axis=2).tolist(), by_kind[:, :, 0].tolist(), sent.sum(axis=2).tolist())
    for client, totals, parameters, layers in zip(clients, *counted, strict=True):
        for way, direction in enumerate(("download", "upload")):
            client[f"{direction}_bytes"] = totals[way]
            client[f"{direction}_parameter_bytes"] = parameters[way]
            client[f"layers_{direction}ed"] = layers[way]
    if run.is_main:
        _say(run, failures, by_client)
    for client, (_, apart) in zip(clients, parted, strict=True):
        client |= apart  # the last columns
    metrics = _metrics(run, server, clients, [part[1:3] for part in parts])
    rows = [
        {"client": f.client, "stage": f.stage, "reason": f.reason, "outcome": what}
        for f, what in failures
    ]
    view = server.relation_view()
    layers = run.layer_names
    if (agreed := agreement(view, run.data.groups)) is not None:
        metrics["rand_index"] = agreed
    metrics |= server.metrics
    return RoundRecord(
        server.round, server.cohort, metrics, clients, view, layers, traffic, sent, failures=rows
    )


def _say(
    run: RunContext, failures: Sequence[tuple[BadClient, str]], results: Sequence[ClientResult]
) -> None:
    for failure, outcome in failures:
        log.say(f"{failure}; {outcome}")
    for reason in sorted({r.uncounted for r in results if r.uncounted} - run.warned):
        run.warned.add(reason)
        log.say(f"operations: {reason}; cells of flops_... that need it stay empty")


def _metrics(
    run: RunContext,
    server: Server,
    clients: list[dict[str, Any]],
    ranks: Sequence[tuple[Mapping[str, float], ...]],
) -> dict[str, float]:
    """The row of `metrics.csv`."""
    metrics: dict[str, float] = {}
    if run.tolerant:
        metrics["clients_failed"] = len(server.cohort) - len(clients)
    for metric in dict.fromkeys([run.metric, run.data.metric]):
        scored = [c for c in clients if metric.by(run.judge) in c]
        if not scored:
            continue
        scores = [c[metric.by(run.judge)] for c in scored]
        metrics |= {metric.of(k): v for k, v in spread(scores, metric).items()}
        metrics[metric.of("weighted")] = float(
            np.average(scores, weights=[c["test_samples"] for c in scored])
        )
        metrics |= {
            metric.of("validation"): v for v in means(scored, [metric.by("validation")]).values()
        }
    metrics |= means(clients, [*map(metric.by, MODELS), *map(metric.on_global_test, MODELS)])
    for name in CLIENT_LOSSES:
        values = [c[name] for c in clients if name in c]
        if values:
            metrics[name] = float(np.mean(values))
    metrics |= run.relation.measured(clients)
    counted = [
        "upload_bytes",
        "upload_parameter_bytes",
        "download_bytes",
        "download_parameter_bytes",
    ]
    for name in [*counted, *(n for n in CLIENT_FLOPS if all(n in c for c in clients))]:
        metrics[name] = sum(c[name] for c in clients)
    metrics["flops_server"] = server.flops
    metrics |= {name: max(seconds[name] for seconds, _ in ranks) for name in ranks[0][0]}
    metrics |= {name: sum(memory[name] for _, memory in ranks) for name in ranks[0][1]}
    of_judge = columns(run.config.evaluation.metrics, run.judge) if scored else {}
    return metrics | means(clients, further_columns(run)) | averaged(clients, of_judge)


def further_columns(run: RunContext) -> list[str]:
    """Of `clients.csv`: by the metrics that `evaluation.metrics` names, and all kinds of model."""
    return [
        column
        for kind in MODELS
        for column in columns(run.config.evaluation.metrics, kind).values()
    ]


def means(clients: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, float]:
    """Of each name, the mean over the clients that have it, whatever their order; a name that none
    has is absent."""
    columns = {name: [c[name] for c in clients if name in c] for name in names}
    return {name: float(np.mean(np.sort(values))) for name, values in columns.items() if values}


def _on_one_axis(run: RunContext, results: Sequence[ClientResult]) -> tuple[np.ndarray, np.ndarray]:
    """`traffic` and `sent` as in `RoundRecord`: layers of all architectures on one axis."""
    L = len(run.layer_names)
    traffic = np.zeros((len(results), 2, L + 1, len(KINDS)), dtype=np.int64)
    sent = np.zeros((len(results), 2, L), dtype=bool)
    for k, result in enumerate(results):
        own = run.group_of(result.client).axis
        traffic[k, :, own], traffic[k, :, -1] = result.traffic[:, :-1], result.traffic[:, -1]
        sent[k, :, own] = result.sent
    return traffic, sent


def spread(scores: Sequence[float], metric: Metric) -> dict[str, float]:
    """Unweighted mean, mean of the worst tenth (at least one) and standard deviation over
    clients."""
    values = np.sort(np.asarray(scores, dtype=np.float64))
    tenth = max(1, len(values) // 10)
    worst = values[:tenth] if metric.rises else values[-tenth:]
    return {"mean": float(values.mean()), "worst": float(worst.mean()), "std": float(values.std())}


def numbers(results: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Tensors to numbers, waiting for the device once."""
    places: dict[torch.dtype, list[tuple[dict[str, Any], str]]] = {}
    for result in results:
        for name, value in result.items():
            if isinstance(value, Tensor):
                places.setdefault(value.dtype, []).append((result, name))
    if not places:
        return results
    parts = [torch.stack([result[name] for result, name in ours]) for ours in places.values()]
    values = torch.cat([part.to(wide(part.device)) for part in parts]).tolist()
    for (result, name), value in zip(
        (place for ours in places.values() for place in ours), values, strict=True
    ):
        result[name] = value
    return results


def server_bytes(run: RunContext, server: Server) -> int:
    """What this rank holds for the server: models last received, what was composed, named tensors,
    work space.

    A last-received model counts whether or not it shares its memory with the client's own (on a
    real server it could not); where models are kept for the judge alone, those of the round's
    cohort do. Replicated tensors count on rank 0.
    """
    counted = set(server.cohort) if run.policy.for_judge else set(run.states)
    vectors = [
        vector
        for client, state in run.states.items()
        if client in counted
        for vector in state.received.values()
    ]
    vectors += [
        vector for group in run.groups for vector in (*group.spare, *group.buffers.values())
    ]
    if run.is_main:
        vectors += list(run.server.memory.values())
        for group in run.groups:
            vectors += [
                group.initial,
                *(v for v in group.vectors.values() if v is not group.initial),
            ]
    return sum(t.numel() * t.element_size() for t in vectors) + server.working_bytes


def _peak_memory_mib(device: torch.device) -> dict[str, float]:
    """The most that this process has held so far, and on a GPU what torch has held there."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB on Linux
    memory = {"memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20}
    if (peak := peak_bytes(device)) is not None:
        memory["memory_device_mib"] = peak / 2**20
    return memory


class Timer:
    """Seconds of a round by phase. It never waits for the device, so on a GPU the phases are those
    of the host."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._phases = {"client": 0.0, "server": 0.0, "evaluation": 0.0}

    def lap(self, phase: str) -> None:
        """All since the last lap was `phase`."""
        now = time.perf_counter()
        self._phases[phase] += now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        """`seconds` of the round so far and `seconds_PHASE`."""
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
    """Work that says what it is at."""

    stage: str


class Visited(Staged, Protocol):
    """A visit: the round, the client, and how it failed."""

    t: int
    id: int
    failure: BadClient | None


class Guard:
    """Names the client, the round and the stage of whatever a client's model, data or hooks
    raise."""

    def __init__(self, run: RunContext) -> None:
        self.run = run

    @contextlib.contextmanager
    def catch(self, visit: Visited) -> Iterator[None]:
        """As `naming`; where failing clients are tolerated, the failure is left with the
        `visit`."""
        try:
            with self.naming(visit.t, visit.id, visit):
                yield
        except BadClient as failure:
            if not self.run.tolerant:
                raise
            visit.failure = failure.bare()  # a traceback would keep what the visit had made

    @contextlib.contextmanager
    def naming(self, t: int, client: int, at: Staged) -> Iterator[None]:
        """Whatever is raised within names the client, the round and the stage that `at.stage` says.

        Raises:
            BadClient: the client failed; `failure.txt` in the run folder has the traceback added to
                it.
        """
        try:
            yield
        except (BadInput, RunFailed):
            raise
        except Exception as error:
            called = self.run.data.called(client)
            if why := why_lost(self.run.device):
                what = (
                    f"the device {self.run.device} failed in round {t}, {called}, stage "
                    f"{at.stage}: {redact(why)}"
                )
                raise MachineFailed(f"{what}; the run can be continued with --resume") from error
            note = self.run.folder / "failure.txt"
            with writing(note), note.open("a", encoding="utf-8") as file:
                file.write(
                    f"{called}, round {t}, stage {at.stage}\n{redact(traceback.format_exc())}\n"
                )
            reason = redact(f"{type(error).__name__}: {error}".splitlines()[0])
            raise BadClient(
                client, t, at.stage, f"{reason} (traceback in failure.txt)", called
            ) from error

    def check_finite(self, t: int, results: Sequence[ClientResult]) -> None:
        """Raise `BadClient` for the first client whose loss, model, further vectors, memory or
        upload is not finite."""
        numbers([values for r in results for values in (r.values, r.norms)])
        for result in results:
            values = result.values | result.norms
            infinite = [(s, w) for n, s, w in _CHECKS if not math.isfinite(values.get(n, 0.0))]
            uploaded = [x for x in result.statistics.values() if x.is_floating_point()]
            if not all(bool(x.isfinite().all()) for x in uploaded):
                infinite.append(("upload", "what it tells"))
            if infinite:
                raise _not_finite(self.run, t, result.client, *infinite[0])


def finite(run: RunContext, t: int, client: int, model: Tensor, what: str) -> Tensor:
    """The `model` (D,) that a client has trained; `BadClient`: it is not finite, and its scores
    would mean nothing."""
    if not bool(model.isfinite().all()):
        raise _not_finite(run, t, client, "training", what)
    return model


def _not_finite(run: RunContext, t: int, client: int, stage: str, what: str) -> BadClient:
    reason = f"{what} is not finite; lower optimizer.lr"
    return BadClient(client, t, stage, reason, run.data.called(client))
