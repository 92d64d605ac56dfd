"""The picture of how-it-works.md: whom a client takes from, by the noise of its upload, in two groups of four clients.

    python benchmarks/measured_rows.py docs/images/measured-rows.png

Drawn models, not trained ones: targets of the groups are at a squared distance of 1, those within a group of `WITHIN`,
each upload is its target and noise of trace variance v in 50 numbers, and rows are those of `selfkapc` (kappa 1.5);
means over `DRAWS` draws.
"""

from __future__ import annotations

import sys

import torch

from fl_lightning.callbacks.measured import measured_rows

GROUP, NUMBERS, DRAWS, KAPPA, WITHIN = 4, 50, 200, 1.5, 0.02


def shares(v: float, draws: torch.Generator) -> list[float]:
    """Mean weight of client 0 on itself, on the others of its group, and on the other group."""
    n = 2 * GROUP
    theta = torch.zeros(n, NUMBERS, dtype=torch.float64)
    theta[GROUP:, 0] = 1
    theta[:, 1 : 1 + n] = (WITHIN / 2) ** 0.5 * torch.eye(n, dtype=torch.float64)
    total = torch.zeros(3, dtype=torch.float64)
    for _ in range(DRAWS):
        W = theta + (v / NUMBERS) ** 0.5 * torch.randn(n, NUMBERS, generator=draws, dtype=torch.float64)
        D = W - W.mean(0)
        Sigma = v * torch.eye(n, dtype=torch.float64)
        row = measured_rows((D @ D.T)[None], Sigma[None], torch.tensor([0]), KAPPA)[0, 0]
        total += torch.stack([row[0], row[1:GROUP].sum(), row[GROUP:].sum()])
    return (total / DRAWS).tolist()


if __name__ == "__main__":
    from matplotlib.figure import Figure

    draws = torch.Generator().manual_seed(0)
    noise = torch.logspace(-4, 1.5, 34).tolist()
    parts = list(zip(*(shares(v, draws) for v in noise), strict=True))
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.add_subplot()
    axes.stackplot(noise, *parts, labels=["itself", "the others of its group", "the other group"], alpha=0.8)
    axes.set(xscale="log", xlim=(noise[0], noise[-1]), ylim=(0, 1), ylabel="weight")
    axes.set_xlabel("variance of an upload's noise / squared distance of the groups")
    axes.legend(loc="lower left", fontsize=8)
    figure.savefig(sys.argv[1], dpi=110)
