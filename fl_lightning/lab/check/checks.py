"""The checks of a method, in the order in which they are run. Each returns a text on its result, or
raises `CheckFailed`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric

from fl_lightning import run as engine
from fl_lightning.configuration.config import Component, Config, ModelConfig
from fl_lightning.data import ResidentPart
from fl_lightning.foundation.metric import BY_TASK
from fl_lightning.lab.check.bench import Bench, CheckFailed, difference
from fl_lightning.results.folder import CLIENT_FLOPS, RunFolder

DRAWS = (
    "draw from client.generator(...) or fl_lightning.foundation.rng, never from random, "
    "numpy.random, torch or an unseeded one"
)
"""Advice for a run that draws other random numbers."""
STATE = (
    "what outlives a round belongs into slots, init_client or init_server, not into the object, "
    "its class or module"
)
"""Advice for a run that keeps state outside of the checkpoint."""
TOLERANCE = 1.02
"""Most operations that torch may count for each one that the run counts: 2 % for sums that no
formula has."""


@dataclass(frozen=True)
class Check:
    """A named check of a method."""

    name: str
    claim: str
    """What the check tests, in words."""
    run: Callable[[Bench], str]
    """Returns a text on the result; raises `CheckFailed`, or `BadInput` if the method refuses the
    config."""


def _whole_run(bench: Bench) -> Path:
    """The folder of the uninterrupted run with the base config, with which most checks compare."""
    if "whole" not in bench.runs:
        bench.runs["whole"] = bench.fit("whole")
    return bench.runs["whole"]


def _half_cohort(bench: Bench) -> Config:
    return bench.with_settings(federation={"participation": 0.5})


def _check_same(
    run: Path,
    other: Path,
    problem: str,
    advice: str,
) -> None:
    """Raise `CheckFailed` with `problem` and `advice` if two runs differ."""
    first_difference = difference(run, other)
    if first_difference is not None:
        raise CheckFailed(f"{problem}: {first_difference}; {advice}")


def _final_scores(folder: Path, config: Config) -> str:
    """The mean of the final scores as text; raises `CheckFailed` if a score is not finite."""
    metric = BY_TASK[config.data.task]
    scores = [row.get(metric.name, float("nan")) for row in RunFolder(folder).read("final")]
    if not scores or not all(map(isfinite, scores)):
        raise CheckFailed(f"a final {metric.words} is no number")
    return f"{metric.mean_words} {metric.shown(float(np.mean(scores)))}"


def _runs(bench: Bench) -> str:
    federation = bench.config.federation
    scores = _final_scores(_whole_run(bench), bench.config)
    return f"{federation.rounds} rounds of {bench.config.clients} clients; {scores} at the end"


def _seed(bench: Bench) -> str:
    again = bench.fit("again", fresh=False)
    problem = "a second run with the same seed, in the same process, is another"
    _check_same(_whole_run(bench), again, problem, f"{DRAWS}; {STATE}")
    return "a second run in the same process has the same bits"


def _resume(bench: Bench) -> str:
    parts = bench.fit_in_two_parts("parts")
    stopped = f"stopped after round {bench.half} and continued"
    _check_same(
        _whole_run(bench),
        parts,
        f"{stopped}, it is another run",
        f"{STATE}; {DRAWS}",
    )
    return f"{stopped}: the same bits"


def _cohort(bench: Bench) -> str:
    config = _half_cohort(bench)
    problem = "with a partial cohort, stopped and continued, it is another run"
    result = _in_parts(bench, "partial", config, problem)
    bench.runs["partial"] = bench.path / "partial"
    drawn = sum(row["round"] == 1 for row in RunFolder(bench.runs["partial"]).read("clients"))
    return f"{drawn} of {config.clients} clients in a round; {result}"


def _in_parts(
    bench: Bench,
    name: str,
    config: Config,
    problem: str,
) -> str:
    """Train a run, and the same run stopped and resumed; raise `CheckFailed` with `problem` if they
    differ."""
    folder = bench.fit(name, config)
    scores = _final_scores(folder, config)
    _check_same(folder, bench.fit_in_two_parts(f"{name}-parts", config), problem, STATE)
    return f"{scores}; stopped and continued: the same bits"


def _skip(bench: Bench) -> str:
    config = bench.with_failing_client("skip", at=2)
    folder = bench.fit("skipped", config)
    scores = _final_scores(folder, config)
    failures = [(row["client"], row["round"]) for row in RunFolder(folder).read("failures")]
    if failures != [(1, 2)]:
        raise CheckFailed(
            f"client 1 was made to fail in round 2, but those who failed are {failures}"
        )
    never_failed = bench.fit("never", bench.with_failing_client("retry", at=0))
    retried = bench.fit("retried", bench.with_failing_client("retry", at=2, times=1))
    problem = "a client whose upload failed once and that was tried again leaves a trace"
    _check_same(never_failed, retried, problem, STATE)
    return f"without client 1 in round 2: {scores}; tried again it leaves no trace"


def _normed(bench: Bench) -> str:
    model = ModelConfig(Component("fl_lightning.lab.check.parts.Normed"))
    config = bench.with_settings({"models": [model]})
    return _in_parts(bench, "normed", config, "stopped and continued, it is another run")


def _with_partition(bench: Bench, partition: str) -> str:
    """Train on clients with a partition of `parts`; return the final scores as text."""
    data = {
        "partition": f"fl_lightning.lab.check.parts.{partition}",
        "min_samples": 2,
    }
    config = bench.with_settings(data=data)
    return _final_scores(bench.fit(partition, config), config)


def _bytes(bench: Bench) -> str:
    folder = RunFolder(_whole_run(bench))
    rows = folder.read("metrics")
    for row in rows:
        traffic = folder.read_traffic(int(row["round"]))
        down, up = traffic.bytes.sum((0, 2, 3)).tolist()
        if (down, up) != (row["download_bytes"], row["upload_bytes"]):
            raise CheckFailed(
                f"round {int(row['round'])}: the ledger has {down} bytes down and {up} up, "
                "but metrics.csv has other numbers"
            )
    for way in ("up", "down"):
        if not any(row[f"{way}load_bytes"] for row in rows):
            _check_no_hidden_traffic(bench, way)
            break
    parts = traffic.bytes.sum((0, 1, 2))
    named = zip(traffic.kinds, parts, strict=True)
    kinds = ", ".join(f"{size / parts.sum():.0%} {kind}" for kind, size in named if size)
    shares = f": {kinds}" if kinds else ""
    up, down = (
        rows[-1][f"{way}load_bytes"] / bench.config.clients / 1024 for way in ("up", "down")
    )
    return f"{down:,.1f} KiB down and {up:,.1f} KiB up for a client and round{shares}"


def _check_no_hidden_traffic(bench: Bench, way: str) -> None:
    """Raise `CheckFailed` if client 0's training data change the other clients' models, although no
    byte is counted in a direction.

    Args:
        way: that direction, `up` or `down`.
    """
    vectors, vectors_if_negated = (
        bench.run_on_ranks(f"negated-{negated}", _vectors_of_others, bench.config, negated)
        for negated in (False, True)
    )
    if not all(torch.equal(vectors[name], vectors_if_negated[name]) for name in vectors):
        raise CheckFailed(
            f"no byte goes {way}, yet what client 0 holds changes the models of others: something "
            "travels that is not in a Payload"
        )


def _vectors_of_others(
    fabric: Fabric,
    config: Config,
    folder: Path,
    negated: bool,
) -> dict[str, Any]:
    """The vectors of all clients but client 0 after three rounds. `negated`: whether client 0's
    training samples are negated."""
    fed = engine.assemble(fabric, config, folder, [])
    part = fed.run.data.client(0).train
    if negated and isinstance(part, ResidentPart):
        part.x.neg_()
    fed.prepare()
    for t in (1, 2, 3):
        fed.round(t)
    vectors = {}
    for client, state in fed.run.states.items():
        for name, vector in state.vectors.items() if client else ():
            vectors[f"{client} {name}"] = vector.clone()
    return vectors


def _operations(bench: Bench) -> str:
    config = bench.with_settings(evaluation={"every": bench.config.federation.rounds})
    result = bench.run_on_ranks("counted", _round_operations, config)
    columns, by_torch = result["counted"], result["by_torch"]
    names = (*CLIENT_FLOPS, "flops_server")
    uncounted = [name for name in names if not isfinite(columns.get(name, float("nan")))]
    if uncounted:
        raise CheckFailed(
            f"{', '.join(uncounted)} could not be counted: a hook changes the model, and no pass "
            "through it shows how"
        )
    counted = sum(columns[name] for name in names if name != "flops_penalty")
    millions = f"{counted / 1e6:,.2f} million"
    torch_millions = f"{by_torch / 1e6:,.2f} million"
    if by_torch > TOLERANCE * counted:
        raise CheckFailed(
            f"torch sees {torch_millions} operations in a round, and {millions} are counted; what "
            "a hook computes beside passes of the client's model it adds to client.flops or "
            "server.flops"
        )
    return f"{millions} in a round; torch sees {torch_millions}"


def _round_operations(
    fabric: Fabric,
    config: Config,
    folder: Path,
) -> dict[str, Any]:
    """The operations of round 2, in which nothing is scored: as torch counts them, and as the
    round's record does."""
    from torch.utils.flop_counter import FlopCounterMode

    fed = engine.assemble(fabric, config, folder, [])
    fed.prepare()
    fed.round(1)
    with FlopCounterMode(display=False) as counter:
        record = fed.round(2)
    return {"by_torch": counter.get_total_flops(), "counted": record.metrics}


