"""What layer selection saves and costs: a sweep over mu as in the journal's Table 3, printed as markdown.

    uv run python benchmarks/selection.py kapc_bls_digits --mu 0.3 0.5 0.7 0.9 --out runs/selection

Whatever follows `--` is handed to `fl-train fit`. It can be stopped at any moment: a run goes on from its last
checkpoint, and finished ones are not repeated. `--table` runs nothing and prints what is there.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import numpy as np

from fl_lightning.cli import main as fl_train
from fl_lightning.results.folder import RunFolder, best

RELATIONS = {
    "step": "--method.solver step --method.start own --method.prior uniform --method.rho_units absolute"
    " --method.lam 1 --method.beta 0.01",
    "exact": "--method.solver exact --method.start server --method.prior samples --method.rho_units spread"
    " --method.lam 0.05 --method.beta 0.1",
}
"""`step`: the paper's. `exact`: rho = 1 in units of each layer's spread, where r_ii covers the whole range of mu."""
PAPER = {0.3: (387.29, 163.64, 77.79), 0.5: (380.70, 251.10, 80.01), 0.7: (380.88, 327.48, 80.02),
         0.9: (373.94, 425.58, 79.70)}  # fmt: skip
"""KAPC+BLS, Table 3: MiB up and down a round, best mean accuracy in percent, by mu; 100 clients, 10 a round."""
ALL = "all"  # layer selection left out: plain KAPC


def flags(config: str, relation: str, mu: str, out: Path, name: str, further: Sequence[str]) -> list[str]:
    """The command behind one line of the table."""
    selection = "--callbacks.layerselection null" if mu == ALL else f"--callbacks.layerselection.mu {mu}"
    quiet = "--loggers null --callbacks.heatmaps null --fabric.threads 1"
    where = ["--out", str(out), "--name", name, "--resume"]
    return ["fit", "--config", config, *shlex.split(f"{RELATIONS[relation]} {selection} {quiet}"), *where, *further]


def line(folder: Path, label: str, whole: RunFolder | None) -> str:
    """One run: Omega, bytes and their saving against `whole` (plain KAPC), own weights, accuracy."""
    run = RunFolder(folder)
    rows, clients = run.read("metrics"), run.read("clients")
    if not rows:
        return f"| {label} | no round yet |"
    up, down = (mean(r[f"{way}_parameter_bytes"] for r in rows) / 2**20 for way in ("upload", "download"))
    saved = ["", ""]
    full = next(iter(whole.read("metrics") if whole is not None else []), None)
    if full is not None:
        for k, (way, sent) in enumerate((("upload", up), ("download", down))):
            saved[k] = f" ({100 - 100 * sent * 2**20 / full[f'{way}_parameter_bytes']:.1f} % less)"
    omega = mean(c["layers_uploaded"] for c in clients)
    view = run.read_relation(int(rows[-1]["round"]))
    own = [view.rows[k, :, view.sources.index(c)].mean() for k, c in enumerate(view.receivers)]
    accuracy, at = best(rows)
    cells = [
        label, f"{omega:.2f}", f"{up:.2f}{saved[0]}", f"{down:.2f}{saved[1]}", f"{np.mean(own):.2f}",
        f"{100 * accuracy:.2f} ({at})", f"{100 * rows[-1]['mean_accuracy']:.2f}", str(len(rows)),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def table(out: Path, config: str, relations: Sequence[str], mus: Sequence[str]) -> str:
    """What there is so far."""
    head = [
        "relation, mu", "layers up", "MiB up a round", "MiB down a round", "mean r_ii at the end",
        "best accuracy (round), %", "last, %", "rounds",
    ]  # fmt: skip
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for relation in relations:
        whole = out / f"{config}-{relation}-{ALL}"
        for mu in (ALL, *mus):
            folder = out / f"{config}-{relation}-{mu}"
            if folder.exists():
                label = f"{relation}, {'no selection' if mu == ALL else mu}"
                lines.append(line(folder, label, RunFolder(whole) if whole.exists() and mu != ALL else None))
    lines += [f"| paper, {mu} | | {u} | {d} | | {a} | | |" for mu, (u, d, a) in PAPER.items()]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing, then print the table."""
    words = list(sys.argv[1:] if argv is None else argv)
    further = words[words.index("--") + 1 :] if "--" in words else []
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("config", help="a config with layer selection, such as kapc_bls_digits")
    parser.add_argument("--relation", nargs="+", choices=list(RELATIONS), default=list(RELATIONS))
    parser.add_argument("--mu", nargs="+", default=[str(mu) for mu in PAPER])
    parser.add_argument("--out", type=Path, default=Path("runs/selection"))
    parser.add_argument("--table", action="store_true", help="run nothing, print what is there")
    args = parser.parse_args(words[: words.index("--")] if "--" in words else words)
    for relation in [] if args.table else args.relation:
        for mu in (ALL, *args.mu):
            name = f"{args.config}-{relation}-{mu}"
            if (args.out / name / "summary.json").exists():
                continue
            if fl_train(flags(args.config, relation, mu, args.out, name, further)):
                raise SystemExit(f"{name} failed")
    print(table(args.out, args.config, args.relation, args.mu))


if __name__ == "__main__":
    main()
