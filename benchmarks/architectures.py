"""KT-pFL's setting on MNIST, scaled to a CPU: four architectures in one federation, method beside method; as markdown.

    uv run python benchmarks/architectures.py --root ../shared/data --out runs/architectures

20 clients (five of each architecture), 150 private images of two classes each, 1,000 public images a round. It can be
stopped at any moment: a run goes on from its last checkpoint, and finished ones are not repeated. `--table` runs
nothing and prints what is there.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fl_lightning.cli import main as fl_train
from fl_lightning.results.folder import RunFolder, best

KTPFL = "--method ktpfl --method.samples 1000"
METHODS = {
    "local": "--method local",
    "KT-pFL, paper": KTPFL,
    "FedMD (as in KT-pFL)": "--method fedmd --method.samples 1000 --method.loss kl",
    "Sim-pFD": "--method simpfd --method.samples 1000",
    "TopK-pFD": "--method topkpfd --method.samples 1000",
    "KT-pFL, code": f"{KTPFL} --method.update code --method.temperature 10 --method.lam 0.1",
}
SETTING = """
--config ktpfl_hetero --data.source mnist --data.partition pathological --data.client_test null
--data.fraction 0.0667 --data.test_fraction 0.2 --data.public held_back
--data.public_samples 1000 --federation.batch_size 32 --evaluation.every 5
--loggers null --callbacks.heatmaps null --fabric.threads 1 --resume
"""
"""Two classes for each client, as in the paper's second case."""
MODELS = """# ResNet-18 with ImageNet's stem: a fifth of the operations that the paper's 3x3 stem asks for
model:
  - {name: lenet, count: 5}
  - {name: alexnet, count: 5}
  - {name: resnet18, count: 5}
  - {name: shufflenetv2, count: 5}
"""


def name_of(label: str) -> str:
    """The run folder of a line."""
    return "".join(c if c.isalnum() else "-" for c in label.lower()).strip("-")


def table(out: Path) -> str:
    """What there is so far."""
    kinds = ["LeNet", "AlexNet", "ResNet-18", "ShuffleNetV2"]
    head = ["method", "best, %", "all at the end, %", *kinds, "MiB up", "rounds"]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for label in METHODS:
        run = RunFolder(out / name_of(label))
        rows = run.read("metrics")
        if not rows:
            continue
        cells = [label, f"{100 * best(rows)[0]:.2f}", *[""] * 5, "", str(int(rows[-1]["round"]))]
        if (run.path / "summary.json").exists():
            final = 100 * np.array([row["accuracy"] for row in run.read("final")]).reshape(4, -1)
            cells[2:7] = [f"{value:.2f}" for value in (final.mean(), *final.mean(1))]
            cells[7] = f"{run.read_summary()['total_upload_bytes'] / 2**20:.1f}"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--root", help="folder with MNIST")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/architectures"))
    parser.add_argument("--table", action="store_true", help="run nothing, print what is there")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    models = args.out / "models.yaml"
    models.write_text(MODELS)
    for label, flags in ({} if args.table else METHODS).items():
        name = name_of(label)
        if (args.out / name / "summary.json").exists():
            continue
        words = [
            "fit",
            *shlex.split(SETTING),
            "--config",
            str(models),
            *shlex.split(flags),
            "--out",
            str(args.out),
            "--name",
            name,
        ]
        words += ["--federation.rounds", str(args.rounds), "--federation.local_epochs", str(args.epochs)]
        words += ["--data.root", str(args.root), "--data.download", "false"]
        if fl_train(words):
            raise SystemExit(f"{label} failed")
    print(table(args.out))


if __name__ == "__main__":
    main()
