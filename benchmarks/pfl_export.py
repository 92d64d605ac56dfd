"""FedAvg's rows of a study as npz files, one for each seed, that other frameworks can read.

    fl-train study privacy/accuracy --data.root DATA --out studies/accuracy
    python benchmarks/pfl_export.py studies/accuracy DIR

Rows of other methods, and with `optimizer.privacy`, are left out. DIR/seed-S.npz has: samples as bytes with their mean
and standard deviation, in the order of clients (`x_train`, `y_train`, `n_train`, and the same for `test`); initial
weights (`initial/NAME`); who takes part in each round (`cohorts`); the standard normal numbers of each round's noise
(`normal/NAME`); and of each row its rate, clip, noise, epsilon and delta, the global model after the last round
(`ROW/final/NAME`) and the clients' final scores (`ROW/scores`).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

from fl_lightning.callbacks.checkpoint import restore
from fl_lightning.cli.commands import load
from fl_lightning.core.run import cohort_of
from fl_lightning.data.federated import AsRead
from fl_lightning.privacy.accounting import DELTA
from fl_lightning.results.folder import RunFolder
from fl_lightning.rng import generator
from fl_lightning.run import assemble, launch


def named(group, vector):
    """A vector's parts by the names of the model's parameters."""
    return {
        b.name: vector[..., b.start : b.stop].reshape(*vector.shape[:-1], *b.shape).numpy() for b in group.layout.blocks
    }


def task(fed):
    """What all rows of a seed share."""
    run, arrays = fed.run, {}
    read, group = AsRead.of(run.data), run.groups[0]
    assert (read.plain, len(run.groups), group.frozen) == (True, 1, {})
    for part in ("train", "test"):
        samples = [client[part] for client in read.parts]
        arrays |= {f"x_{part}": torch.cat([x for x, _ in samples]).numpy()}
        arrays |= {f"y_{part}": torch.cat([y for _, y in samples]).numpy()}
        arrays |= {f"n_{part}": np.array([len(y) for _, y in samples])}
    arrays |= {"mean": read.mean.numpy(), "std": read.std.numpy()}
    arrays |= {f"initial/{name}": value for name, value in named(group, group.initial).items()}
    rounds = range(1, run.rounds + 1)
    arrays["cohorts"] = np.array([cohort_of(run.config, t) for t in rounds])
    segments = group.layout.segments(group.down_mask)
    normal = torch.zeros(run.rounds, len(group.initial))
    for t in rounds:
        draws = generator(run.config.seed, "central privacy", t)
        for s in segments:
            normal[t - 1, s.start : s.stop] = torch.randn(s.stop - s.start, generator=draws)
    return arrays | {f"normal/{name}": value for name, value in named(group, normal).items()}


def row(fabric, config, folder, arrays):
    """Add a run to its seed's arrays."""
    fed = assemble(fabric, config, folder, [])
    restore(fed.run, folder / "checkpoints")
    name, central = folder.parent.name.replace(",", " "), config.callbacks.get("centralprivacy")
    kept = RunFolder(folder)
    summary = kept.read_summary()
    if not arrays:
        arrays |= task(fed)
    o, f = config.optimizer, config.federation
    account = central.init_args if central else {}
    assert (o.momentum, o.weight_decay, o.clip_norm, o.lr_decay) == (0, 0, None, 1), o
    facts = {
        "lr": o.lr,
        "epochs": f.local_epochs,
        "batch": f.batch_size,
        "noise": summary.get("privacy_noise_model", 0.0),
        "uploads": summary.get("privacy_uploads", 0),
        "clip": account.get("clip") or np.inf,
        "epsilon": account.get("epsilon_target") or np.inf,
        "delta": account.get("delta") or DELTA,
    }
    group = fed.run.groups[0]
    final = named(group, fed.evaluator.global_model(0).cpu())
    scores = np.array([float(client["accuracy"]) for client in kept.read("final")])
    values = facts | {"scores": scores, "last": summary["last_mean_accuracy"]}
    arrays |= {f"{name}/{k}": np.asarray(v) for k, v in values.items()}
    arrays |= {f"{name}/final/{k}": v for k, v in final.items()}
    return {}


def main():
    """Of all runs of a study."""
    study, out = map(Path, sys.argv[1:])
    out.mkdir(parents=True, exist_ok=True)
    seeds = defaultdict(list)
    for folder in sorted(study.glob("runs/*/seed-*")):
        seeds[int(folder.name.removeprefix("seed-"))].append(folder)
    for seed, folders in sorted(seeds.items()):
        arrays = {}
        for folder in folders:
            config = load(folder)
            if config.method.class_path.endswith(".FedAvg") and not config.optimizer.privacy.on:
                launch(config, row, folder, arrays)
        np.savez_compressed(out / f"seed-{seed}.npz", **arrays)
        print(f"seed {seed}: {len(arrays['n_train'])} clients", flush=True)


if __name__ == "__main__":
    main()
