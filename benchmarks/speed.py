"""CPU seconds of fl_lightning against bare loops that do the same work: `uv run python
benchmarks/speed.py`.

Sides run in turn in one process on one thread; a ratio is the median of paired ratios, with its
order-statistic interval (95 % from 6 pairs on). CPU seconds, not wall time: other programs on the
machine disturb them least.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import contextlib
import io
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from unittest import mock

import numpy as np
import torch
from bare import STEPPERS, BareFedAvg
from measure import Row, alone, command, compared, machine, ratio, table
from server import measured
from workloads import Workload, callback_round, data_root, faster, workloads

from fl_lightning.callbacks.base import Callback
from fl_lightning.callbacks.channel import Wireless
from fl_lightning.callbacks.checkpoint import Checkpoint
from fl_lightning.callbacks.heatmaps import Heatmaps
from fl_lightning.callbacks.progress import Progress
from fl_lightning.configuration.config import Component
from fl_lightning.core import GroupServer, Payload
from fl_lightning.core.payload import KINDS
from fl_lightning.engine import record
from fl_lightning.engine.federation import Federation
from fl_lightning.engine.writer import RunFolderWriter
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.heap import keep_freed
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedper import FedPer
from fl_lightning.methods.kapc import KAPC
from fl_lightning.results.folder import RunFolder

SERVER_PAIRS = {10: 10, 30: 6, 100: 3}
LENGTH = 200
"""Rounds of a run with callbacks, of which some are drawn."""
KEPT = "the same with run folder, checkpoint, pictures and progress"
START_GOAL = 5.0  # seconds
LIBRARIES = "torch, lightning"  # what a run cannot do without
GOALS = {
    "mnist-cnn-b10": {"FedAvg": 1.05, "KAPC": 1.15},
    "mnist-cnn-b64": {"FedAvg": 1.10, "KAPC": 1.15},
}
"""Of default rounds, by workload and method."""
TESTS = 0.25
"""Share of each client's samples that is its test part in default rounds, of training and test data
together."""
Benchmarks = Mapping[str, Callable[[int], list[Row]]]
"""By name what measures so many pairs."""


def _difference(fed: Federation, bare: BareFedAvg) -> float:
    """The greatest difference of a tensor between the two global models, relative to the tensor's
    greatest number."""
    [group], [trainer] = fed.run.groups, fed.worker.trainers
    trainer.module.binding.bind(group.vectors["model"], group.initial_buffers)
    ours = trainer.module.model.state_dict()
    theirs = bare.weights()
    return max(
        float((ours[k] - v).abs().max() / v.abs().max().clamp_min(1e-6)) for k, v in theirs.items()
    )


def against_bare(workload: Workload, pairs: int) -> list[Row]:
    """FedAvg without callbacks, and with those of `fl-train fit`, against the faster of two bare
    loops."""
    data, source = workload.load()
    with tempfile.TemporaryDirectory() as folder:
        kept = workload.federation(FedAvg(), data, Path(folder), callbacks(Path(folder)))
        kept.run.config.federation.rounds = LENGTH
        with contextlib.redirect_stderr(io.StringIO()):
            kept.prepare()
        floors = {stepper: workload.bare(data, stepper).round for stepper in STEPPERS}
        sides = {"engine": workload.federation(FedAvg(), data), "kept": kept, **floors}
        difference = same_weights(workload)
        seconds = workload.turns(sides, pairs)
    floor = faster(seconds)
    other = next(s for s in STEPPERS if s != floor)
    slower = median(seconds[other]) / median(seconds[floor])
    note = (
        f"{source}; weights differ by {difference:.0e} after a round; {other} takes {slower:.2f} "
        f"of the floor"
    )
    what = f"a round, {workload.clients} clients" + (", 10 %" if workload.participation < 1 else "")
    row, bare = (
        partial(compared, workload.name, scale=workload.rounds_at_once),
        f"bare loop ({floor})",
    )
    ours, with_callbacks, theirs = seconds["engine"], seconds["kept"], seconds[floor]
    return [
        row(what, ours, bare, theirs, goal=f"<= {workload.goal}", note=note),
        row(KEPT, with_callbacks, bare, theirs),
        row(f"{KEPT}, beside none", with_callbacks, what, ours, goal="<= 1.25"),
    ]


def same_weights(workload: Workload, rounds: int = 1, tolerance: float = 1e-4) -> float:
    """Run engine and bare loop for some rounds and compare the global models; returns how far they
    differ.

    One round, since with BatchNorm over few samples float32 rounding grows fast (in float64 rounds
    agree to 1e-14).
    """
    data, _ = workload.load()
    fed = workload.federation(FedAvg(), data)
    loops = [workload.bare(data, stepper, fed.run.device) for stepper in STEPPERS]
    for t in range(1, rounds + 1):
        for side in (fed, *loops):
            side.round(t)
    difference = max(_difference(fed, loop) for loop in loops)
    if not difference <= tolerance:
        raise AssertionError(
            f"{workload.name}: the bare loop does other work: weights differ by {difference:.1e}"
        )
    return difference


def callbacks(folder: Path) -> list[Callback]:
    """What `fl-train fit` hangs on a run unless told otherwise, in its order."""
    return [Heatmaps(), Progress(), RunFolderWriter(RunFolder(folder)), Checkpoint()]


def as_it_comes(workload: Workload, pairs: int) -> list[Row]:
    """Rounds of FedAvg (before, after, global) and KAPC (before, after) against the faster hand
    loop of FedAvg."""
    goals = GOALS.get(workload.name, {})
    workload = replace(workload, data=replace(workload.data, client_test=TESTS), rounds_at_once=1)
    data, source = workload.load()
    methods = {"FedAvg": FedAvg(), "KAPC": KAPC()}
    sides = {
        name: workload.federation(method, data, judge="auto").round
        for name, method in methods.items()
    }
    seconds = workload.turns(sides | {s: workload.bare(data, s).round for s in STEPPERS}, pairs)
    floor, rows = faster(seconds), []
    for name in methods:
        ratios = [a / b for a, b in zip(seconds[name], seconds[floor], strict=True)]
        note = f"{source}; lowest to highest {min(ratios):.2f} to {max(ratios):.2f}"
        goal = f"<= {goals[name]}" if name in goals else ""
        what, against = f"a default round of {name}", f"bare loop that scores once ({floor})"
        rows.append(
            compared(
                f"default-{workload.name}",
                what,
                seconds[name],
                against,
                seconds[floor],
                1,
                goal,
                note,
            )
        )
    return rows


def saving(workload: Workload, pairs: int) -> list[Row]:
    """A checkpoint after a round in which every client's own model has changed, as a share of the
    round."""
    data, source = workload.load()
    clocks, spans = (time.process_time, time.perf_counter), []
    with tempfile.TemporaryDirectory() as folder:
        fed = workload.federation(
            FedPer(), data, Path(folder), [saver := Checkpoint()], judge="after"
        )
        for t in range(1, pairs + 2):
            times = [[clock() for clock in clocks]]
            ended = fed.round(t)
            times.append([clock() for clock in clocks])
            saver.on_round_end(fed.run, ended)
            times.append([clock() for clock in clocks])
            spans.append(np.diff(times, axis=0))
    # the first of each does not count
    rounds, checkpoints = np.array(spans[1:]).transpose(1, 2, 0).tolist()
    share, low, high = ratio(checkpoints[1], rounds[1])
    note = (
        f"{source}; wall time: {median(checkpoints[1]):.3g} s, {share:.3f} [{low:.3f}, {high:.3f}]"
    )
    what, name = f"a checkpoint of {workload.clients} clients", f"saving-{workload.name}"
    return [
        compared(name, what, checkpoints[0], "a round of FedPer", rounds[0], 1, "<= 0.05", note)
    ]


def executors(workload: Workload, pairs: int) -> list[Row]:
    """A round of FedAvg by each executor that runs here, against the bare loop."""
    data, source = workload.load()
    sides: dict[str, Federation] = {}
    for name in ("loop", "vmap"):
        try:
            fed = workload.federation(FedAvg(), data, executor=name)
        except BadInput as error:
            print(error, file=sys.stderr)
            continue
        if fed.worker.trainers[0].executor.name == name:
            sides[name] = fed
    seconds = workload.turns({**sides, "bare": workload.bare(data, STEPPERS[1]).round}, pairs)
    name, scale, against = (
        f"executors-{workload.name}",
        workload.rounds_at_once,
        f"bare loop ({STEPPERS[1]})",
    )
    return [
        compared(
            name,
            f"a round, fabric.executor {side}",
            seconds[side],
            against,
            seconds["bare"],
            scale,
            "",
            source,
        )
        for side in sides
    ]


def coaching(workload: Workload, pairs: int) -> list[Row]:
    """A round of KAPC against one of FedAvg, both judged after local training."""
    data, source = workload.load()
    kinds = {
        "paper": KAPC(),
        "exact": KAPC(solver="exact", start="server", prior="samples", rho_units="spread"),
    }
    methods = {"fedavg": FedAvg(), **kinds}
    sides = {
        name: workload.federation(method, data, judge="after") for name, method in methods.items()
    }
    seconds = workload.turns(sides, pairs)
    name, scale, fedavg = f"kapc-{workload.name}", workload.rounds_at_once, seconds["fedavg"]
    return [
        compared(
            name,
            f"a round of KAPC ({kind})",
            seconds[kind],
            "a round of FedAvg",
            fedavg,
            scale,
            "",
            source,
        )
        for kind in kinds
    ]


def accounting(workload: Workload, pairs: int) -> list[Row]:
    """A round of KAPC with ledger, operations and channel, against the same round with none of
    them."""
    data, source = workload.load()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writers = [Wireless(), RunFolderWriter(RunFolder(folder / "counted"))]
        counted = workload.federation(KAPC(), data, folder, writers, "after")
        keeper = RunFolderWriter(RunFolder(folder / "bare"))
        bare = workload.federation(KAPC(), data, folder, [keeper], "after", counts=False)
        layers, round = len(bare.run.layer_names), callback_round(bare)
        nothing = {
            "by_layer": np.zeros((layers + 1, len(KINDS)), np.int64),
            "layers_sent": np.zeros(layers, bool),
        }

        def uncounted(t: int) -> None:
            with (
                mock.patch.multiple(Payload, **nothing),
                mock.patch.object(GroupServer, "_count"),
                mock.patch.object(RunFolder, "write_traffic"),
                mock.patch.object(record, "server_bytes", return_value=0),
            ):
                round(t)

        seconds = workload.turns({"counted": counted, "bare": uncounted}, pairs)
    name, scale = f"accounting-{workload.name}", workload.rounds_at_once
    what, against = "a round of KAPC with ledger, operations and channel", "the same without them"
    return [
        compared(name, what, seconds["counted"], against, seconds["bare"], scale, "<= 1.02", source)
    ]


def server_step(clients: int, pairs: int) -> list[Row]:
    """Gram, relation and mix for models of ResNet-18's size, in a process of its own."""
    rows, pairs = [], min(pairs, SERVER_PAIRS[clients])
    for solver in ("step", "exact"):
        out = alone(measured, clients, solver, pairs)
        note = f"{out.pop('extra_mib'):.0f} MiB beyond models and outputs"
        what = f"server step ({solver}), {clients} ResNet-18"
        rows.append(
            Row(
                f"server-{clients}",
                what,
                against="W Wᵀ and A W by layer",
                note=note,
                pairs=pairs,
                **out,
            )
        )
    return rows


