"""An exported model predicts raw rows as the run scored it, in a process that cannot import this
package."""

import csv
import os
import re
import runpy
import subprocess
import sys
from unittest.mock import patch

import numpy as np
import pytest
import torch
from lines import run_line

from fl_lightning import Run
from fl_lightning.cli import main
from fl_lightning.configuration import catalogue
from fl_lightning.configuration.config import DataConfig
from fl_lightning.configuration.tables import form_of
from fl_lightning.data import prepare
from fl_lightning.exporting import plain
from fl_lightning.exporting.source import standalone
from fl_lightning.results.opening import config_of

QUICK = (
    "--federation.rounds 2 --federation.local_epochs 2 --loggers null --callbacks.heatmaps null "
    "--method fedper --evaluation.predictions true"
)
TURNED = "--data.partition iid --data.planted rotation --data.groups 3 --data.drift_every 1"


def predicted(folder, module, rows):
    """What the exported file says of raw rows where this package cannot be imported."""
    ours = [name for name in sys.modules if name.partition(".")[0] == "fl_lightning"]
    with patch.dict(sys.modules, dict.fromkeys(ours)):
        return list(runpy.run_path(str(folder / f"{module}.py"))["predict"](rows))


def trained(folder, flags):
    assert main(["fit", *f"{flags} {QUICK} --out {folder} --name run".split()]) == 0
    return Run(folder / "run")


def exported(folder, client, form="safetensors"):
    out = (
        folder
        / f"m_{form}{ {'safetensors': '.safetensors', 'torch_export': '.pt2', 'onnx': '.onnx'}[form] }"
    )
    flags = ["--run", str(folder / "run"), "--client", client, "--out", str(out), "--format", form]
    assert main(["export", *flags]) == 0
    return out.stem


def check_answers(run, name, answers):
    """Of a client's test samples as many are right as in the run. `answers`: to all rows."""
    tested = run.predictions[run.predictions["name"] == name]
    right = np.array(answers)[tested.row.to_numpy()] == tested.label.to_numpy()
    (client,) = set(tested.client)
    assert right.mean() == pytest.approx(run.final_accuracies[client], abs=1e-6)


SITES = ("Aarau", "Basel", "Chur")


