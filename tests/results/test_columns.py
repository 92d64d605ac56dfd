import json

import pytest

from fl_lightning import fit
from fl_lightning.foundation.csvtable import CsvTable
from fl_lightning.results.columns import COLUMNS, Column, CumulativeCosts, evenly_spaced


def test_a_run_folder_declares_every_column_of_its_tables(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = {
        "loggers": None,
        "callbacks": {"heatmaps": None, "progress": None, "fixedrate": {}},
        "fabric.accelerator": "cpu",
        "fabric.threads": 1,
        "data.fraction": 0.4,
        "model.hidden": [16],
        "federation": {"clients": 5, "local_epochs": 1, "rounds": 2},
        "data.held_out_clients": 0.2,
        "evaluation": {"metrics": ["f1"], "every": 2},
    }
    run = fit({"config": "kapc_exact_digits", **small})
    declared = json.loads((run.folder / "columns.json").read_text())
    headers = {name for file in run.folder.glob("*.csv") for name in CsvTable(file).header()}
    assert (
        set(declared)
        == headers
        >= {"mean_f1", "accuracy_after", "channel_s", "samples_per_class", "class_3"}
    )
    assert [name for name, column in declared.items() if not column.get("doc")] == []
    assert [key for key in run.summary if key not in COLUMNS or not COLUMNS[key].doc] == []
    judge = run.summary["judge"]
    assert (
        declared["mean_accuracy"]["model"] == judge
        and declared[f"accuracy_{judge}"]["model"] == judge
    )
    assert declared["accuracy_before"] == {
        "section": "accuracy",
        "doc": "accuracy: before local training",
        "better": "max",
        "metric": "accuracy",
        "model": "before",
        "viewed": "before",
    }


def test_a_column_is_declared_once():
    with pytest.raises(ValueError, match="accuracy_after is declared already"):
        COLUMNS.declare(Column("accuracy_after"))


def test_spread_rounds_hold_both_ends_and_are_even():
    assert evenly_spaced(3, 6) == [1, 2, 3]
    assert evenly_spaced(20, 6) == [1, 5, 9, 12, 16, 20]
    assert evenly_spaced(1000, 1) == [1000]
    assert len(set(evenly_spaced(1000, 20))) == 20
    assert evenly_spaced(1000, 20)[::19] == [1, 1000]


def test_costs_add_up_from_round_to_round():
    earlier = {"upload_bytes": 2**20, "download_bytes": 2**20, "seconds": 1.5}
    so_far = CumulativeCosts([earlier])
    assert so_far.add(earlier) == {"communication/mib_so_far": 4.0, "cost/seconds_so_far": 3.0}
    assert so_far.add({"channel_s": 2.0, "seconds": 0.5}) == {
        "communication/mib_so_far": 4.0,
        "communication/channel_s_so_far": 2.0,
        "cost/seconds_so_far": 3.5,
    }
