"""The checks, in the order in which they are made: each says what it has seen, or raises
`Wrong`."""

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
from fl_lightning.lab.check.bench import Bench, Wrong, difference
from fl_lightning.results.folder import CLIENT_FLOPS, RunFolder

DRAWS = (
    "draw from client.generator(...) or fl_lightning.foundation.rng, never from random, "
    "numpy.random, torch or an unseeded one"
)
KEEPS = (
    "what outlives a round belongs into slots, init_client or init_server, not into the object, "
    "its class or module"
)
UNSEEN = 1.02
"""Operations that torch may see for each one that is counted: 2 % for sums that are in no
formula."""


@dataclass(frozen=True)
class Check:
    """One thing that must hold."""

    name: str
    says: str
    """What is tried, in words."""
    run: Callable[[Bench], str]
    """Returns what it has seen; raises `Wrong`, or `BadInput` where the method refuses it."""


def _reference(bench: Bench) -> Path:
    """The run that most checks compare with."""
    if "whole" not in bench.runs:
        bench.runs["whole"] = bench.fit("whole")
    return bench.runs["whole"]


def _partial(bench: Bench) -> Config:
    return bench.changed(federation={"participation": 0.5})


def _check_same(
    run: Path,
    other: Path,
    problem: str,
    advice: str,
) -> None:
    """Raise `Wrong` where two runs differ."""
    differs = difference(run, other)
    if differs is not None:
        raise Wrong(f"{problem}: {differs}; {advice}")


def _final_scores(folder: Path, config: Config) -> str:
    """The mean of the final scores in words; `Wrong` where one is no number."""
    metric = BY_TASK[config.data.task]
    scores = [row.get(metric.name, float("nan")) for row in RunFolder(folder).read("final")]
    if not scores or not all(map(isfinite, scores)):
        raise Wrong(f"a final {metric.words} is no number")
    return f"{metric.mean_words} {metric.shown(float(np.mean(scores)))}"


def _runs(bench: Bench) -> str:
    federation = bench.config.federation
    scores = _final_scores(_reference(bench), bench.config)
    return f"{federation.rounds} rounds of {bench.config.clients} clients; {scores} at the end"


def _seed(bench: Bench) -> str:
    again = bench.fit("again", fresh=False)
    problem = "a second run with the same seed, in the same process, is another"
    _check_same(_reference(bench), again, problem, f"{DRAWS}; {KEEPS}")
    return "a second run in the same process has the same bits"


def _resume(bench: Bench) -> str:
    parts = bench.in_two_parts("parts")
    stopped = f"stopped after round {bench.half} and continued"
    _check_same(
        _reference(bench),
        parts,
        f"{stopped}, it is another run",
        f"{KEEPS}; {DRAWS}",
    )
    return f"{stopped}: the same bits"


def _cohort(bench: Bench) -> str:
    config = _partial(bench)
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
    """A run and the same one stopped and continued, which is to be no other."""
    folder = bench.fit(name, config)
    scores = _final_scores(folder, config)
    _check_same(folder, bench.in_two_parts(f"{name}-parts", config), problem, KEEPS)
    return f"{scores}; stopped and continued: the same bits"


def _skip(bench: Bench) -> str:
    config = bench.failing("skip", at=2)
    folder = bench.fit("skipped", config)
    scores = _final_scores(folder, config)
    lost = [(row["client"], row["round"]) for row in RunFolder(folder).read("failures")]
    if lost != [(1, 2)]:
        raise Wrong(f"client 1 was made to fail in round 2, but those who failed are {lost}")
    clean = bench.fit("never", bench.failing("retry", at=0))
    tried = bench.fit("retried", bench.failing("retry", at=2, times=1))
    problem = "a client whose upload failed once and that was tried again leaves a trace"
    _check_same(clean, tried, problem, KEEPS)
    return f"without client 1 in round 2: {scores}; tried again it leaves no trace"


def _normed(bench: Bench) -> str:
    model = ModelConfig(Component("fl_lightning.lab.check.parts.Normed"))
    config = bench.changed({"models": [model]})
    return _in_parts(bench, "normed", config, "stopped and continued, it is another run")