def hospitals(folder):
    rng = np.random.default_rng(0)
    rows = []
    for number in range(180):
        dose = rng.normal(3, 2)
        age = "" if rng.random() < 0.2 else f"{rng.normal(60, 9):.0f}"
        outcome = "übel" if dose + rng.normal() > 3 else "wöhl"
        rows.append(
            {
                "site": SITES[number % 3],
                "age": age,
                "dose": f"{dose:.3f}",
                "sex": rng.choice(["f", "m"]),
                "out": outcome,
            }
        )
    with (folder / "t.csv").open("w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, rows[0])
        out.writeheader()
        out.writerows(rows)
    keys = (
        "--data.label_column out --data.group_column site --data.partition natural "
        "--federation.clients 3"
    )
    return f"--data.root {folder}/t.csv {keys} --data.one_hot [sex] --data.impute median", rows


@pytest.mark.slow
@pytest.mark.parametrize(
    "form, flags",
    [
        ("safetensors", "--data.scale robust --data.fitted own"),
        ("safetensors", ""),
        ("torch_export", "--data.scale minmax"),
        ("torch_export", "--fabric.precision 64-true"),
    ],
)
def test_a_tables_rows(tmp_path, form, flags):
    """Also where the exported file is a command."""
    table, rows = hospitals(tmp_path)
    run = trained(tmp_path, f"{table} {flags} --data.folds 3 --model mlp")
    module = exported(tmp_path, "Basel", form)
    answers = predicted(tmp_path, module, rows)
    check_answers(run, "Basel", answers)
    assert set(answers) <= {"übel", "wöhl"}
    words = [sys.executable, f"{module}.py", "t.csv"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == answers


SMALL_CNN = "--model cnn --model.padding 2"


@pytest.mark.parametrize(
    "flags, form",
    [
        pytest.param(SMALL_CNN, "safetensors", marks=pytest.mark.slow),
        pytest.param(SMALL_CNN, "torch_export", marks=pytest.mark.slow),
        pytest.param("--model mlp", "onnx", marks=pytest.mark.slow),
        pytest.param("--model mlp --data.partition rotated", "safetensors", marks=pytest.mark.slow),
        (f"--model mlp {TURNED}", "safetensors"),
    ],
)
def test_images(tmp_path, flags, form):
    """Samples are as the data source had them, also where the run turned them and clients change
    groups."""
    if form == "onnx":
        pytest.importorskip("onnxscript")
    run = trained(tmp_path, f"{flags} --federation.clients 5 --data.fraction 0.4")
    module = exported(tmp_path, "3", form)
    data = prepare(config_of(run.folder).data, 5, 0)
    raw, labels = data.raw_samples(3)[1], data.client(3).test.tensors[1]
    answers = predicted(tmp_path, module, raw.tolist())
    right = np.mean(np.array(answers) == labels.numpy().astype(str))
    assert right == pytest.approx(run.final["accuracy"][3], abs=1e-6)
    assert run.predict(3, raw.numpy()).tolist() == answers
    # without an axis for the one channel
    assert predicted(tmp_path, module, raw[:, 0].tolist()) == answers


def test_texts(tmp_path):
    rng = np.random.default_rng(0)
    lines = ["site,review,mood"]
    for number in range(120):
        mood = ["poor", "good"][int(rng.random() < 0.5)]
        lines.append(
            f"{SITES[number % 3]},a {mood if rng.random() < 0.8 else 'plain'} film no "
            f"{number},{mood}"
        )
    (tmp_path / "r.csv").write_text("\n".join(lines))
    keys = (
        "--data.columns [review] --data.tokens characters --data.length 24 --data.label_column mood"
    )
    natural = (
        "--data.group_column site --data.partition natural --federation.clients 3 "
        "--data.client_test 0.3"
    )
    run = trained(
        tmp_path,
        f"--data.root {tmp_path}/r.csv {keys} {natural} --model textcnn --model.embedding 16",
    )
    texts = [line.split(",")[1] for line in lines[1:]]
    check_answers(run, "Chur", predicted(tmp_path, exported(tmp_path, "Chur"), texts))


@pytest.mark.parametrize("name", sorted(catalogue.table("models")))
def test_every_shipped_architecture_has_lines_of_its_own(name):
    text = standalone(catalogue.table("models")[name].class_path)
    assert text is not None and "fl_lightning" not in text
    compile("from __future__ import annotations\n" + text, name, "exec")


@pytest.mark.parametrize(
    "kind, rows, line",
    [
        ("table", [{"age": "3"}], "it lacks the column sex"),
        ("table", [["3"]], "it lacks the column sex"),
        ("table", [{"age": "old", "sex": "f"}], "'old' in the column age is no number"),
        (
            "table",
            [{"age": "3", "sex": "x"}],
            "'x' in the column sex is not one of its values: f, m",
        ),
        ("vectors", [[1.0, 2.0]], r"a sample has the shape \[2\], and the model's have \[3\]"),
        ("text", [[1, 2, 3, 4]], r"a sample has the shape \[4\], and the model's have \[3\]"),
    ],
)
def test_rows_that_cannot_be_read_are_named(kind, rows, line):
    about = {
        "input": kind,
        "shape": [3],
        "columns": [["age", None], ["sex", ["f", "m"]]],
        "tokens": {},
        **form_of(DataConfig()),
    }
    with pytest.raises(ValueError, match=line):
        plain.raw(about, rows)


@pytest.mark.parametrize("scale", [None, [2.0, 1.0]])
@pytest.mark.parametrize("cell", ["", "inf", "1e60"])
def test_cells_that_training_would_have_refused_get_no_answer(cell, scale):
    columns = [["age", None], ["stage", ["1", "2", "3"]]]
    about = {
        "input": "table",
        "shape": [4],
        "columns": columns,
        "mean": [0.0] * 4,
        "std": [1.0] * 4,
        **form_of(DataConfig()),
    }
    about |= {"scale": scale and [[0.0] * 4, [1.0] * 4, [2.0] * 4, [1.0] * 4], "empty": None}
    with pytest.raises(
        ValueError,
        match="a number is not finite, or a cell is empty and the model was trained without",
    ):
        plain.inputs(about, [{"age": cell, "stage": "3"}])
    same = [plain.inputs(about, [{"age": 5, "stage": stage}]) for stage in (3, 3.0, "3", " 3")]
    assert same[0][0, 3] == (3.0 if scale else 1.0) and all(torch.equal(x, same[0]) for x in same)
    if cell == "":
        filled = plain.inputs(
            about | {"empty": [5.0, 0.0, 0.0, 0.0]}, [{"age": cell, "stage": "3"}]
        )
        assert torch.equal(filled, same[0])


STRANGE = """
import torch

class Strange(torch.nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.out = torch.nn.Linear(64, num_classes)

    def forward(self, x):
        return self.out(x.flatten(1)) + (1 if float(x.sum()) > 0 else 0)
"""


@pytest.mark.slow
def test_a_model_that_torch_refuses_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "strange.py").write_text(STRANGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    trained(tmp_path, "--model strange.Strange --federation.clients 5 --data.fraction 0.4")
    capsys.readouterr()
    words = "export --run run --client 0 --out m.pt2 --format torch_export"
    assert run_line(words) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "format='torch_export': torch cannot export this model" in line
    assert not (tmp_path / "m.pt2").exists() and not (tmp_path / "m.py").exists()


def test_what_cannot_be_exported_is_one_line(tmp_path, capsys, monkeypatch):
    flags, _ = hospitals(tmp_path)
    trained(tmp_path, f"{flags} --data.scale sklearn.preprocessing.PowerTransformer --model mlp")
    capsys.readouterr()

    out = ["--run", str(tmp_path / "run"), "--out", f"{tmp_path}/m.safetensors", "--client"]
    for client, line in (
        ("0", "data.scale='sklearn.preprocessing.PowerTransformer': an exported file"),
        ("Basle", "client='Basle'.*must lie in .0, 2., or be a name: Basel, Aarau, Chur"),
    ):
        assert main(["export", *out, client]) == 2
        assert re.search(line, capsys.readouterr().err)


SCRIPT = """
import torch
import fl_lightning

class Net(torch.nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.out = torch.nn.Linear(64, num_classes)

    def forward(self, x):
        return self.out(x.flatten(1))

few = {"federation.rounds": 1, "federation.clients": 5, "data.fraction": 0.4, "federation.local_epochs": 1}
fl_lightning.fit(few | {"model": Net, "loggers": None, "callbacks": {"heatmaps": None}, "name": "own"})
"""


@pytest.mark.slow
def test_a_class_of_a_script_is_refused_with_the_way_out(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    subprocess.run([sys.executable, "script.py"], check=True, capture_output=True)
    words = "export --run runs/own --client 0 --out m.safetensors"
    assert run_line(words) == 2
    line = "Net was defined in a script (__main__), which export cannot import: move"
    assert line in capsys.readouterr().err


@pytest.mark.slow
def test_the_exported_file_is_a_command(tmp_path):
    """What is wrong is one line below its usage; a reader that has read enough ends it well."""
    table, _ = hospitals(tmp_path)
    trained(tmp_path, f"{table} --model mlp")
    module = exported(tmp_path, "Basel", "torch_export")

    def call(words):
        line = f"set -o pipefail; {sys.executable} {module}.py {words}"
        env = {**os.environ, "PYTHONIOENCODING": "ascii"}
        return subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, env=env
        )

    head, *rows = (tmp_path / "t.csv").read_text(encoding="utf-8").splitlines()
    (tmp_path / "long.csv").write_text("\n".join([head, *rows * 200]), encoding="utf-8")
    preview = call("long.csv | head -50")
    assert (preview.returncode, preview.stderr) == (0, "")
    assert set(preview.stdout.splitlines()) <= {"\\xfcbel", "w\\xf6hl"}
    (tmp_path / "other.csv").write_text("years,dose,sex\n1,2,f\n")
    (tmp_path / "words.csv").write_text("age,dose,sex\n1,2,f\n1,none,f\n")
    (tmp_path / "empty.csv").touch()
    wrong = {
        "": "the following arguments are required: rows.csv",
        "absent.csv": "absent.csv cannot be read: [Errno 2] No such file or directory: 'absent.csv'",
        "other.csv": "other.csv lacks the columns age; it has years, dose, sex",
        "words.csv": "words.csv, row 2: 'none' in the column dose is no number",
        "empty.csv": "empty.csv lacks the columns age, dose, sex; it has none",
    }
    for words, line in wrong.items():
        done = call(words)
        assert done.returncode == 2
        assert done.stderr.endswith(f"rows.csv\n{module}.py: error: {line}\n")
    (tmp_path / f"{module}.pt2").unlink()
    done = call("t.csv")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "is not there: this file loads it" in done.stderr
