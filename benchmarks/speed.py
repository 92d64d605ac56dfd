"""CPU seconds of fl_lightning against a hand-written loop that does the same work.

    uv run python benchmarks/speed.py --out runs/speed.json

Sides run in turn in one process on one thread; a ratio is the median of paired ratios, with its
order-statistic interval (95 % from 6 pairs on). CPU seconds, not wall time: other programs on the
machine disturb them least.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path

import torch
from bare import BareFedAvg
from measure import Row, command, compared, machine, markdown, stamps
from server import measured
from workloads import Workload, alone, workloads

from fl_lightning.callbacks.base import Callback
from fl_lightning.callbacks.checkpoint import Checkpoint
from fl_lightning.callbacks.heatmaps import Heatmaps
from fl_lightning.callbacks.progress import Progress
from fl_lightning.configuration.config import Component
from fl_lightning.engine.federation import Federation
from fl_lightning.engine.writer import RunFolderWriter
from fl_lightning.foundation.heap import keep_freed
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.kapc import KAPC
from fl_lightning.results.folder import RunFolder

os.environ.setdefault("OMP_NUM_THREADS", "1")
HAND = "hand loop"
KEPT = "a round with run folder, checkpoint, pictures and progress"
LENGTH = 200
"""Rounds of a run with callbacks, of which some are drawn."""
GOALS = ("<= 1.10", "<= 1.15", "")
"""Of a default round of FedAvg, of KAPC, and of KAPC solved exactly."""
SERVER_PAIRS = {10: 10, 30: 6, 100: 3}
Benchmarks = Mapping[str, Callable[[int], list[Row]]]
"""Functions of the number of pairs, by the name that `--only` takes."""


def callbacks(folder: Path) -> list[Callback]:
    """Return the callbacks that a run has by default."""
    return [
        Heatmaps(),
        Progress(),
        RunFolderWriter(RunFolder(folder)),
        Checkpoint(),
    ]


def rounds(workload: Workload, pairs: int) -> list[Row]:
    """A round of FedAvg without callbacks, and with the default ones."""
    data, source = workload.load()
    difference = same_weights(workload)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kept = workload.federation(FedAvg(), data, folder, callbacks(folder))
        kept.run.config.federation.rounds = LENGTH
        with contextlib.redirect_stderr(io.StringIO()):
            kept.prepare()
        plain = workload.federation(FedAvg(), data)
        sides = {
            "a round": plain,
            KEPT: kept,
            HAND: workload.bare(data),
        }
        seconds = workload.seconds(sides, pairs)
    note = f"{source}; weights differ by {difference:.0e} after a round"
    row = partial(
        compared,
        workload.name,
        seconds=seconds,
        rounds=workload.rounds_at_once,
    )
    return [
        row("a round", HAND, goal=f"<= {workload.goal}", note=note),
        row(KEPT, HAND),
        row(KEPT, "a round", goal="<= 1.25"),
    ]


def same_weights(
    workload: Workload,
    rounds: int = 1,
    tolerance: float = 1e-4,
) -> float:
    """Return how far the global models of engine and hand loop differ after some rounds.

    One round, since with BatchNorm over few samples float32 rounding grows fast (in float64 rounds
    agree to 1e-14).
    """
    data, _ = workload.load()
    federation = workload.federation(FedAvg(), data)
    bare = workload.bare(data, federation.run.device)
    for t in range(1, rounds + 1):
        federation.round(t)
        bare.round(t)
    difference = largest_difference(federation, bare)
    if not difference <= tolerance:
        raise AssertionError(
            f"{workload.name}: the bare loop does other work: weights differ by {difference:.1e}"
        )
    return difference


def largest_difference(federation: Federation, bare: BareFedAvg) -> float:
    """Return the largest difference of a tensor, relative to the tensor's largest number."""
    [group], [trainer] = federation.run.groups, federation.worker.trainers
    trainer.module.binding.bind(group.vectors["model"], group.initial_buffers)
    ours = trainer.module.model.state_dict()
    differences = []
    for name, theirs in bare.weights().items():
        largest = theirs.abs().max().clamp_min(1e-6)
        differences.append(float((ours[name] - theirs).abs().max() / largest))
    return max(differences)


def default_rounds(workload: Workload, pairs: int) -> list[Row]:
    """Rounds of FedAvg (before, after, global) and KAPC (before, after), with every score."""
    # A quarter of each client's samples of training and test data are its test part.
    data_config = replace(workload.data, client_test=0.25)
    workload = replace(workload, data=data_config, rounds_at_once=1)
    data, source = workload.load()
    exact = KAPC(
        solver="exact",
        start="server",
        prior="samples",
        rho_units="spread",
    )
    methods = {"FedAvg": FedAvg(), "KAPC (paper)": KAPC(), "KAPC (exact)": exact}
    sides: dict[str, Federation | BareFedAvg] = {
        f"a default round of {name}": workload.federation(method, data, judge="auto")
        for name, method in methods.items()
    }
    seconds = workload.seconds(sides | {HAND: workload.bare(data)}, pairs)
    name = f"default-{workload.name}"
    return [
        compared(name, side, HAND, seconds, goal=goal, note=source)
        for side, goal in zip(sides, GOALS, strict=True)
    ]


