"""CPU seconds of fl_lightning against bare loops that do the same work: `uv run python benchmarks/speed.py`.

Sides run in turn in one process on one thread; a ratio is the median of paired ratios, with its order-statistic
interval (95 % from 6 pairs on). CPU seconds, not wall time: other programs on the machine disturb them least.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import torch
from bare import STEPPERS, BareFedAvg
from default_round import GOALS, as_it_comes
from measure import Row, compared, interleaved, machine, ratio, table
from workloads import Workload, data_root, workloads

from fl_lightning.callbacks.base import Callback
from fl_lightning.callbacks.channel import Wireless
from fl_lightning.callbacks.checkpoint import Checkpoint
from fl_lightning.callbacks.heatmaps import Heatmaps
from fl_lightning.callbacks.progress import Progress
from fl_lightning.config import Component
from fl_lightning.core.payload import KINDS, Payload
from fl_lightning.core.server import GroupServer
from fl_lightning.engine import record
from fl_lightning.engine.federation import Federation
from fl_lightning.engine.writer import RunFolderWriter
from fl_lightning.errors import BadInput
from fl_lightning.heap import keep_freed
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedper import FedPer
from fl_lightning.methods.kapc import KAPC
from fl_lightning.record import RoundRecord
from fl_lightning.results.folder import RunFolder

HERE = Path(__file__).resolve().parent
SERVER_PAIRS = {10: 10, 30: 6, 100: 3}
LENGTH = 200
"""Rounds of a run with callbacks, of which some are drawn."""
KEPT = "the same with run folder, checkpoint, pictures and progress"
START_GOAL = 5.0  # seconds
LIBRARIES = "torch, lightning"  # what a run cannot do without


class Rounds:
    """The next rounds of one side, each time it is called."""

    def __init__(self, round: Callable[[int], object], at_once: int) -> None:
        self.round, self.at_once, self.done = round, at_once, 0

    def __call__(self) -> None:
        for _ in range(self.at_once):
            self.done += 1
            self.round(self.done)


def plain_round(fed: Federation, t: int) -> None:
    """One round of the loop in `Federation.fit`, with what its callbacks do."""
    with contextlib.redirect_stderr(io.StringIO()):  # the progress line
        fed.tell("on_round_end", fed.round(t))


def _difference(fed: Federation, bare: BareFedAvg) -> float:
    """The greatest difference of a tensor between the two global models, relative to the tensor's greatest number."""
    [group], [trainer] = fed.run.groups, fed.worker.trainers
    trainer.module.binding.bind(group.vectors["model"], group.initial_buffers)
    ours = trainer.module.model.state_dict()
    theirs = bare.weights()
    return max(float((ours[k] - v).abs().max() / v.abs().max().clamp_min(1e-6)) for k, v in theirs.items())


def against_bare(workload: Workload, pairs: int) -> list[Row]:
    """FedAvg without callbacks, and with those of `fl-train fit`, against the faster of two bare loops."""
    data, source = workload.load()
    with tempfile.TemporaryDirectory() as folder:
        fed = workload.federation(FedAvg(), data, Path(folder))
        kept = workload.federation(FedAvg(), data, Path(folder), callbacks(Path(folder)))
        kept.run.config.federation.rounds = LENGTH
        with contextlib.redirect_stderr(io.StringIO()):
            kept.prepare()
        floors = {s: BareFedAvg(workload.config(), data, workload.initial(data), s) for s in STEPPERS}
        sides: dict[str, Callable[[], object]] = {
            "engine": Rounds(partial(plain_round, fed), workload.rounds_at_once),
            "kept": Rounds(partial(plain_round, kept), workload.rounds_at_once),
            **{s: Rounds(bare.round, workload.rounds_at_once) for s, bare in floors.items()},
        }
        difference = same_weights(workload)
        seconds = interleaved(sides, pairs)
    floor = min(STEPPERS, key=lambda s: median(seconds[s]))
    other = next(s for s in STEPPERS if s != floor)
    slower = median(seconds[other]) / median(seconds[floor])
    note = f"{source}; weights differ by {difference:.0e} after a round; {other} takes {slower:.2f} of the floor"
    what = f"a round, {workload.clients} clients" + (", 10 %" if workload.participation < 1 else "")
    goal = f"<= {workload.goal}"
    scale = workload.rounds_at_once
    return [
        compared(workload.name, what, seconds["engine"], f"bare loop ({floor})", seconds[floor], scale, goal, note),
        compared(workload.name, KEPT, seconds["kept"], f"bare loop ({floor})", seconds[floor], scale),
        compared(workload.name, f"{KEPT}, beside none", seconds["kept"], what, seconds["engine"], scale, "<= 1.25"),
    ]


