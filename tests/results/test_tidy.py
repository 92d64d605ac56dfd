"""All final scores of runs in one table, from the stored study."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pandas as pd
import pytest

from fl_lightning.results.runs import load, run_folders, tidy

SPEC = importlib.util.spec_from_file_location("stored", Path(__file__).with_name("stored.py"))
assert SPEC is not None and SPEC.loader is not None
stored = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(stored)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stored folders, unpacked."""
    folder = tmp_path_factory.mktemp("stored")
    stored.unpacked(folder)
    return folder


def test_means_are_those_of_compare(folder: Path) -> None:
    table = tidy(load(run_folders([folder / "study"])))
    assert list(table) == ["method", "setting", "seed", "client", "model", "metric", "value"]
    assert not table[["method", "seed", "client", "model", "metric", "value"]].isna().any(axis=None)
    means = table[table.metric == "accuracy"].groupby(["method", "setting", "seed"]).value.mean()
    means = means.groupby(["method", "setting"]).mean()
    told = json.loads(stored.expected()["compare.json"])["rows"]
    rows = {(row["method"], row["setting"]): row["mean"] for row in told if row["judge"] == "after"}
    for setting in ("data.alpha=0.1", "data.alpha=0.5"):
        assert means["kapc", setting] == pytest.approx(rows["kapc", setting], abs=1e-12)


def test_an_unfinished_run_has_no_rows(folder: Path) -> None:
    assert tidy(load([folder / "extended"])).empty
    assert isinstance(tidy([]), pd.DataFrame)
