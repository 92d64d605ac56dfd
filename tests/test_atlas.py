"""The atlas: its studies, the merging of its cells, and what its page says of them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from pandas import DataFrame
from scipy import stats

from fl_lightning.cli import main
from fl_lightning.lab.study import studyfile

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def atlas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("atlas")
    monkeypatch.setattr(module, "ATLAS", tmp_path)
    yield module
    sys.modules.pop("atlas", None)


def row(**other: Any) -> dict[str, Any]:
    """A cell as the CSV has it."""
    cell = {
        "kind": "iid",
        "strength": 60,
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
    return cell | other


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


def test_parts_merge_by_cell_and_refuse_other_code(atlas: ModuleType) -> None:
    def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> Any:
        return atlas.merged(DataFrame(old), DataFrame(new))

    rows = merged([row(), row(seed=41)], [row(seed=41, accuracy=0.5), row(seed=42)])
    assert list(rows["seed"]) == [40, 41, 42] and list(rows["accuracy"]) == [0.9, 0.5, 0.9]
    assert len(merged([row()], [row(method="apfl", version="0.1.0+c", config="d")])) == 2
    for key in ("version", "config"):
        with pytest.raises(SystemExit, match=rf"iid, 60, ditto: {key} is .* and other"):
            merged([row()], [row(seed=41, **{key: "other"})])


def test_the_page_counts_whole_settings_alone(
    atlas: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """Differences, intervals and regrets against numpy and scipy; an incomplete setting is named."""
    rng = np.random.default_rng(0)
    scores = {"local": 0.8, "fedavg after": 0.82, "ditto": 0.7}
    rows = DataFrame(
        row(kind=kind, strength=strength, method=method, seed=seed, accuracy=level + noise)
        for kind, strength in (("iid", 20), ("iid", 60), ("hsu", 1.0))
        for method, level in scores.items()
        for seed, noise in zip(range(40, 50), rng.normal(0, 0.01, 10), strict=True)
    )
    lacking = (rows["kind"] == "hsu") & (rows["method"] == "local") & (rows["seed"] == 49)
    table = atlas.by_seed(atlas.complete(rows[~lacking]))
    assert "Left out, cells are missing: Hsu's label skew, alpha 1" in capsys.readouterr().out
    assert list(table.index.droplevel("method").unique()) == [("iid", 20.0), ("iid", 60.0)]
    first = rows[(rows["kind"] == "iid") & (rows["strength"] == 20)]
    by_method = first.pivot(index="seed", columns="method", values="accuracy") * 100
    difference = by_method["ditto"] - by_method["local"]
    interval = atlas.intervals(atlas.against(table, "local")).loc[("iid", 20, "ditto")]
    expected = stats.t.interval(0.95, 9, difference.mean(), stats.sem(difference))
    assert np.allclose(interval[["low", "high"]], expected)
    heat = atlas.heat(table, "local").splitlines()
    assert [line.split(" | ")[0] for line in heat[2:]] == ["| fedavg after", "| local", "| ditto"]
    assert f"| {difference.mean():+.1f}* |" in heat[-1]
    winner = atlas.winners(table).splitlines()[2]
    assert winner.startswith("| alike, samples: 20 | ") and winner.endswith("| 0 of 2 |")
    cells = atlas.complete(rows[:-1])  # Ditto's last run in the third setting failed
    lines = atlas.heat(atlas.by_seed(cells), "local").splitlines()[2:]
    assert [line.split(" | ")[1] for line in lines] == ["+2.3*", "+0.0", "–"]
    best, *_, last = atlas.summary(cells).splitlines()[2:]
    assert best.startswith("| fedavg after | after | 1.0 | ") and "| 0.0 | 0 | " in best
    assert last.endswith(" | 1 |")


@pytest.mark.slow
def test_cells_of_a_study_are_kept_and_merged(atlas: ModuleType, tmp_path: Path) -> None:
    study = tmp_path / "iid.yaml"
    study.write_text(
        "like: atlas/iid\nbase: {federation.rounds: 2, federation.local_epochs: 1, model.hidden: [8]}"
        "\nmethods: [ditto]\nseeds: 40-41\n"
    )
    assert main(["study", str(study), "--out", str(tmp_path / "iid"), "--workers", "1"]) == 0
    atlas.keep(tmp_path)
    atlas.keep(tmp_path)
    rows = atlas.stored("iid")
    assert len(rows) == 4 * 3 * 2  # local and both of FedAvg beside Ditto
    assert list(rows["strength"].unique()) == [20, 60, 140]
    assert np.allclose(rows["gain"], rows["accuracy"] - rows["alone"])
    assert list(rows["samples"].unique()) == [16, 48, 112]  # a fifth is for validation
