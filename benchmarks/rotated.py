"""FEDORA's setting on rotated MNIST, method beside method: accuracy, relative accuracy, positive transfer; as markdown.

    uv run python benchmarks/rotated.py --root ../shared/data --rounds 500 --out runs/rotated

It can be stopped at any moment: a run goes on from its last checkpoint, and finished ones are not repeated. `--table`
runs nothing and prints what is there.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from fl_lightning.cli import main as fl_train
from fl_lightning.runfolder import RunFolder, best

METHODS = {
    "local": "--method local",
    "FedAvg, global model": "--method fedavg",
    "FedAvg, fine-tuned": "--method fedavg --evaluation.judge finetuned",
    "pull to the mean (as Ditto)": "--method kapc --method.solver exact --method.beta 1e9 --method.lam 0.1",
    "FedAMP": "--method fedamp --method.alpha 0.02",
    "KAPC, paper": "--method kapc",
    "KAPC, recommended": "--method kapc --method.solver exact --method.prior samples --method.start server"
    " --method.lam 0.05 --method.beta 0.3 --method.rho_units spread",
    "FEDORA, paper": "--method fedora",
    "FEDORA, code": "--method fedora --method.alpha 4 --method.sharpness 10 --method.selection code",
}


def name_of(label: str) -> str:
    """The run folder of a line."""
    return "".join(c if c.isalnum() else "-" for c in label.lower()).strip("-")


def table(out: Path) -> str:
    """What there is so far."""
    head = ["method", "best, %", "round best on validation, %", "all at the end, %", "R-Acc", "PTR", "rounds"]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for label in METHODS:
        run = RunFolder(out / name_of(label))
        rows = run.read_metrics()
        if not rows:
            continue
        cells = [label, f"{100 * best(rows)[0]:.2f}", "", "", "", "", str(int(rows[-1]["round"]))]
        if (run.path / "summary.json").exists():
            summary = run.read_summary()
            cells[2] = f"{100 * summary['validation_mean_accuracy']:.2f}"
            cells[3] = f"{100 * summary['final_mean_accuracy']:.2f}"
        if (run.path / "relative.json").exists():
            relative = json.loads((run.path / "relative.json").read_text())
            cells[4:6] = [f"{relative['relative_accuracy']:+.4f}", f"{relative['positive_transfer_ratio']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--root", help="folder with MNIST")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path("runs/rotated"))
    parser.add_argument("--table", action="store_true", help="run nothing, print what is there")
    args = parser.parse_args(argv)
    for label, flags in ({} if args.table else METHODS).items():
        name = name_of(label)
        if (args.out / name / "relative.json").exists():
            continue
        words = ["fit", "--config", "fedora_rotated_mnist", *shlex.split(flags), "--out", str(args.out), "--name", name]
        words += shlex.split(
            "--loggers null --callbacks.heatmaps null --callbacks.ledger null --fabric.threads 1 --resume"
        )
        words += ["--federation.rounds", str(args.rounds), "--data.root", str(args.root), "--data.download", "false"]
        if fl_train(words) or fl_train(["relative", "--run", str(args.out / name)]):
            raise SystemExit(f"{label} failed")
    print(table(args.out))


if __name__ == "__main__":
    main()