def start_up(pairs: int) -> list[Row]:
    """`fl-train --help`, and `fl-train fit` until its first round begins."""
    fl_train = str(Path(sys.executable).with_name("fl-train"))
    rows = [
        Row("start", "fl-train --help", median(_children(fl_train, "--help") for _ in range(pairs)))
    ]
    settings = {"digits": ["--config", "kapc_exact_digits"]}
    if (data_root() / "MNIST").exists():
        settings["MNIST"] = [
            "--config",
            "kapc_mnist",
            "--data.root",
            str(data_root()),
            "--data.download",
            "false",
        ]
    for name, flags in settings.items():
        starts, imports = [], []
        for _ in range(min(pairs, 5)):
            starts.append(_first_round(fl_train, flags))
            imports.append(_children(sys.executable, "-c", f"import {LIBRARIES}"))
        note = f"peak {max(f['peak_mib'] for f in starts):.0f} MiB"
        what, goal = f"fl-train fit on {name}, until round 1 begins", f"<= {START_GOAL:.0f} s"
        seconds = [f["seconds"] for f in starts]
        rows.append(compared("start", what, seconds, f"import {LIBRARIES}", imports, 1, goal, note))
    return rows


def _children(*words: str) -> float:
    """CPU seconds that a process takes from its start to its end."""
    before = os.times()
    command(*words)
    after = os.times()
    return (
        after.children_user + after.children_system - before.children_user - before.children_system
    )