def _ranks(bench: Bench) -> str:
    jobs = {"two": bench.config}
    if "partial" in bench.runs:
        jobs["two-partial"] = _half_cohort(bench)
    folders = bench.fit_on_two_ranks(jobs)
    problem = "on two processes it is another run"
    advice = f"{STATE}; what runs on the server must be the same on every process"
    _check_same(_whole_run(bench), folders["two"], problem, advice)
    if "two-partial" not in folders:
        return "on two processes the same bits"
    partial = bench.runs["partial"]
    _check_same(
        partial,
        folders["two-partial"],
        f"with a partial cohort, {problem}",
        advice,
    )
    return "on two processes the same bits, with a partial cohort too"


CHECKS = [
    Check("runs", "it runs to the end", _runs),
    Check("seed", "the same seed gives the same run", _seed),
    Check("resume", "a run may be stopped and continued", _resume),
    Check("partial", "half of the clients take part in a round", _cohort),
    Check("skip", "a client fails, and is left out or tried again", _skip),
    Check("batchnorm", "a network with BatchNorm", _normed),
    Check(
        "one-class",
        "every client holds one class",
        lambda bench: _with_partition(bench, "one_class"),
    ),
    Check(
        "few-samples",
        "clients with fewer samples than a batch",
        lambda bench: _with_partition(bench, "few_samples"),
    ),
    Check("bytes", "all bytes are in the ledger", _bytes),
    Check("operations", "all operations are counted", _operations),
    Check("ranks", "two processes do what one does", _ranks),
]
NAMES = [check.name for check in CHECKS]
