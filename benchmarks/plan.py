"""What `fl-train plan` says a run takes, against what the run took: `uv run python benchmarks/plan.py`.

Peak memory is that of the process (ru_maxrss, Linux), so libraries are in it; the last column takes what a run of the
smallest model needs from both sides. Seconds are those of metrics.csv after the first round.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from measure import machine
from workloads import data_root

ROUNDS = 3
COMMON = "--loggers null --fabric.accelerator cpu --fabric.threads 1 --fabric.devices 1"
SMALLEST = "--config kapc_digits --data.fraction 0.4 --model.hidden [8] --method fedavg"


def runs(root: Path) -> dict[str, str]:
    """The words of each run."""
    cifar = f"--data.root {root / 'cifar10_10pct.npz'} --federation.participation 1 --federation.clients 10"
    mnist = f"--config kapc_mnist --data.root {root} --data.download false"
    return {
        "10 ResNet-18, KAPC, 500 images each, batches of 64": f"--config kapc_resnet18 {cifar}",
        "10 ResNet-18, FedAvg, batches of 32": f"--config kapc_resnet18 {cifar} --method fedavg"
        " --federation.batch_size 32 --data.fraction 0.2",
        "10 MNIST CNNs, KAPC, batches of 64": mnist,
        "100 tiny MLPs, 10 a round, FedAvg": "--config kapc_digits --method fedavg --federation.clients 100"
        " --federation.participation 0.1 --data.partition iid --data.min_samples 5",
    }


def predicted(words: str, constants: Path) -> dict[str, Any]:
    """The plan's numbers, with constants measured here."""
    line = [sys.executable, "-m", "fl_lightning", "plan", *words.split(), "--json", "--measure"]
    done = subprocess.run([*line, "--constants", str(constants)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measured(words: str) -> tuple[float, float]:
    """Peak MiB of the process, and seconds of a round after the first."""
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, "-m", "fl_lightning", "fit", *words.split(), "--out", folder, "--name", "run"]
        with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
            assert run.stderr is not None
            said = run.stderr.read()
            _, status, usage = os.wait4(run.pid, 0)
            run.returncode = os.waitstatus_to_exitcode(status)
        if run.returncode:
            raise SystemExit(said)
        with (Path(folder) / "run" / "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
    return usage.ru_maxrss / 1024, median(float(row["seconds"]) for row in rows[1:])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=1, help="local epochs, which change no memory (default 1)")
    args = parser.parse_args()
    common = f"{COMMON} --federation.rounds {ROUNDS} --federation.local_epochs {args.epochs}"
    with tempfile.TemporaryDirectory() as folder:
        constants = Path(folder) / "constants.json"
        least, _ = measured(f"{SMALLEST} {common}")
        base = predicted(f"{SMALLEST} {common}", constants)["total"] / 2**20
        print(f"{machine()}\nload {os.getloadavg()[0]:.1f}\n")
        print(f"the smallest run: {base:.0f} MiB planned, {least:.0f} measured\n")
        print("| run | planned, MiB | measured | error | error beyond the smallest run | seconds planned | measured |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for name, words in runs(data_root()).items():
            plan = predicted(f"{words} {common}", constants)
            peak, seconds = measured(f"{words} {common}")
            total = plan["total"] / 2**20
            own = (total - base) / (peak - least) - 1 if peak - least > 1 else 0.0
            cells = (f"{total:,.0f}", f"{peak:,.0f}", f"{total / peak - 1:+.1%}", f"{own:+.1%}")
            times = (f"{plan['round_seconds']:.3g}", f"{seconds:.3g}")
            print(f"| {' | '.join((name, *cells, *times))} |", flush=True)


if __name__ == "__main__":
    main()
