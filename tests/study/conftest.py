"""Studies made by hand: run folders with given accuracies of clients, and the table that names
them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_lightning.results.result import MIB

MakeRun = Callable[..., Path]


def write_run(
    path,
    scores,
    method="kapc",
    seed=0,
    judge="after",
    others=None,
    ended=True,
    config=None,
    arguments=None,
    configured=None,
):
    """A run of two rounds, the first with half of the final accuracies; 2 MiB and 3 s each.
    `others`: further kinds; `configured`: the judge of its configuration, where that is not
    `judge`."""
    path.mkdir(parents=True)
    settings: dict[str, Any] = {
        "seed": seed,
        "method": {"name": method, "init_args": arguments or {}},
        "model": {"name": "mlp"},
        "federation": {"rounds": 2, "clients": 4},
        "data": {"source": "digits", "alpha": 0.1},
        "evaluation": {"judge": configured or judge},
    }
    for group, keys in (config or {}).items():
        settings[group] = settings.get(group, {}) | keys
    (path / "config.yaml").write_text(yaml.safe_dump(settings))
    kinds = {judge: scores, **(others or {})}
    heads = [f"accuracy_{kind}" for kind in kinds]
    metrics, clients = (
        [["round", "mean_accuracy", *heads, "upload_bytes", "download_bytes", "seconds"]],
        [],
    )
    for number, part in ((1, 0.5), (2, 1.0)):
        means = [part * sum(values) / len(values) for values in kinds.values()]
        metrics.append([number, means[0], *means, MIB, MIB, 3.0])
        clients += [
            [number, c, *(part * values[c] for values in kinds.values())]
            for c in range(len(scores))
        ]
    write_csv(path / "metrics.csv", metrics)
    write_csv(path / "clients.csv", [["round", "client", *heads], *clients])
    if ended:
        write_csv(
            path / "final.csv",
            [["client", "accuracy"], *([c, score] for c, score in enumerate(scores))],
        )
        (path / "summary.json").write_text(
            json.dumps({"rounds": 2, "judge": judge, "final_kinds": {judge: len(scores)}})
        )
    return path


def write_csv(path, rows):
    path.write_text("".join(",".join(map(str, row)) + "\n" for row in rows))


@pytest.fixture
def make_run(tmp_path):
    return lambda name, *args, **more: write_run(tmp_path / name, *args, **more)


@pytest.fixture
def make_study(tmp_path):
    """Makes a study of cells (label, setting, seed, scores, then what `write_run` takes); scores
    None: not run yet."""

    def make(cells, name="study"):
        listed = []
        for label, setting, seed, scores, more in cells:
            more = {"method": label.partition(" ")[0], **more}
            judges = more.pop("judges", None)
            folder = f"runs/{'_'.join(map(str, setting.values())) or 'all'}/{label.replace(' ', ',')}/seed-{seed}"
            if scores is not None:
                more["config"] = {
                    "data": {key.partition(".")[2]: value for key, value in setting.items()},
                    **more.get("config", {}),
                }
                write_run(tmp_path / name / folder, scores, seed=seed, **more)
            cell = {
                "setting": setting,
                "method": more["method"],
                "label": label,
                "seed": seed,
                "folder": folder,
            }
            listed += [
                cell | {"label": own, "judge": judge} for own, judge in (judges or {}).items()
            ] or [cell]
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "study.json").write_text(json.dumps({"version": 1, "cells": listed}))
        return tmp_path / name

    return make
