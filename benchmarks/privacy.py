"""What docs/privacy.md shows: bounds on epsilon by canaries, where epsilon is known.

    python benchmarks/privacy.py mechanism --runs 200

`mechanism`: 1,000 canaries through the noise itself, at the noise of epsilon 1, 4 and 8. Prints a
table in Markdown, line by line.
"""

from __future__ import annotations

import argparse
from statistics import mean, stdev

import torch
from scipy.stats import t

from fl_lightning.privacy.accounting import DELTA, Mechanism, calibrated, epsilon
from fl_lightning.privacy.bound import lower_bound, share_right
from fl_lightning.privacy.mechanism import Noise, noisy

CLAIMS = (1.0, 4.0, 8.0)
GUESSES = 0.2
"""As `callbacks.canaries` has it."""


def interval(values: list[float]) -> str:
    """Mean, and Student's interval of 95 % over runs."""
    if len(values) < 2:
        return f"{values[0]:.2f}"
    half = t.ppf(0.975, len(values) - 1) * stdev(values) / len(values) ** 0.5
    return f"{mean(values):.2f} ({mean(values) - half:.2f} to {mean(values) + half:.2f})"


def line(claim: float, bounds: list[float]) -> str:
    """A row: the claim, the bounds, and in how many runs they are below it."""
    below = sum(bound <= claim for bound in bounds)
    low, high = share_right(len(bounds), below)
    third = sum(bound > claim / 3 for bound in bounds)
    return (f"| {claim:g} | {interval(bounds)} | {max(bounds):.2f} | {below} of {len(bounds)} "
            f"({low:.1%} to {high:.1%}) | {third} of {len(bounds)} |")  # fmt: skip


def head() -> None:
    """Of the table of bounds."""
    print("| claimed epsilon | bound, mean (95 %) | largest | below the claim | above a third of it |")
    print("| --- | --- | --- | --- | --- |")


def mechanism(runs: int, canaries: int = 1000, numbers: int = 100) -> None:
    """Directions of `numbers` numbers, bounded and noised by `privacy.mechanism.noisy`, one message each."""
    head()
    for claim in CLAIMS:
        size = calibrated(lambda z: [Mechanism(z, 1)], claim, DELTA, "epsilon")
        assert epsilon([Mechanism(size, 1)], DELTA) <= claim * 1.001
        bounds = []
        for run in range(runs):
            draws = torch.Generator().manual_seed(run)
            coins = torch.rand(canaries, generator=draws) < 0.5
            units = torch.nn.functional.normalize(torch.randn(canaries, numbers, generator=draws), dim=1)
            sent = [noisy(10 * unit * coin, Noise(1.0, size), draws) for unit, coin in zip(units, coins, strict=True)]
            order = (torch.stack(sent) * units).sum(1).argsort()
            half = round(GUESSES * canaries / 2)
            right = int((~coins[order[:half]]).sum() + coins[order[-half:]].sum())
            bounds.append(lower_bound(canaries, 2 * half, right, DELTA))
        print(line(claim, bounds), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("mechanism",))
    parser.add_argument("--runs", type=int, default=200)
    given = parser.parse_args()
    mechanism(given.runs)
