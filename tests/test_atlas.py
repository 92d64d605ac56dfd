"""The atlas: its studies, the merging of its cells, and what its page says of them."""

import importlib
import sys
from pathlib import Path

import pytest
from pandas import DataFrame

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def atlas(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("atlas")
    monkeypatch.setattr(module, "ATLAS", tmp_path)
    yield module
    sys.modules.pop("atlas", None)


def row(**other):
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


def test_parts_merge_by_cell_and_refuse_other_code(atlas):
    def merged(old, new):
        return atlas.merged(DataFrame(old), DataFrame(new))

    rows = merged([row(), row(seed=41)], [row(seed=41, accuracy=0.5), row(seed=42)])
    assert list(rows["seed"]) == [40, 41, 42] and list(rows["accuracy"]) == [0.9, 0.5, 0.9]
    assert len(merged([row()], [row(method="apfl", version="0.1.0+c", config="d")])) == 2
    for key in ("version", "config"):
        with pytest.raises(SystemExit, match=rf"iid, 60, ditto: {key} is .* and other"):
            merged([row()], [row(seed=41, **{key: "other"})])
