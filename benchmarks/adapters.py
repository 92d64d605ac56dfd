"""What clients with adapters cost: their rounds against a bare loop's over one model with the same adapters, and the
memory of few and of many of them: `uv run python benchmarks/adapters.py --out runs/adapters.json`.

Times are CPU seconds, sides in turn (measure.py). Memory is what the process has grown by over a round in which every
client trains and is kept, its data being there before; each number of clients is measured in a process of its own.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from functools import partial

from bare import STEPPERS
from measure import PeakMemory, Row, alone, compared
from speed import main, same_weights
from workloads import Workload, faster

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


def against_bare(workload: Workload, pairs: int) -> list[Row]:
    """Rounds of FedAvg over adapters, against a bare loop over the same model."""
    data = workload.noise()
    difference, fed = same_weights(workload), workload.federation(FedAvg(), data)
    seconds = workload.turns({"ours": fed, **{s: workload.bare(data, s).round for s in STEPPERS}}, pairs)
    floor, numbers = faster(seconds), sum(b.size for b in fed.run.groups[0].layout.blocks)
    note = f"noise; {numbers:,} numbers train; weights differ by {difference:.0e} after a round"
    what, bare = f"a round, {workload.clients} clients", f"bare loop ({floor})"
    return [compared(workload.name, what, seconds["ours"], bare, seconds[floor], 1, f"<= {GOAL}", note)]


def memory(clients: int) -> dict[str, float]:
    """Of a round of FedAvg in which each of so many clients takes a step and is kept (for the judge), in bytes."""
    keep_freed()  # as in a run
    workload = Workload(f"{clients} clients", MANY, NOISE, (1, 8, 8), 2 * clients, clients, 2, clients=clients)
    data, peak = workload.noise(), PeakMemory()
    fed = workload.federation(FedAvg(), data, judge="after")
    for c in range(clients):
        data.client(c)
    fed.round(1, [0])  # what the first round alone takes
    kept = len(fed.run.states)
    peak.reset()
    fed.round(2)
    grown, stays = peak.extra_mib() * 2**20, peak.kept_mib() * 2**20
    [group], new = fed.run.groups, len(fed.run.states) - kept
    frozen = sum(t.nbytes for t in group.frozen.values())
    return {
        "grown": grown, "a_client": grown / new, "stays": stays / new, "vector": group.initial.nbytes, "frozen": frozen,
    }  # fmt: skip


def in_words(clients: int, pairs: int) -> list[Row]:
    """`memory` in a process of its own, in words."""
    measured = alone(memory, clients)
    a, stays, vector, frozen = (measured[name] / 1e3 for name in ("a_client", "stays", "vector", "frozen"))
    of_client = f"{a:.1f} kB a client at most, of which {stays:.1f} stay; its vector has {vector:.1f} kB"
    note = f"{measured['grown'] / 2**20:.1f} MiB; {of_client}; frozen, once, {frozen:,.0f} kB"
    return [Row(f"memory-{clients}", f"memory of a round of {clients:,} clients", note=note, pairs=1)]


if __name__ == "__main__":
    steps = {name: partial(against_bare, workload) for name, workload in STEPS.items()}
    main(steps | {f"memory-{clients}": partial(in_words, clients) for clients in CLIENTS})