def _first_round(fl_train: str, flags: Sequence[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "first.json"
        callback = {"first": {"class_path": "stamps.FirstRound", "path": str(path)}}
        extra = [
            "--out",
            folder,
            "--loggers",
            "null",
            "--callbacks",
            json.dumps(callback),
            "--fabric.threads",
            "1",
        ]
        command(fl_train, "fit", *flags, *extra, "--fabric.accelerator", "cpu")
        taken: dict[str, float] = json.loads(path.read_text())
    return taken


def benchmarks() -> Benchmarks:
    """Everything that can be measured here, by the name that `--only` takes."""
    known = workloads(data_root())
    cnn10, cnn64, resnet = (known[name] for name in ("mnist-cnn-b10", "mnist-cnn-b64", "resnet18"))
    # all of MNIST, one epoch: a fifth of a round of KAPC's papers; KAPC's setting: 500 images each,
    # 5 epochs
    saved = (
        replace(
            cnn64, name="100-mnist-cnn", clients=100, train_samples=60_000, test_samples=10_000
        ),
        replace(
            resnet,
            name="10-resnet18",
            train_samples=5000,
            test_samples=1000,
            local_epochs=5,
            batch_size=64,
        ),
    )
    mlp = Component("fl_lightning.models.mlp.MLP", {"hidden": (200,)})  # 784-200-10
    tried = (cnn10, known["100-mlps-10-a-round"], replace(cnn10, name="mnist-mlp", model=mlp))
    everything: dict[str, Callable[[int], list[Row]]] = {
        name: partial(against_bare, w) for name, w in known.items()
    }
    everything |= {f"default-{name}": partial(as_it_comes, known[name]) for name in GOALS}
    for w in saved:
        whole = replace(w, data=replace(w.data, fraction=1.0))
        everything[f"saving-{w.name}"] = lambda pairs, w=whole: saving(w, min(pairs, 3))
    everything |= {f"kapc-{name}": partial(coaching, w) for name, w in known.items()}
    everything |= {f"executors-{w.name}": partial(executors, w) for w in tried}
    everything |= {f"accounting-{name}": partial(accounting, w) for name, w in known.items()}
    everything |= {f"server-{clients}": partial(server_step, clients) for clients in SERVER_PAIRS}
    return everything | {"start": start_up}


def main(chosen: Benchmarks, argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--pairs", type=int, default=10, help="how often each side runs (default 10)"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=list(chosen), help="%(choices)s"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="JSON file of machine and rows; rows of other benchmarks in it stay",
    )
    parser.add_argument(
        "--table", action="store_true", help="measure nothing, print what is in --out"
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    keep_freed()  # both sides have what a run has
    here = machine()
    rows = _known_rows(args.out, here)
    start, order = time.perf_counter(), list(chosen)
    for name in [] if args.table else args.only or chosen:
        today = date.today().isoformat()
        new = [
            replace(row, pairs=row.pairs or args.pairs, date=today)
            for row in chosen[name](args.pairs)
        ]
        rows = [row for row in rows if row.name != name] + new
        # scaling.py's are last
        rows.sort(key=lambda row: order.index(row.name) if row.name in order else len(order))
        print(f"{time.perf_counter() - start:6.0f} s  {name}", file=sys.stderr)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            report = {"machine": here, "rows": [asdict(row) for row in rows]}
            args.out.write_text(
                json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
            )
    print(f"{here}\n\n{table(rows)}")


def _known_rows(path: Path | None, here: str) -> list[Row]:
    """What an earlier call wrote on the same machine."""
    if path is None or not path.exists():
        return []
    report = json.loads(path.read_text(encoding="utf-8"))
    if report["machine"] != here:
        raise SystemExit(
            f"{path} was measured on another machine ({report['machine']}): give another --out"
        )
    return [Row(**row) for row in report["rows"]]


if __name__ == "__main__":
    main(benchmarks())