def _on(bench: Bench, partition: str) -> str:
    """Runs on clients that a partition of `parts` deals."""
    data = {
        "partition": f"fl_lightning.lab.check.parts.{partition}",
        "min_samples": 2,
    }
    config = bench.changed(data=data)
    return _final_scores(bench.fit(partition, config), config)


def _bytes(bench: Bench) -> str:
    folder = RunFolder(_reference(bench))
    rows = folder.read("metrics")
    for row in rows:
        traffic = folder.read_traffic(int(row["round"]))
        down, up = traffic.bytes.sum((0, 2, 3)).tolist()
        if (down, up) != (row["download_bytes"], row["upload_bytes"]):
            begin = f"round {int(row['round'])}: the ledger has {down} bytes down and {up} up"
            raise Wrong(f"{begin}, metrics.csv others")
    for way in ("up", "down"):
        if not any(row[f"{way}load_bytes"] for row in rows):
            _check_apart(bench, way)
            break
    parts = traffic.bytes.sum((0, 1, 2))
    named = zip(traffic.kinds, parts, strict=True)
    kinds = ", ".join(f"{size / parts.sum():.0%} {kind}" for kind, size in named if size)
    shares = f": {kinds}" if kinds else ""
    up, down = (
        rows[-1][f"{way}load_bytes"] / bench.config.clients / 1024 for way in ("up", "down")
    )
    return f"{down:,.1f} KiB down and {up:,.1f} KiB up for a client and round{shares}"


def _check_apart(bench: Bench, way: str) -> None:
    """Raise `Wrong` if client 0's training data change the other clients' models, although no byte
    goes this way."""
    vectors, with_negated = (
        bench.launch(f"negated-{negated}", _others, bench.config, negated)
        for negated in (False, True)
    )
    if not all(torch.equal(vectors[name], with_negated[name]) for name in vectors):
        reason = "something travels that is not in a Payload"
        changes = "what client 0 holds changes the models of others"
        raise Wrong(f"no byte goes {way}, yet {changes}: {reason}")


def _others(
    fabric: Fabric,
    config: Config,
    folder: Path,
    negated: bool,
) -> dict[str, Any]:
    """The vectors of all clients but client 0, whose training samples are `negated` or not, after
    three rounds."""
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
    config = bench.changed(evaluation={"every": bench.config.federation.rounds})
    result = bench.launch("counted", _counted, config)
    columns, by_torch = result["counted"], result["by_torch"]
    names = (*CLIENT_FLOPS, "flops_server")
    unknown = [name for name in names if not isfinite(columns.get(name, float("nan")))]
    if unknown:
        steps = "a hook changes the model, and no pass through it shows how"
        raise Wrong(f"{', '.join(unknown)} could not be counted: {steps}")
    counted = sum(columns[name] for name in names if name != "flops_penalty")
    millions = f"{counted / 1e6:,.2f} million"
    torch_millions = f"{by_torch / 1e6:,.2f} million"
    if by_torch > UNSEEN * counted:
        raise Wrong(
            f"torch sees {torch_millions} operations in a round, and {millions} are counted; what "
            "a hook computes beside passes of the client's model it adds to client.flops or "
            "server.flops"
        )
    return f"{millions} in a round; torch sees {torch_millions}"


def _counted(
    fabric: Fabric,
    config: Config,
    folder: Path,
) -> dict[str, Any]:
    """What torch sees in the second round, in which nothing is scored, and what its row counts."""
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
        jobs["two-partial"] = _partial(bench)
    folders = bench.on_two(jobs)
    problem = "on two processes it is another run"
    advice = f"{KEEPS}; what runs on the server must be the same on every process"
    _check_same(_reference(bench), folders["two"], problem, advice)
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
        lambda bench: _on(bench, "one_class"),
    ),
    Check(
        "few-samples",
        "clients with fewer samples than a batch",
        lambda bench: _on(bench, "few_samples"),
    ),
    Check("bytes", "all bytes are in the ledger", _bytes),
    Check("operations", "all operations are counted", _operations),
    Check("ranks", "two processes do what one does", _ranks),
]
NAMES = [check.name for check in CHECKS]
