"""What simulated attackers do to FedAvg, and what the defences are worth: digits, 10 clients, 2 of them attack.

    python benchmarks/attackers.py --seeds 3

prints the tables of docs/reliability-clients.md: the final accuracy of the global model in %, mean over clients and
seeds, in brackets that of the worst seed; `diverged` where a model left the finite numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shlex
import tempfile
from pathlib import Path
from statistics import mean

from fl_lightning.cli import main

RUN = """fit --method fedavg --model mlp --model.hidden [64,32] --federation.clients 10 --federation.rounds 20
--federation.local_epochs 2 --federation.batch_size 16 --optimizer.lr 0.05 --evaluation.every 20
--fabric.accelerator cpu --fabric.threads 1 --callbacks.heatmaps null --callbacks.progress null
--callbacks.checkpoint null"""
DATA = {"iid": "--data.partition iid", "Dirichlet(1)": "--data.alpha 1"}
ATTACKS = {
    "none": "",
    "sign flip, scale 5": "--callbacks.attack.kind sign_flip --callbacks.attack.scale 5",
    "noise, scale 20": "--callbacks.attack.kind noise --callbacks.attack.scale 20",
    "label flip": "--callbacks.attack.kind label_flip",
}
DEFENCES = {
    "mean": "",
    "trimmed mean 0.2": "--callbacks.trimmedmean.share 0.2",
    "median": "--callbacks.median {}",
    "Krum": "--callbacks.krum.attackers 2",
    "Multi-Krum 6": "--callbacks.krum.attackers 2 --callbacks.krum.keep 6",
    "norm bound 1": "--callbacks.normbound.bound 1",
}


def accuracy(data: str, attack: str, defence: str, seed: int) -> float | None:
    """The final accuracy of one run in %; None if the model left the finite numbers."""
    attackers = f"{attack} --callbacks.attack.clients [0,1]" if attack else ""
    output = io.StringIO()
    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        line = f"{RUN} {data} {attackers} {defence} --seed {seed} --out {out} --name a"
        code = main(shlex.split(line))
        if code == 1 and "not finite" in output.getvalue():
            return None
        if code:
            raise SystemExit(output.getvalue())
        return 100 * float(json.loads(Path(out, "a", "summary.json").read_text())["final_mean_accuracy"])


def table(data: str, attacks: list[str], seeds: int) -> None:
    """Attacks by defences."""
    print(f"\n| {data} | {' | '.join(DEFENCES)} |\n|{' --- |' * (1 + len(DEFENCES))}")
    for attack in attacks:
        cells = []
        for defence in DEFENCES.values():
            accuracies = [accuracy(DATA[data], ATTACKS[attack], defence, seed) for seed in range(seeds)]
            kept = [a for a in accuracies if a is not None]
            cells.append(f"{mean(kept):.1f} ({min(kept):.1f})" if len(kept) == len(accuracies) else "diverged")
        print(f"| {attack} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    given = parser.parse_args()
    for name in given.data:
        table(name, given.attacks, given.seeds)
