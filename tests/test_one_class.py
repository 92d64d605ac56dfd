"""Models that give every sample the same class: who is named, on the screen, in `final.csv`, report
and comparison."""

import csv
from pathlib import Path

import pytest
import torch
from lines import run_line

from fl_lightning.cli import main
from fl_lightning.lab.report import tables
from fl_lightning.methods.local import Local
from fl_lightning.results.result import RunResult

RATE, SITES = 9, ("Aarau", "Basel", "Chur", "Zug")
RARE = (
    "--data.source table --data.root t.csv --data.label_column ill --data.group_column site "
    "--data.partition natural "
    "--federation.clients 4 --model mlp --model.hidden [4] --federation.rounds 1 "
    "--fabric.accelerator cpu "
    "--loggers null --callbacks.heatmaps null --callbacks.progress null --optimizer.lr 0.01 "
    "--evaluation.metric accuracy"
)


def write_table(file):
    """45 patients of each site, of whom every ninth is ill, which nothing shows."""
    draws = torch.Generator().manual_seed(0)
    lines = ["site,a,b,ill"]
    for site in SITES:
        values = torch.randn(45, 2, generator=draws).tolist()
        lines += [f"{site},{a:.4f},{b:.4f},{int(k % RATE == 0)}" for k, (a, b) in enumerate(values)]
    file.write_text("\n".join(lines))


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_a_client_with_one_predicted_class_is_named(federation, executor, capsys):
    """The classifier's bias decides: with 1e6 on class 3 all predictions are 3. No sample is scored
    twice for it."""
    fed = federation(Local(), rounds=1, fabric={"executor": executor})
    fed.round(1)
    model = fed.run.states[2].vectors["model"]
    bias = fed.run.groups[0].layout.blocks[-1]
    model[bias.start : bias.start + bias.size][3] = 1e6
    final = fed.evaluator.everyone()
    test = fed.run.data.client(2).test
    labels = torch.cat([y for _, y in test.batches(500)])
    share = float(labels.bincount().max()) / len(labels)
    assert [row.get("largest_class_share") for row in final["final_further"]] == [
        None,
        None,
        share,
        None,
    ]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "predict one class" in line]
    assert "1 of 4 final models" in line and f"client 2 (largest class {100 * share:.1f} %)" in line


def test_a_run_its_test_its_report_and_a_comparison_say_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path / "t.csv")
    for name, method in (("alone", "local"), ("shared", "fedavg")):
        assert main(["fit", *RARE.split(), "--method", method, "--name", name]) == 0
    with Path("runs/alone/final.csv").open() as file:
        rows = list(csv.DictReader(file))
    shares = [float(row["largest_class_share"]) for row in rows]
    assert shares == pytest.approx([float(row["accuracy"]) for row in rows]) and min(shares) > 0.7
    subject = "4 of 4 final models predict one class for all of the client's test samples"
    named = ", ".join(
        f"{site} (largest class {100 * share:.1f} %)"
        for site, share in zip(SITES, shares, strict=True)
    )
    assert (
        capsys.readouterr().err.count(
            f"predictions: {subject}: client {named}; accuracy does not show it"
        )
        == 2
    )
    assert run_line("test --run runs/alone") == 0
    assert capsys.readouterr().err.count(f"predictions: {subject}") == 1
    [remark] = tables.remarks([RunResult("runs/alone")])
    assert remark.startswith(f"alone: {subject}: client {named}")
    assert run_line("compare runs/alone runs/shared --judge after") == 0
    assert "one class: some final models predict one class" in capsys.readouterr().out
