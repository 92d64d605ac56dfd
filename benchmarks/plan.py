"""What memory `fl-train plan` says a run takes, against what the run took: `uv run python benchmarks/plan.py`.

Peak memory is that of the process (ru_maxrss, Linux), so libraries are in it; the last column takes what a run of the
smallest model needs from both sides.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import sys
import tempfile
from pathlib import Path

from measure import command, machine
from workloads import data_root

from fl_lightning.cli.resolve import complete, plan
from fl_lightning.cli.settings import read_line
from fl_lightning.planning.plan import Planner
from fl_lightning.planning.setting import Hardware, sizes_of
from fl_lightning.results.folder import RunFolder

ROUNDS = 2
COMMON = "--loggers null --fabric.accelerator cpu --fabric.threads 1"
SMALLEST = "--config kapc_exact_digits --data.fraction 0.4 --model.hidden [8] --method fedavg"
RANKS = {"10 MLPs, KT-pFL, digits, 2 ranks": 2}
"""Of a run that has several."""

WATCHED = """
import os, subprocess, sys
run = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(run.pid, 0)
print(usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""
# A process begins with the peak of the one that starts it, so that has to be a small one.


def runs(root: Path) -> dict[str, str]:
    """The words of each run."""
    cifar = f"--data.root {root / 'cifar10_10pct.npz'} --federation.participation 1 --federation.clients 10"
    cifar += " --data.partition iid --data.fraction 0.128"
    mnist = f"--config kapc_mnist --data.root {root} --data.download false --federation.batch_size 64"
    mnist += " --data.partition dirichlet"  # as when the plan's constants were set
    return {
        "10 ResNet-18, KAPC, 64 images each, a batch": f"--config kapc_resnet18 {cifar}",
        "10 ResNet-18, FedAvg, batches of 32": f"--config kapc_resnet18 {cifar} --method fedavg"
        " --federation.batch_size 32",
        "10 MNIST CNNs, KAPC, batches of 64": mnist,
        "100 tiny MLPs, 10 a round, FedAvg": "--config kapc_exact_digits --method fedavg --federation.clients 100"
        " --federation.participation 0.1 --data.partition iid --data.min_samples 5",
        # No constant of the plan was set by what follows.
        "20 AlexNets, FedPer, kept Adam": f"--config kapc_resnet18 {cifar} --method fedper --model alexnet"
        " --federation.clients 20 --federation.batch_size 32 --optimizer.name adam --optimizer.keep_state true",
        "40 MLPs of 1.1 million, FedAMP": f"{mnist} --method fedamp --method.alpha 0.02 --model mlp"
        " --model.hidden [1000,300] --federation.clients 40 --data.partition iid --data.min_samples 5",
        "10 MNIST CNNs, FedAvg, vmap": f"{mnist} --method fedavg --fabric.executor vmap --federation.batch_size 32",
        "30 LeNets, KAPC, layer selection": f"--config kapc_resnet18 {cifar} --model lenet --federation.clients 30"
        " --callbacks layerselection --federation.batch_size 64",
        # Nothing at all was tuned on what follows.
        "10 MLPs, FedHKD, digits": "--config fedhkd_digits",
        "10 MNIST CNNs, FedPer": f"{mnist} --method fedper",
        "10 MLPs, KT-pFL, digits, 2 ranks": "--config ktpfl_digits",
    }


def predicted(words: str, ranks: int = 1) -> float:
    """MiB at the peak, by the plan."""
    config = complete(plan(read_line(words.split()).layers))
    return Planner(config, sizes_of(config, 500)).plan(Hardware("cpu", 1, ranks, 2.0**36)).total / 2**20


def measured(words: str, ranks: int = 1) -> float:
    """Peak MiB of the process (of one rank)."""
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, "-m", "fl_lightning", "fit", *words.split(), "--fabric.devices", str(ranks)]
        line += ["--out", folder, "--name", "run"]
        printed = command(sys.executable, "-c", WATCHED, *line)
        rows = RunFolder(Path(folder) / "run").read("metrics")
    return int(printed.split()[-1]) / 1024 if ranks == 1 else rows[-1]["memory_mib"] / ranks


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", type=int, default=[], metavar="K", help="runs, by number from 0")
    args = parser.parse_args()
    common = f"{COMMON} --federation.rounds {ROUNDS} --federation.local_epochs 1"
    base = predicted(f"{SMALLEST} {common}")
    least = measured(f"{SMALLEST} {common}")
    print(f"{machine()}\nload {os.getloadavg()[0]:.1f}\n")
    print(f"the smallest run: {base:.0f} MiB planned, {least:.0f} measured\n")
    print("| run | planned, MiB | measured | error | beyond the smallest run |\n" + "| --- " * 5 + "|", flush=True)
    for k, (name, words) in enumerate(runs(data_root()).items()):
        if args.only and k not in args.only:
            continue
        ranks = RANKS.get(name, 1)
        total, peak = (of(f"{words} {common}", ranks) for of in (predicted, measured))
        own = f"{(total - base) - (peak - least):+,.0f} MiB of {peak - least:,.0f}"
        print(f"| {name} | {total:,.0f} | {peak:,.0f} | {total / peak - 1:+.1%} | {own} |", flush=True)


if __name__ == "__main__":
    main()