def same_weights(workload: Workload, rounds: int = 1, tolerance: float = 1e-4) -> float:
    """Run engine and bare loop for some rounds and compare the global models; returns how far they differ.

    One round, since with BatchNorm over few samples float32 rounding grows fast (in float64 rounds agree to 1e-14).
    """
    data, _ = workload.load()
    difference = 0.0
    with tempfile.TemporaryDirectory() as folder:
        fed = workload.federation(FedAvg(), data, Path(folder))
        for stepper in STEPPERS:
            bare = BareFedAvg(workload.config(), data, workload.initial(data), stepper, fed.run.device)
            for t in range(1, rounds + 1):
                if stepper == STEPPERS[0]:
                    fed.round(t)
                bare.round(t)
            difference = max(difference, _difference(fed, bare))
    if not difference <= tolerance:
        raise AssertionError(f"{workload.name}: the bare loop does other work: weights differ by {difference:.1e}")
    return difference


def callbacks(folder: Path) -> list[Callback]:
    """What `fl-train fit` hangs on a run unless told otherwise, in its order."""
    return [Heatmaps(), Progress(), RunFolderWriter(RunFolder(folder)), Checkpoint()]


def saving(workload: Workload, pairs: int) -> list[Row]:
    """A checkpoint after a round in which every client's own model has changed, as a share of the round."""
    data, source = workload.load()
    cpu: dict[str, list[float]] = {"round": [], "checkpoint": []}
    wall: dict[str, list[float]] = {"round": [], "checkpoint": []}
    with tempfile.TemporaryDirectory() as folder:
        fed = workload.federation(FedPer(), data, Path(folder), [saver := Checkpoint()], judge="after")
        for t in range(1, pairs + 2):
            ended: Any = None
            for name in cpu:
                start, start_wall = time.process_time(), time.perf_counter()
                if name == "round":
                    ended = fed.round(t)
                else:
                    saver.on_round_end(fed.run, ended)
                cpu[name].append(time.process_time() - start)
                wall[name].append(time.perf_counter() - start_wall)
    mine, rounds = cpu["checkpoint"][1:], cpu["round"][1:]  # the first of each does not count
    share, low, high = ratio(wall["checkpoint"][1:], wall["round"][1:])
    note = f"{source}; wall time: {median(wall['checkpoint'][1:]):.3g} s, {share:.3f} [{low:.3f}, {high:.3f}]"
    what = f"a checkpoint of {workload.clients} clients"
    return [compared(f"saving-{workload.name}", what, mine, "a round of FedPer", rounds, 1, "<= 0.05", note)]


