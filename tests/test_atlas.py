"""The atlas: its studies, the merging of its cells, what its page says of them, and a tiny map of
real runs."""

from __future__ import annotations

import csv
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from fl_lightning.cli import studyfile
from fl_lightning.foundation.csvtable import as_csv

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def atlas(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("atlas")
    for name in ("atlas", "atlas_page", "atlas_rule", "atlas_agreement"):
        sys.modules.pop(name, None)


def row(**other: Any) -> dict[str, Any]:
    """A cell as the CSV has it."""
    fine = {
        "kind": "iid",
        "strength": "60",
        "samples": 48.0,
        "method": "ditto",
        "seed": 40,
        "judge": "after",
        "accuracy": 0.9,
        "alone": 0.8,
        "gain": 0.1,
        "harmed": 0.0,
        "worst_tenth": 0.7,
        "bytes": 2**20,
        "trials": 12,
        "config": "a",
        "version": "0.1.0+b",
    }
    return fine | other


def test_every_kind_has_its_study(atlas: ModuleType) -> None:
    """Three strengths, ten seeds that no trial has, the same methods."""
    files = {file.stem for file in (FOLDER.parent / "configs" / "studies" / "atlas").glob("*.yaml")}
    assert files == set(atlas.KINDS)
    studies = [studyfile.read(f"atlas/{kind}") for kind in atlas.KINDS]
    for study in studies:
        (strengths,) = study["grid"].values()
        assert len(strengths) == 3
        assert study["methods"] == studies[0]["methods"]
        assert study["seeds"] == "40-49"
        assert not {1000, *atlas.SPLITS} & set(range(40, 50))


def test_parts_merge_by_cell_and_refuse_other_code(atlas: ModuleType) -> None:
    merged = atlas.merged([row(), row(seed=41)], [row(seed=41, accuracy=0.5), row(seed=42)])
    assert [(r["seed"], r["accuracy"]) for r in merged] == [(40, 0.9), (41, 0.5), (42, 0.9)]
    assert len(atlas.merged([row()], [row(method="apfl", version="0.1.0+c", config="d")])) == 2
    for key in ("version", "config"):
        with pytest.raises(
            SystemExit, match=rf"iid, 60, ditto: {key} is .* in seed 40, other in seed 41"
        ):
            atlas.merged([row()], [row(seed=41, **{key: "other"})])


def test_the_page_counts_whole_settings_alone(atlas: ModuleType, tmp_path: Path) -> None:
    """Differences, intervals and regrets against numpy and scipy; a setting that lacks a cell is
    named."""
    page = importlib.import_module("atlas_page")
    rng = np.random.default_rng(0)
    scores = {"local": 0.8, "fedavg after": 0.82, "ditto": 0.7}
    rows = [
        row(
            kind=kind,
            strength=strength,
            method=method,
            seed=seed,
            accuracy=level + rng.normal(0, 0.01),
        )
        for kind, strength in (("iid", "20"), ("iid", "60"), ("hsu", "1.0"))
        for method, level in scores.items()
        for seed in range(40, 50)
    ]
    file = tmp_path / "iid-cells.csv"
    file.write_text(
        as_csv([r for r in rows if r["kind"] == "iid" or r["method"] != "local" or r["seed"] < 49])
    )
    read = page.read(tmp_path)
    assert read.settings == [("iid", "20"), ("iid", "60")]
    assert read.left_out == [("hsu", "1.0")]
    by_method = {
        m: 100
        * np.array([r["accuracy"] for r in rows if r["strength"] == "20" and r["method"] == m])
        for m in scores
    }
    difference = by_method["ditto"] - by_method["local"]
    low, high = page.interval(read.against("local")[0, read.methods.index("ditto")])
    expected = stats.t.interval(0.95, 9, difference.mean(), difference.std(ddof=1) / 10**0.5)
    assert np.allclose((low, high), expected)
    heat = page.heat(read, "local")
    assert [line.split(" | ")[0] for line in heat[2:]] == ["| fedavg after", "| local", "| ditto"]
    assert f"| {difference.mean():+.1f}* |" in heat[-1]
    assert page.winners(read)[2].startswith("| alike, samples: 20 | ") and page.winners(read)[
        2
    ].endswith("| 0 of 2 |")
    file.write_text(as_csv(rows[:-1]))  # Ditto's last run in the third setting failed
    read = page.read(tmp_path)
    assert len(read.settings) == 3
    assert [line.rpartition(" | ")[2] for line in page.heat(read, "local")[2:]] == [
        "+2.3* |",
        "+0.0 |",
        "– |",
    ]
    assert page.summary(read)[-1].endswith(" | 1 |")
    (best, *_) = page.summary(read)[2:]
    assert best.startswith("| fedavg after | after | 1.0 | ") and "| 0.0 | 0 | " in best


def test_what_tuning_was_worth_is_read_from_the_choices(atlas: ModuleType, tmp_path: Path) -> None:
    page = importlib.import_module("atlas_page")
    (tmp_path / "hsu-tuned.csv").write_text(
        "method,gain,warnings\nditto,0.05,\nfedper,0.2,lr lies at the edge\n"
    )
    (tmp_path / "iid-tuned.csv").write_text(
        "method,gain,warnings\nditto,0.01,lr lies at the edge\n"
    )
    assert page.tuning(tmp_path) == [
        "| method | hsu | iid | mean | choices at an edge |",
        "| --- | --- | --- | --- | --- |",
        "| fedper | 20.0 | – | 20.0 | 1 |",
        "| ditto | 5.0 | 1.0 | 3.0 | 1 |",
    ]


def test_newcomers_are_means_over_clients_and_then_seeds(
    atlas: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = importlib.import_module("atlas_page")

    def cell(label: str, *scores: float) -> SimpleNamespace:
        rows = [{"samples_per_class": n, "accuracy": s + n / 10} for s in scores for n in (0, 1)]
        return SimpleNamespace(
            method=label, run=SimpleNamespace(rows=lambda name: rows if name == "newcomers" else [])
        )

    cells = [cell("ditto", 0.5, 0.7), cell("ditto", 0.8, 0.8), cell("local", 0.1)]
    monkeypatch.setattr(
        page, "cells_of", lambda studies: (SimpleNamespace(itertuples=lambda: cells), [])
    )
    assert page.newcomers([tmp_path / "hsu"], (0, 1)) == [
        "| method | hsu, 0 | hsu, 1 |",
        "| --- | --- | --- |",
        "| ditto | 70.0 +- 10.0 | 80.0 +- 10.0 |",
        "| local | 10.0 +- nan | 20.0 +- nan |",
    ]


def test_traffic_is_counted_up_to_halfway_between_training_alone_and_the_best(
    atlas: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Halfway between 60 and 80 % is 70 %: one of two seeds gets there, in round 2, after 4 MiB."""
    page = importlib.import_module("atlas_page")

    def cell(label: str, *by_round: float) -> SimpleNamespace:
        rows = [{"mean_accuracy": accuracy} for accuracy in by_round]
        axis = lambda name: [2.0, 4.0, 6.0] if name == "mib" else [1, 2, 3]  # noqa: E731
        scores = [by_round[-1]] * 2
        run = SimpleNamespace(rows=lambda _: rows, axis=axis, config={"evaluation": {"every": 1}})
        return SimpleNamespace(method=label, column="mean_accuracy", scores=scores, run=run)

    cells = [
        cell("local", 0.5, 0.6, 0.6),
        cell("ditto", 0.6, 0.75, 0.8),
        cell("fedper", 0.5, 0.7, 0.6),
        cell("fedper", 0.5, 0.6, 0.6),
    ]
    monkeypatch.setattr(
        page, "cells_of", lambda studies: (SimpleNamespace(itertuples=lambda: cells), [])
    )
    assert page.traffic([tmp_path / "hsu"]) == [
        "| method | hsu: 70.0 % |",
        "| --- | --- |",
        "| local | – |",
        "| ditto | 4.00 |",
        "| fedper | 4.00 (1 of 2) |",
    ]
    # less than a point: no target
    cells[:] = [cell("local", 0.8, 0.8, 0.8), cell("ditto", 0.8, 0.8, 0.805)]
    assert page.traffic([tmp_path / "hsu"])[2:] == ["| local | – |", "| ditto | – |"]
    cells[0].run.config["evaluation"]["every"] = 20
    with pytest.raises(SystemExit, match="hsu: scored every 20 rounds"):
        page.traffic([tmp_path / "hsu"])


def test_the_rule_advises_for_kinds_that_it_has_not_seen(atlas: ModuleType, tmp_path: Path) -> None:
    """Where one feature decides, the tree finds it. It never advises who harms anywhere (SCAFFOLD
    here)."""
    page, rule = importlib.import_module("atlas_page"), importlib.import_module("atlas_rule")
    rng = np.random.default_rng(0)
    cells, settings = [], []
    for kind in atlas.KINDS[:6]:
        for strength in (1.0, 2.0, 3.0):
            far = strength > 2
            scores = {"local": 0.8, "fedavg after": 0.81, "ditto": 0.86, "scaffold": 0.6}
            scores |= {} if far else {"fedavg after": 0.9, "ditto": 0.82, "scaffold": 0.95}
            features = rng.uniform(size=len(atlas.FEATURES)) / 100
            features[3] += far
            settings.append(
                {"kind": kind, "strength": strength}
                | dict(zip(atlas.FEATURES, features, strict=True))
            )
            cells += [
                row(
                    kind=kind,
                    strength=strength,
                    method=m,
                    seed=seed,
                    accuracy=level + rng.normal(0, 0.001),
                )
                for m, level in scores.items()
                for seed in range(40, 50)
            ]
    (tmp_path / "iid-cells.csv").write_text(as_csv(cells))
    (tmp_path / "settings.csv").write_text(as_csv(settings))
    read = page.read(tmp_path)
    x = rule.features(read, tmp_path)
    advice = rule.left_out(read, x, leaves=5)
    names = [read.methods[k] for k in advice]
    assert names == [
        "ditto" if strength == "3.0" else "fedavg after" for _, strength in read.settings
    ]
    *_, of_advice, hindsight, unharmed, _, worse = rule.judged(read, advice)
    assert of_advice.startswith("- the advice: -1.6")
    assert re.search(r": -(5\.0|4\.9)", hindsight)
    assert re.search(r": -1\.[67]", unharmed)  # without SCAFFOLD
    assert worse.endswith(": none.")
    assert (
        rule.judged(read, np.full(len(names), read.methods.index("scaffold")))[-1].count(" 3") == 6
    )
    tree = rule.without_idle_questions(rule.grown(x, read.against("local").mean(axis=-1), 5), read)
    lines = rule.written(tree, read)
    assert lines[0].startswith("feature_shift_within <= 0.5") and "fedavg after (+10.0" in lines[1]
    rule.draw(tree, read, tmp_path / "rule.png")
    assert (tmp_path / "rule.png").stat().st_size > 1000
    deep = rule.grown(x * 0 + rng.uniform(size=x.shape), rng.normal(0, 9, size=(18, 4)), 5)
    rule.draw(deep, read, tmp_path / "deep.png")
    (tmp_path / "agreement.csv").write_text(
        as_csv([row | {"agreement": row["strength"]} for row in settings[::-1]])
    )
    assert list(rule.features(read, tmp_path, agreement=True)["agreement"]) == [
        row["strength"] for row in settings
    ]


def test_agreement_is_the_mean_cosine_of_two_clients_first_changes(
    atlas: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand for three vectors; in runs, clients with moved labels agree less than those that are
    alike."""
    agreement = importlib.import_module("atlas_agreement")
    vectors = torch.tensor([[1.0, 0.0], [1.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    gram = SimpleNamespace(total=lambda: SimpleNamespace(full=(vectors @ vectors.T)[None]))
    inputs = SimpleNamespace(gram=lambda of: gram, samples=torch.ones(3, dtype=torch.float64))
    mean = agreement.Measured()
    torch.testing.assert_close(
        mean.weights(inputs)[0, 0], torch.full((3,), 1 / 3, dtype=torch.float64)
    )
    assert mean.agreement == pytest.approx(-1 / 3)  # of 1 / sqrt 2, -1 and -1 / sqrt 2

    read = studyfile.read

    def tiny(name: str, *rest: Any) -> Any:
        content = read(name, *rest) | {"seeds": "40-41"}
        return content | {"grid": {axis: values[:1] for axis, values in content["grid"].items()}}

    monkeypatch.setattr(studyfile, "read", tiny)
    (alike,), (moved,) = ([*agreement.measured(tmp_path, kind)] for kind in ("iid", "labels"))
    assert alike["strength"] == "20" and moved["strength"] == "2"
    assert 1 > alike["agreement"] > moved["agreement"] + 0.1 > 0.1


@pytest.mark.slow
def test_a_tiny_map_comes_again_to_the_same_numbers(
    atlas: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two methods' search, map, cells, and two of them once more from what is kept beside the
    cells."""
    read = studyfile.read

    def tiny(name: str, *rest: Any) -> Any:
        content = read(name, *rest)
        if name == "atlas/iid":
            content |= {
                "methods": ["ditto"],
                "seeds": "40-41",
                "grid": {"data.samples_per_client": [20, 30, 40]},
            }
            content["base"].append(
                {"federation.rounds": 2, "federation.local_epochs": 1, "model.hidden": [8]}
            )
        return content

    monkeypatch.setattr(studyfile, "read", tiny)
    monkeypatch.setattr(atlas, "TRIALS", 2)
    monkeypatch.setattr(atlas, "ATLAS", tmp_path / "atlas")
    atlas.run(tmp_path / "runs", ["iid"], 1, [])
    atlas.keep(tmp_path / "runs")
    with (tmp_path / "atlas" / "iid-cells.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == atlas.COLUMNS
    with (tmp_path / "atlas" / "settings.csv").open(newline="") as file:
        settings = list(csv.DictReader(file))
    assert [row["strength"] for row in settings] == ["20", "30", "40"]
    assert [float(row["samples"]) for row in settings] == [16, 24, 32]  # a fifth is for validation
    assert all(0 < float(row["jensen_shannon"]) < 1 for row in settings)
    assert len(rows) == 4 * 3 * 2  # local and both of FedAvg beside Ditto
    assert all(float(r["gain"]) == float(r["accuracy"]) - float(r["alone"]) for r in rows)
    assert atlas.rerun(tmp_path / "again", 2, seed=0) == 0
    rows[0]["accuracy"] = "0.5"
    (tmp_path / "atlas" / "iid-cells.csv").write_text(as_csv(rows[:1]))
    assert atlas.rerun(tmp_path / "wrong", 1, seed=0) == 1
    kept = (tmp_path / "atlas" / "iid.yaml").read_bytes()
    # a search would end with code 1
    monkeypatch.setattr(atlas, "main", lambda words: words[0] == "tune")
    atlas.run(tmp_path / "elsewhere", ["iid"], 1, [])
    assert (tmp_path / "elsewhere" / "iid" / "map.yaml").read_bytes() == kept
    (tmp_path / "runs" / "iid" / "versions.json").write_text('{"ditto": "0.0.1+older"}')
    with pytest.raises(SystemExit, match="ditto came to other golden numbers"):
        atlas.run(tmp_path / "runs", ["iid"], 1, [])
