"""What clients with adapters cost: their rounds against a bare loop's over one model with the same adapters, and the
memory of few and of many of them: `uv run python benchmarks/adapters.py --out runs/adapters.json`.

Times are CPU seconds, sides in turn (measure.py). Memory is what the process has grown by over a round in which every
client trains and is kept, its data being there before; each number of clients is measured in a process of its own.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from datetime import date
from functools import partial
from pathlib import Path

import torch
from bare import BareFedAvg
from measure import PeakMemory, Row, compared, interleaved, machine, table
from speed import STEPPERS, Rounds, plain_round, same_weights
from workloads import Workload

from fl_lightning.components import Network
from fl_lightning.config import DataConfig
from fl_lightning.heap import keep_freed
from fl_lightning.methods.fedavg import FedAvg

VIT, NOISE = "fl_lightning.models.vit.ViT", DataConfig(source="arrays")
RANK_4 = {"rank": 4}
"""With ViT's own width and depth: 12,288 numbers, and a classifier of 1,290."""
GOAL = 1.2
STEPS = {
    "vit-adapters-32px": Workload(
        "vit-adapters-32px", Network(VIT, {}, adapters=RANK_4), NOISE, (3, 32, 32), 64, 16, 16, clients=2, goal=GOAL
    ),
    "vit-adapters-8px": Workload(
        "vit-adapters-8px", Network(VIT, {}, adapters=RANK_4), NOISE, (1, 8, 8), 512, 40, 16, clients=4, goal=GOAL
    ),
}
CLIENTS = (10, 10_000)
MANY = Network("fl_lightning.models.mlp.MLP", {"hidden": [256, 256]}, adapters={"rank": 8})
"""Whose memory is measured: a cheap step, for 10,000 clients; adapters and classifier have 9,226 numbers."""


def against_bare(workload: Workload, pairs: int) -> Row:
    """Rounds of FedAvg over adapters, against a bare loop over the same model."""
    data = workload.noise()
    difference = same_weights(workload)
    with tempfile.TemporaryDirectory() as folder:
        fed = workload.federation(FedAvg(), data, Path(folder))
        floors = {s: BareFedAvg(workload.config(), data, workload.initial(data), s) for s in STEPPERS}
        sides = {"ours": Rounds(partial(plain_round, fed), 1)}
        sides |= {s: Rounds(bare.round, 1) for s, bare in floors.items()}
        seconds = interleaved(sides, pairs)
    floor = min(STEPPERS, key=lambda s: sum(seconds[s]))
    numbers = sum(b.size for b in fed.run.groups[0].layout.blocks)
    note = f"noise; {numbers:,} numbers train; weights differ by {difference:.0e} after a round"
    what = f"a round, {workload.clients} clients"
    against = f"bare loop ({floor})"
    row = compared(workload.name, what, seconds["ours"], against, seconds[floor], 1, f"<= {GOAL}", note)
    row.pairs, row.date = pairs, date.today().isoformat()
    return row


def memory(clients: int) -> dict[str, float]:
    """Of a round of FedAvg in which each of so many clients takes a step and is kept (for the judge), in bytes."""
    name = f"{clients} clients"
    workload = Workload(name, MANY, NOISE, (1, 8, 8), 2 * clients, clients, 2, clients=clients)
    data, peak = workload.noise(), PeakMemory()
    with tempfile.TemporaryDirectory() as folder:
        fed = workload.federation(FedAvg(), data, Path(folder), judge="after")
        for c in range(clients):
            data.client(c)
        fed.round(1, [0])  # what the first round alone takes
        kept = len(fed.run.states)
        peak.reset()
        fed.round(2)
        grown, stays = peak.extra_mib() * 2**20, peak.kept_mib() * 2**20
        [group] = fed.run.groups
        frozen = sum(t.nbytes for t in group.frozen.values())
        new = len(fed.run.states) - kept
        return {"clients": clients, "grown": grown, "a_client": grown / new, "stays": stays / new,
                "vector": group.initial.nbytes, "frozen": frozen}  # fmt: skip


def measured(clients: int) -> dict[str, float]:
    """The same in a process of its own."""
    words = [sys.executable, __file__, "--memory", str(clients)]
    answer = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    peaks: dict[str, float] = json.loads(answer.splitlines()[-1])
    return peaks


def memory_table(peaks: list[dict[str, float]]) -> str:
    """Markdown."""
    lines = ["| clients | MiB of a round | kB a client, at most | kB that stay | kB of its vector | frozen, once, kB |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for f in peaks:
        a, stays, v, frozen = (f[name] / 1e3 for name in ("a_client", "stays", "vector", "frozen"))
        cells = f"{f['clients']:,} | {f['grown'] / 2**20:.1f} | {a:.1f} | {stays:.1f} | {v:.1f} | {frozen:,.0f}"
        lines.append(f"| {cells} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--clients", type=int, nargs="*", default=list(CLIENTS))
    parser.add_argument("--only", nargs="*", default=list(STEPS))
    parser.add_argument("--memory", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    keep_freed()
    if args.memory:
        print(json.dumps(memory(args.memory)))
        return
    print(machine())
    rows = [against_bare(STEPS[name], args.pairs) for name in args.only]
    print(table(rows))
    peaks = [measured(clients) for clients in args.clients]
    print(memory_table(peaks))
    if args.out is not None:
        kept = {"machine": machine(), "steps": [asdict(row) for row in rows], "memory": peaks}
        args.out.write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    main()