def executors(workload: Workload, pairs: int) -> list[Row]:
    """A round of FedAvg by each executor that runs here, against the bare loop."""
    data, source = workload.load()
    names = ["loop", "vmap", *(["graph"] if torch.cuda.is_available() else [])]
    sides: dict[str, Callable[[], object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            try:
                fed = workload.federation(FedAvg(), data, Path(folder), executor=name)
            except BadInput as error:
                print(error, file=sys.stderr)
                continue
            if fed.worker.trainers[0].executor.name == name:
                sides[name] = Rounds(partial(plain_round, fed), workload.rounds_at_once)
        bare = BareFedAvg(workload.config(), data, workload.initial(data), STEPPERS[1])
        seconds = interleaved({**sides, "bare": Rounds(bare.round, workload.rounds_at_once)}, pairs)
    name, scale, against = f"executors-{workload.name}", workload.rounds_at_once, f"bare loop ({STEPPERS[1]})"
    return [
        compared(name, f"a round, fabric.executor {side}", seconds[side], against, seconds["bare"], scale, "", source)
        for side in sides
    ]


def coaching(workload: Workload, pairs: int) -> list[Row]:
    """A round of KAPC against one of FedAvg, both judged after local training."""
    data, source = workload.load()
    kinds = {"paper": KAPC(), "exact": KAPC(solver="exact", start="server", prior="samples", rho_units="spread")}
    with tempfile.TemporaryDirectory() as folder:
        methods = {"fedavg": FedAvg(), **kinds}
        sides: dict[str, Callable[[], object]] = {
            name: Rounds(
                partial(plain_round, workload.federation(method, data, Path(folder), judge="after")),
                workload.rounds_at_once,
            )
            for name, method in methods.items()
        }
        seconds = interleaved(sides, pairs)
    name, scale, fedavg = f"kapc-{workload.name}", workload.rounds_at_once, seconds["fedavg"]
    return [
        compared(name, f"a round of KAPC ({kind})", seconds[kind], "a round of FedAvg", fedavg, scale, "", source)
        for kind in kinds
    ]


class Unledgered(RunFolder):
    """The tables of a run without its ledger."""

    def write_traffic(self, record: RoundRecord) -> None:
        pass


def accounting(workload: Workload, pairs: int) -> list[Row]:
    """A round of KAPC with ledger, operations and channel, against the same round with none of them."""
    data, source = workload.load()
    with tempfile.TemporaryDirectory() as folder:
        counted = workload.federation(
            KAPC(), data, Path(folder), [Wireless(), RunFolderWriter(RunFolder(Path(folder) / "counted"))], "after"
        )
        keeper = RunFolderWriter(Unledgered(Path(folder) / "bare"))
        bare = workload.federation(KAPC(), data, Path(folder), [keeper], "after", counts=False)
        layers = len(bare.run.layer_names)
        nothing = {"by_layer": np.zeros((layers + 1, len(KINDS)), np.int64), "layers_sent": np.zeros(layers, bool)}

        def uncounted(t: int) -> None:
            with contextlib.ExitStack() as patches:
                for name, value in nothing.items():
                    patches.enter_context(mock.patch.object(Payload, name, value))
                patches.enter_context(mock.patch.object(GroupServer, "_count"))
                patches.enter_context(mock.patch.object(record, "server_bytes", return_value=0))
                plain_round(bare, t)

        sides: dict[str, Callable[[], object]] = {
            "counted": Rounds(partial(plain_round, counted), workload.rounds_at_once),
            "bare": Rounds(uncounted, workload.rounds_at_once),
        }
        seconds = interleaved(sides, pairs)
    what, against = "a round of KAPC with ledger, operations and channel", "the same without them"
    scale = workload.rounds_at_once
    name = f"accounting-{workload.name}"
    return [compared(name, what, seconds["counted"], against, seconds["bare"], scale, "<= 1.02", source)]


def server_step(clients: int, pairs: int) -> list[Row]:
    """Gram, relation and mix for models of ResNet-18's size, in a process of its own."""
    rows = []
    for solver in ("step", "exact"):
        out = json.loads(_run([sys.executable, str(HERE / "server.py"), str(clients), solver, str(pairs)]).stdout)
        extra = out.pop("extra_mib")
        note = f"{extra:.0f} MiB beyond models and outputs"
        what = f"server step ({solver}), {clients} ResNet-18"
        rows.append(Row(f"server-{clients}", what, against="W Wᵀ and A W by layer", note=note, pairs=pairs, **out))
    return rows


def start_up(pairs: int) -> list[Row]:
    """`fl-train --help`, and `fl-train fit` until its first round begins."""
    command = str(Path(sys.executable).with_name("fl-train"))
    helps = [_children([command, "--help"]) for _ in range(pairs)]
    rows = [Row("start", "fl-train --help", median(helps))]
    settings = {"digits": ["--config", "kapc_exact_digits"]}
    mnist = ["--config", "kapc_mnist", "--data.root", str(data_root()), "--data.download", "false"]
    if (data_root() / "MNIST").exists():
        settings["MNIST"] = mnist
    for name, flags in settings.items():
        starts, imports = [], []
        for _ in range(min(pairs, 5)):
            starts.append(_first_round(command, flags))
            imports.append(_children([sys.executable, "-c", f"import {LIBRARIES}"]))
        note = f"peak {max(f['peak_mib'] for f in starts):.0f} MiB"
        what, goal = f"fl-train fit on {name}, until round 1 begins", f"<= {START_GOAL:.0f} s"
        seconds = [f["seconds"] for f in starts]
        rows.append(compared("start", what, seconds, f"import {LIBRARIES}", imports, 1, goal, note))
    return rows


def _children(command: Sequence[str]) -> float:
    """CPU seconds that a process takes from its start to its end."""
    before = os.times()
    _run(command)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def _first_round(command: str, flags: Sequence[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "first.json"
        callback = {"first": {"class_path": "first_round.FirstRound", "path": str(path)}}
        extra = ["--out", folder, "--loggers", "null", "--callbacks", json.dumps(callback), "--fabric.threads", "1"]
        _run([command, "fit", *flags, *extra, "--fabric.accelerator", "cpu"])
        measured: dict[str, float] = json.loads(path.read_text())
    return measured


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a process to its end; its words are shown if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return done


def benchmarks(pairs: int, known: dict[str, Workload]) -> dict[str, Callable[[], list[Row]]]:
    """Everything that can be measured, by the name that `--only` takes."""
    workloads: dict[str, Callable[[], list[Row]]] = {}
    for name, workload in known.items():
        workloads[name] = partial(against_bare, workload, pairs)
    for name in [name for name in GOALS if name in known]:
        workloads[f"default-{name}"] = partial(as_it_comes, known[name], pairs)
    if cnn := known.get("mnist-cnn-b64"):  # all of MNIST, one epoch: a fifth of a round of KAPC's papers
        all_of_it = replace(cnn.data, fraction=1.0)
        saved = replace(
            cnn, name="100-mnist-cnn", clients=100, data=all_of_it, train_samples=60_000, test_samples=10_000
        )
        workloads[f"saving-{saved.name}"] = partial(saving, saved, min(pairs, 3))
    if resnet := known.get("resnet18"):  # KAPC's setting without client selection: 500 images each, 5 epochs
        data = replace(resnet.data, fraction=1.0)
        resnet = replace(
            resnet,
            data=data,
            train_samples=5000,
            test_samples=1000,
            local_epochs=5,
            batch_size=64,
            name="10-resnet18",
        )
        workloads[f"saving-{resnet.name}"] = partial(saving, resnet, min(pairs, 3))
    for name, workload in known.items():
        workloads[f"kapc-{name}"] = partial(coaching, workload, pairs)
    tried = [known[name] for name in ("mnist-cnn-b10", "100-mlps-10-a-round") if name in known]
    if cnn := known.get("mnist-cnn-b10"):
        mlp = Component("fl_lightning.models.mlp.MLP", {"hidden": (200,)})  # 784-200-10
        tried.append(replace(cnn, name="mnist-mlp", model=mlp))
    for workload in tried:
        workloads[f"executors-{workload.name}"] = partial(executors, workload, pairs)
    for name, workload in known.items():
        workloads[f"accounting-{name}"] = partial(accounting, workload, pairs)
    for clients, most in SERVER_PAIRS.items():
        workloads[f"server-{clients}"] = partial(server_step, clients, min(pairs, most))
    workloads["start"] = partial(start_up, pairs)
    return workloads


def main(
    argv: Sequence[str] | None = None, more: Callable[[int], dict[str, Callable[[], list[Row]]]] = lambda pairs: {}
) -> None:
    """Measure, print the table, write JSON; `more` gives further benchmarks, which come first."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    known = workloads(data_root())
    parser.add_argument("--pairs", type=int, default=10, help="how often each side runs (default 10)")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=list(more(1) | benchmarks(1, known)), help="%(choices)s"
    )
    parser.add_argument("--out", type=Path, help="JSON file of machine and rows; rows of other benchmarks in it stay")
    parser.add_argument("--table", action="store_true", help="measure nothing, print what is in --out")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    keep_freed()  # both sides have what a run has
    chosen = more(args.pairs) | benchmarks(args.pairs, known)
    here = machine()
    rows = _known_rows(args.out, here)
    start = time.perf_counter()
    for name in [] if args.table else args.only or chosen:
        measured = [
            replace(row, pairs=row.pairs or args.pairs, date=date.today().isoformat()) for row in chosen[name]()
        ]
        rows = [row for row in rows if row.name != name] + measured
        order = {name: k for k, name in enumerate(chosen)}  # a file may hold rows of scaling.py
        rows.sort(key=lambda row: order.get(row.name, len(order)))
        print(f"{time.perf_counter() - start:6.0f} s  {name}", file=sys.stderr)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            report = {"machine": here, "rows": [asdict(row) for row in rows]}
            args.out.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{here}\n\n{table(rows)}")


def _known_rows(path: Path | None, here: str) -> list[Row]:
    """What an earlier call wrote on the same machine."""
    if path is None or not path.exists():
        return []
    report = json.loads(path.read_text(encoding="utf-8"))
    if report["machine"] != here:
        raise SystemExit(f"{path} was measured on another machine ({report['machine']}): give another --out")
    return [Row(**row) for row in report["rows"]]


if __name__ == "__main__":
    main()