def executors(workload: Workload, pairs: int) -> list[Row]:
    """A round of FedAvg by each executor."""
    data, source = workload.load()
    sides: dict[str, Federation | BareFedAvg] = {
        f"a round, fabric.executor {name}": workload.federation(FedAvg(), data, executor=name)
        for name in ("loop", "vmap")
    }
    seconds = workload.seconds(sides | {HAND: workload.bare(data)}, pairs)
    name, scale = f"executors-{workload.name}", workload.rounds_at_once
    return [compared(name, side, HAND, seconds, scale, "", source) for side in sides]


def server_step(clients: int, pairs: int) -> list[Row]:
    """Gram, relation and mix for models of ResNet-18's size, in a process of its own."""
    rows = []
    for solver in ("step", "exact"):
        result = alone(
            measured,
            clients,
            solver,
            min(pairs, SERVER_PAIRS[clients]),
        )
        side = f"server step ({solver}), {clients} ResNet-18"
        seconds = {
            side: result["seconds"]["step"],
            "bare products": result["seconds"]["products"],
        }
        note = f"{result['extra_mib']:.0f} MiB beyond models and outputs"
        rows.append(
            compared(f"server-{clients}", side, "bare products", seconds, 1, "<= 1.7", note)
        )
    return rows


def start_up(pairs: int) -> list[Row]:
    """`fl-train --help`, and `fl-train fit` until its first round begins."""
    fl_train = str(Path(sys.executable).with_name("fl-train"))
    fit = "fl-train fit on the digits, until round 1 begins"
    libraries = "import torch, lightning"
    seconds: dict[str, list[float]] = {
        "fl-train --help": [],
        fit: [],
        libraries: [],
    }
    for _ in range(min(pairs, 5)):
        seconds["fl-train --help"].append(command(fl_train, "--help"))
        seconds[libraries].append(command(sys.executable, "-c", libraries))
        with tempfile.TemporaryDirectory() as folder:
            callback = {"class_path": "measure.Stamps", "path": f"{folder}/stamps"}
            words = f"fit --config kapc_exact_digits --federation.rounds 1 --out {folder}"
            words += " --loggers null --fabric.threads 1 --fabric.accelerator cpu --callbacks"
            command(
                fl_train,
                *words.split(),
                json.dumps({"stamps": callback}),
            )
            seconds[fit].append(stamps(Path(f"{folder}/stamps.0"))[0, 1])
    return [
        compared("start", "fl-train --help", libraries, seconds),
        compared("start", fit, libraries, seconds, goal="<= 5 s"),
    ]


def benchmarks() -> dict[str, Callable[[int], list[Row]]]:
    """Return everything that can be measured here, by the name that `--only` takes."""
    known = workloads()
    wide = Component("fl_lightning.models.mlp.MLP", {"hidden": (200,)})
    mlp = replace(known["mnist-cnn-b10"], name="mnist-mlp", model=wide)
    chosen: dict[str, Callable[[int], list[Row]]] = {"start": start_up}
    for name, workload in known.items():
        chosen[name] = partial(rounds, workload)
        chosen[f"default-{name}"] = partial(default_rounds, workload)
    for workload in (known["mnist-cnn-b10"], known["100-mlps-10-a-round"], mlp):
        chosen[f"executors-{workload.name}"] = partial(executors, workload)
    for clients in SERVER_PAIRS:
        chosen[f"server-{clients}"] = partial(server_step, clients)
    return chosen


def main(chosen: Benchmarks, argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write it as JSON."""
    parser = argparse.ArgumentParser(description="CPU seconds against a hand-written loop")
    parser.add_argument("--pairs", type=int, default=10, help="runs of each side (default 10)")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(chosen),
        default=list(chosen),
    )
    parser.add_argument("--out", type=Path, help="JSON file; its other benchmarks' rows stay")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    keep_freed()  # as in a run
    rows: list[Row] = []
    if args.out and args.out.exists():
        report = json.loads(args.out.read_text(encoding="utf-8"))
        if report["machine"] != machine():
            raise SystemExit(f"--out {args.out}: measured on another machine ({report['machine']})")
        rows = report["rows"]
    for name in args.only:
        today = {"date": date.today().isoformat()}
        new_rows = [row | today for row in chosen[name](args.pairs)]
        rows = [row for row in rows if row["benchmark"] != name] + new_rows
        print(markdown(new_rows), file=sys.stderr)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(
                {"machine": machine(), "rows": rows},
                indent=2,
                ensure_ascii=False,
            )
            args.out.write_text(text + "\n", encoding="utf-8")
    print(f"{machine()}\n\n{markdown(rows)}")


if __name__ == "__main__":
    main(benchmarks())
