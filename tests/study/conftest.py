"""Studies made by hand: run folders with given accuracies of clients, and the table that names
them."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from fl_lightning.foundation.csvtable import CsvTable
from fl_lightning.results.result import MIB


def write_run(
    path,
    scores,
    method="kapc",
    seed=0,
    judge="after",
    others=None,
    config=None,
    arguments=None,
):
    """A run of two rounds, the first with half of the final accuracies; 2 MiB and 3 s each.
    `others`: further kinds."""
    path.mkdir(parents=True)
    settings = {
        "seed": seed,
        "method": {"name": method, "init_args": arguments or {}},
        "model": {"name": "mlp"},
        "federation": {"rounds": 2, "clients": 4},
        "data": {"source": "digits", "alpha": 0.1},
        "evaluation": {"judge": judge},
    }
    for group, keys in (config or {}).items():
        settings[group] = settings.get(group, {}) | keys
    (path / "config.yaml").write_text(yaml.safe_dump(settings))
    kinds = {judge: scores, **(others or {})}
    metrics, clients = [], []
    for number, part in ((1, 0.5), (2, 1.0)):
        means = {f"accuracy_{kind}": part * sum(v) / len(v) for kind, v in kinds.items()}
        costs = {"upload_bytes": MIB, "download_bytes": MIB, "seconds": 3.0}
        mean = means[f"accuracy_{judge}"]
        metrics.append({"round": number, "mean_accuracy": mean, **means, **costs})
        for client in range(len(scores)):
            parts = {f"accuracy_{kind}": part * v[client] for kind, v in kinds.items()}
            clients.append({"round": number, "client": client, **parts})
    final = [{"client": client, "accuracy": score} for client, score in enumerate(scores)]
    for name, rows in (("metrics", metrics), ("clients", clients), ("final", final)):
        CsvTable(path / f"{name}.csv").write(rows)
    summary = {"rounds": 2, "judge": judge, "final_kinds": {judge: len(scores)}}
    (path / "summary.json").write_text(json.dumps(summary))
    return path


@pytest.fixture
def on_study(tmp_path, monkeypatch, fl_train):
    """Writes `study.yaml` in an empty folder and runs a line there; gives exit code, stdout and
    stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "SLURM_PROCID", "SLURM_JOB_NAME"):
        monkeypatch.delenv(name, raising=False)

    def run(line, study):
        Path("study.yaml").write_text(yaml.safe_dump(study))
        return fl_train(line)

    return run


@pytest.fixture
def make_run(tmp_path):
    return lambda name, *args, **more: write_run(tmp_path / name, *args, **more)


@pytest.fixture
def make_study(tmp_path):
    """Makes a study of cells (label, setting, seed, scores, then what `write_run` takes); scores
    None: not run yet."""

    def make(cells, name="study"):
        study, listed = tmp_path / name, []
        for label, setting, seed, scores, more in cells:
            more = {"method": label.partition(" ")[0], **more}
            judges = more.pop("judges", None) or {label: None}
            place = "_".join(map(str, setting.values())) or "all"
            folder = f"runs/{place}/{label.replace(' ', ',')}/seed-{seed}"
            if scores is not None:
                data = {key.partition(".")[2]: value for key, value in setting.items()}
                more["config"] = {"data": data, **more.get("config", {})}
                write_run(study / folder, scores, seed=seed, **more)
            for row, judge in judges.items():
                names = {"method": more["method"], "label": row, "seed": seed, "folder": folder}
                listed.append({"setting": setting, **names} | ({"judge": judge} if judge else {}))
        study.mkdir(exist_ok=True)
        (study / "study.json").write_text(json.dumps({"version": 1, "cells": listed}))
        return study

    return make
