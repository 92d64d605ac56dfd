from __future__ import annotations

import json
from pathlib import Path

import pytest

from fl_lightning import fit
from fl_lightning.foundation.csvtable import CsvTable
from fl_lightning.foundation.metric import BY_TASK
from fl_lightning.results.columns import COLUMNS, Column, CumulativeCosts, in_summary, shown, spread


@pytest.mark.parametrize(
    ("column", "name", "kept"),
    [
        ("mean_accuracy", "accuracy/own_judge_mean", "max,last"),
        ("weighted_mae", "mae/own_judge_weighted", "min,last"),
        ("validation_accuracy", "accuracy/own_judge_validation", "max,last"),
        ("worst_accuracy", "fairness/own_judge_worst_accuracy", "max,last"),
        ("std_mae", "fairness/own_judge_std_mae", "min,last"),
        ("std_accuracy", "fairness/own_judge_std_accuracy", "min,last"),
        ("accuracy_after", "accuracy/after", "max,last"),
        ("mae_before", "mae/before", "min,last"),
        ("global_test_accuracy_global", "accuracy/global_test_global", "max,last"),
        ("f1_after", "f1/after", "max,last"),
        ("mean_f1", "f1/own_judge_mean", "max,last"),
        ("clients_f1", "f1/own_judge_clients", "last"),
        ("mean_calibration", "calibration/own_judge_mean", "min,last"),
        ("mean_balanced_accuracy", "balanced_accuracy/own_judge_mean", "max,last"),
        ("balanced_accuracy_global", "balanced_accuracy/global", "max,last"),
        (
            "global_test_class_share_accuracy_after",
            "class_share_accuracy/global_test_after",
            "max,last",
        ),
        ("ones_own_after", "scores/ones_own_after", "last"),
        ("upload_parameter_bytes", "communication/upload_parameter_bytes", "last"),
        ("channel_s", "communication/channel_s", "last"),
        ("seconds", "cost/seconds", "last"),
        ("memory_mib", "cost/memory_mib", "last"),
        ("flops_server", "cost/flops_server", "last"),
        ("train_loss", "training/train_loss", "min,last"),
        ("gradient_norm_relation", "training/gradient_norm_relation", "min,last"),
        ("clients_failed", "clients/clients_failed", "last"),
        ("something_of_ones_own", "other/something_of_ones_own", "last"),
    ],
)
def test_columns_stand_in_sections(column: str, name: str, kept: str) -> None:
    assert (shown(column), COLUMNS[column].kept) == (name, kept)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("best_mean_accuracy", "final/own_judge_best_mean_accuracy"),
        ("mean_best_mae", "final/own_judge_mean_best_mae"),
        ("final_worst_accuracy", "final/own_judge_final_worst_accuracy"),
        ("final_mean_f1", "final/own_judge_final_mean_f1"),
        ("newcomer_mean_f1_5", "newcomers/newcomer_mean_f1_5"),
        ("final_clients_auroc", "final/own_judge_final_clients_auroc"),
        ("best_accuracy_after", "final/best_accuracy_after"),
        ("total_upload_bytes", "communication/total_upload_bytes"),
        ("total_channel_s", "communication/total_channel_s"),
        ("wall_seconds", "cost/wall_seconds"),
        ("privacy_epsilon", "privacy/epsilon"),
        ("method", "run/method"),
    ],
)
def test_keys_of_the_end_stand_in_sections(key: str, name: str) -> None:
    assert in_summary(key) == name


def test_what_a_runs_own_judge_says_can_be_told_from_what_can_be_compared() -> None:
    for metric in BY_TASK.values():
        own = [metric.of(what) for what in ("mean", "worst", "std", "weighted", "validation")]
        assert all("/own_judge_" in shown(column) for column in own)
        assert not any(
            "own_judge" in shown(metric.by(kind))
            for kind in ("before", "after", "global", "finetuned")
        )


def test_a_run_folder_declares_every_column_of_its_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_column_is_declared_once() -> None:
    with pytest.raises(ValueError, match="accuracy_after is declared already"):
        COLUMNS.declare(Column("accuracy_after"))


def test_spread_rounds_hold_both_ends_and_are_even() -> None:
    assert spread(3, 6) == [1, 2, 3]
    assert spread(20, 6) == [1, 5, 9, 12, 16, 20]
    assert spread(1000, 1) == [1000]
    assert len(set(spread(1000, 20))) == 20
    assert spread(1000, 20)[::19] == [1, 1000]


def test_costs_add_up_from_round_to_round() -> None:
    earlier = {"upload_bytes": 2**20, "download_bytes": 2**20, "seconds": 1.5}
    so_far = CumulativeCosts([earlier])
    assert so_far.add(earlier) == {"communication/mib_so_far": 4.0, "cost/seconds_so_far": 3.0}
    assert so_far.add({"channel_s": 2.0, "seconds": 0.5}) == {
        "communication/mib_so_far": 4.0,
        "communication/channel_s_so_far": 2.0,
        "cost/seconds_so_far": 3.5,
    }
