"""Runs that train together against the same runs one after the other in one warm process: CPU
seconds, sides in turns.

    uv run python benchmarks/together.py                     the table, in Markdown
    uv run python benchmarks/together.py --seeds 3 --rounds 2 --pairs 1    a short one
    uv run python benchmarks/together.py --only ten-seeds tiny

Digits by class (Dirichlet 0.1), 10 clients, 20 rounds of 5 epochs, batches of 16, MLP 64-64-32-10,
one thread. The run folders are those that a study writes. The other side is what a study does with
`--together 1`: the loop. Both sides run in this process, after one run of each that does not count.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fl_lightning.configuration.config import Config
from fl_lightning.configuration.resolve import resolve
from fl_lightning.foundation.files import make_folder
from fl_lightning.lab.study.launch import QUIET, run_safely
from fl_lightning.lab.study.together import driven
from fl_lightning.run import fit
from fl_lightning.training.executors.together import Together

STACK = ("fedavg", "fedprox", "kapc", "fedper", "ditto", "local", "scaffold", "fedamp", "fedbabu")
"""Methods whose phases are the task loss with proximal and linear terms."""


def config_of(
    method: str, executor: str, rounds: int, clients: int, participation: float = 1.0
) -> Config:
    """A run on the digits, without a seed of its own."""
    own = {
        "data": {"source": "digits", "partition": "dirichlet", "alpha": 0.1},
        "method": {"name": method, "init_args": {}},
        "model": {"name": "mlp", "init_args": {"hidden": [64, 32]}},
        "federation": {
            "clients": clients,
            "rounds": rounds,
            "local_epochs": 5,
            "batch_size": 16,
            "participation": participation,
        },
        "optimizer": {"lr": 0.05},
        "fabric": {"executor": executor},
    }
    return resolve([QUIET, own])


def one_by_one(configs: Sequence[Config], folder: Path) -> None:
    """As a study with `--together 1`."""
    for k, config in enumerate(configs):
        make_folder(folder / str(k))
        fit(config, folder / str(k))


def together(configs: Sequence[Config], folder: Path) -> None:
    """As a study with `--together N`."""
    hub, left = Together(), list(enumerate(configs))
    put_together = driven(hub)

    def work(k: int, config: Config) -> str | None:
        make_folder(folder / str(k))
        return run_safely(lambda: fit(config, folder / str(k), put_together=put_together) and None)

    def more(waits: bool) -> tuple[int, Callable[[], str | None]] | None:
        if not left:
            return None
        k, config = left.pop(0)
        return k, lambda: work(k, config)

    for _, error in hub.drive(more):
        assert error is None, error


def seconds(
    work: Callable[[Sequence[Config], Path], None],
    configs: Sequence[Config],
    clock: Callable[[], float] = time.process_time,
) -> float:
    """CPU seconds of this process, or those of another `clock`."""
    with tempfile.TemporaryDirectory() as folder:
        start = clock()
        work(configs, Path(folder))
        return clock() - start


def row(
    name: str,
    sides: tuple[Sequence[Config], Sequence[Config]],
    pairs: int,
    goal: str,
    beside: bool = True,
) -> None:
    """Print a line: the medians of both sides, and of their ratios with the least and the
    greatest."""
    loop, stacked = sides
    work = together if beside else one_by_one
    seconds(one_by_one, loop[:1])
    seconds(work, stacked[:1])
    measured = []
    for k in range(pairs):
        if k % 2:
            b, a = seconds(work, stacked), seconds(one_by_one, loop)
        else:
            a, b = seconds(one_by_one, loop), seconds(work, stacked)
        measured.append((a, b, b / a))
    a, b, ratio = (statistics.median(column) for column in zip(*measured, strict=True))
    least, most = min(f[2] for f in measured), max(f[2] for f in measured)
    print(
        f"| {name} | {a:.2f} | {b:.2f} | **{ratio:.2f}** [{least:.2f}, {most:.2f}] | {goal} |",
        flush=True,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=["ten-seeds", "nine-methods", "tiny"])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    parts = given.only or ["ten-seeds", "nine-methods", "tiny"]

    def side(methods: Sequence[str], executor: str, seeds: int) -> list[Config]:
        made = [config_of(method, executor, given.rounds, 10) for method in methods]
        return [replace(config, seed=seed) for seed in range(seeds) for config in made]

    print(
        "| what | one after the other, loop, CPU s | stacked, CPU s | ratio [least, greatest] | "
        "goal |"
    )
    print("| --- | --- | --- | --- | --- |")
    if "ten-seeds" in parts:
        sides = side(["fedavg"], "loop", given.seeds), side(["fedavg"], "vmap", given.seeds)
        row(f"{given.seeds} seeds of fedavg, together", sides, given.pairs, "<= 0.2")
    if "nine-methods" in parts:
        seeds = max(1, given.seeds // 2)
        sides = side(STACK, "loop", seeds), side(STACK, "vmap", seeds)
        row(f"{len(STACK)} methods x {seeds} seeds, together", sides, given.pairs, "<= 0.25")
    if "tiny" in parts:
        pair = [[config_of("fedavg", name, given.rounds, 100, 0.1)] for name in ("loop", "vmap")]
        row(
            "10 of 100 tiny clients, one run alone",
            (pair[0], pair[1]),
            given.pairs,
            "(speed.py has the hand loop)",
            False,
        )


if __name__ == "__main__":
    main()
