"""All final scores of runs in one table, from the stored study."""

import json

import pandas as pd
import pytest
import stored

from fl_lightning.results.result import RunResult
from fl_lightning.results.runs import labels, load, run_folders, tidy


def test_means_are_those_of_compare(folder):
    table = tidy(load(run_folders([folder / "study"])))
    assert list(table) == ["method", "setting", "seed", "client", "model", "metric", "value"]
    assert not table[["method", "seed", "client", "model", "metric", "value"]].isna().any(axis=None)
    means = table[table.metric == "accuracy"].groupby(["method", "setting", "seed"]).value.mean()
    means = means.groupby(["method", "setting"]).mean()
    told = json.loads(stored.expected()["compare.json"])["rows"]
    rows = {(row["method"], row["setting"]): row["mean"] for row in told if row["judge"] == "after"}
    for setting in ("data.alpha=0.1", "data.alpha=0.5"):
        assert means["kapc", setting] == pytest.approx(rows["kapc", setting], abs=1e-12)


def test_an_unfinished_run_has_no_rows(folder):
    assert tidy(load([folder / "extended"])).empty
    assert isinstance(tidy([]), pd.DataFrame)


def test_runs_that_differ_in_an_argument_of_a_callback_have_labels_of_their_own():
    def run(method, **callbacks):
        config = {
            "method": {"class_path": f"fl_lightning.methods.{method}", "init_args": {}},
            "callbacks": callbacks,
        }
        one = RunResult.__new__(RunResult)
        one.config = config
        return one

    runs = [
        run("FedAvg", topk={"share": 0.05}),
        run("FedAvg", topk={"share": 1.0}),
        run("FedAvg", heatmaps={"every": 2}),
    ]
    assert labels(runs) == ["fedavg topk.share=0.05 +topk", "fedavg topk.share=1.0 +topk", "fedavg"]
    assert labels(runs[:2]) == ["fedavg topk.share=0.05", "fedavg topk.share=1.0"]
