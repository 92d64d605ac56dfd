"""Scores of finished runs: every client's model, of each row that the run serves, on the client's
test samples."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric

from fl_lightning.callbacks.checkpoint import restore
from fl_lightning.configuration.config import Config
from fl_lightning.data import prepare
from fl_lightning.data.load import load
from fl_lightning.engine import scoring
from fl_lightning.lab.worth import FOLDS
from fl_lightning.lab.worth.scores import fingerprints, place
from fl_lightning.lab.worth.silos import Facts
from fl_lightning.results.folder import save_arrays
from fl_lightning.run import assemble, launch


def score(config: Config, folder: Path, out: Path, rows: Mapping[str, str | None]) -> None:
    """Write the scores of the finished run in `folder`.

    Args:
        config: the run's.
        folder: the run's.
        out: of `fl-train worth`.
        rows: of each row that the run serves, the kind of model, or None: the run's own judge's.
    """
    launch(config, _score, folder, out, rows)


def look(config: Config) -> Facts:
    """The silos before anything is trained.

    Raises:
        BadInput: the data are absent, malformed or too few.
    """
    source, _ = load(config.data, config.federation.clients, config.smoke)
    data = prepare(config.data, config.federation.clients, config.seed, config.smoke)
    parts = [
        prepare(config.data, config.federation.clients, seed, config.smoke) for seed in range(FOLDS)
    ]
    sizes = [sum(part.test_sizes[c] for part in parts) for c in range(data.clients)]
    # a silo of 3 tests some of them twice
    few = zip(sizes, data.train_sizes, data.test_sizes, strict=True)
    sizes = [size if size > FOLDS else min(size, train + test) for size, train, test in few]
    recordings: dict[int, int] = {}
    for pool in (source.train, source.test):
        if pool.spans is not None:
            keys = fingerprints(pool.read_all())
            recordings |= dict(zip(keys.tolist(), pool.spans[:, 0].tolist(), strict=True))
    names = data.client_names or [f"silo {c}" for c in range(data.clients)]
    counts = []
    for c in range(data.clients if recordings else 0):
        keys = np.concatenate([fingerprints(part.tested(c)[0].numpy()) for part in parts])
        counts.append(len({recordings.get(key, key) for key in keys.tolist()}))
    return Facts(names, sizes, recordings, counts)


def _score(
    fabric: Fabric, config: Config, folder: Path, out: Path, rows: Mapping[str, str | None]
) -> dict[str, Any]:
    logging.getLogger("lightning").setLevel(logging.ERROR)
    fed = assemble(fabric, config, folder, [])
    restore(fed.run, folder / "checkpoints")
    run, data, evaluator = fed.run, fed.run.data, fed.evaluator
    for label, kind in rows.items():
        mine: dict[int, dict[str, np.ndarray]] = {}
        for c in run.at_home(range(run.clients)):
            if kind == "finetuned":
                judged, (vector, buffers) = kind, evaluator.finetune(run.server.round, c)
            else:
                judged, vector, buffers = evaluator.final_model(c)
            client = evaluator.at_rest(c, buffers)
            client.ready(judged, vector)
            seen: scoring.Seen = []
            scoring.score(judged, client, client.data.test, seen)
            mine[c] = _table(seen, client.module.metric) | {
                "sample": fingerprints(data.tested(c)[0].numpy())
            }
            mine[c]["client"] = np.full(len(mine[c]["sample"]), data.numbers[c])
        parts = [part for _, part in sorted(run.processes.gather_by_client(mine).items())]
        if run.is_main:
            table = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            save_arrays(place(out, label, config.seed), **table)
    return {}


def _table(seen: scoring.Seen, metric: Any) -> dict[str, np.ndarray]:
    """Of each tested sample its label, the share of right answers or the absolute error, and the
    class scores."""
    outputs, y = (torch.cat(parts).cpu() for parts in zip(*seen, strict=True))
    classes = outputs.shape[-1]
    if classes == 1:  # a regression
        right = (outputs[:, 0].double() - y).abs()
    elif y.ndim == 1:
        right = (outputs.argmax(1) == y).double()
    else:  # texts: of each the share of its positions
        right = torch.stack(
            [metric.total(outputs[k : k + 1], y[k : k + 1], classes) for k in range(len(y))]
        ).double()
    kept = (
        outputs.float().numpy()
        if y.ndim == 1 and classes > 1
        else np.zeros((len(y), 0), np.float32)
    )
    label = y.numpy() if y.ndim == 1 and classes > 1 else np.zeros(len(y), np.int64)
    return {"label": label, "right": right.numpy(), "outputs": kept}
