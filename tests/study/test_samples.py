"""Data that change under a study, a search or a comparison."""

import json
from pathlib import Path

import pytest
from lines import run_line
from refusals import refused_line


@pytest.fixture
def ask(on_study):
    """Runs a command in a folder with a table and a study of it; code, out, err."""
    base = {
        "data.root": "t.csv",
        "data.group_column": "site",
        "data.partition": "natural",
        "federation.clients": 2,
        "federation.rounds": 1,
        "data.validation": 0.2,
        "data.min_samples": 2,
        "model": {"hidden": [4]},
        "fabric.accelerator": "cpu",
    }

    def run(words, **changes):
        asked = {
            "base": base,
            "methods": [{"name": "fedprox", "mu": 0.5}],
            "seeds": [0],
            "forced": False,
        } | changes
        return on_study(words, asked)

    write(0)
    return run


def write(shift):
    rows = "".join(f"{k % 2},{k + shift * (k % 7 == 0)},{k % 3 % 2}\n" for k in range(60))
    Path("t.csv").write_text(f"site,a,label\n{rows}", encoding="utf-8")


def test_seeds_that_are_added_after_the_data_have_changed_are_refused(ask, tmp_path):
    line = "study study.yaml --out s --workers 1"
    assert ask(line)[0] == 0
    write(1)
    assert refused_line(ask(line, seeds=[0, 1])).startswith(
        "data.root='t.csv': the data have changed since s/runs/fedprox,mu=0.5/seed-0 trained"
    )
    assert not list(tmp_path.glob("s/runs/*/seed-1"))
    assert ask(line)[0] == 0  # nothing is to be trained
    write(0)
    assert ask(line, seeds=[0, 1])[0] == 0


def test_a_search_over_other_data_is_refused(ask):
    pytest.importorskip("optuna")
    line = "tune study.yaml --out t --trials 2 --workers 1 --study false"
    assert ask(line, methods=["fedprox"], seeds=[1])[0] == 0
    write(1)
    assert refused_line(ask(line, methods=["fedprox", "ditto"], seeds=[1])).startswith(
        "data.root='t.csv': the data have changed since trials in t"
    )


def test_a_comparison_says_which_seeds_are_of_other_data(make_study, capsys):
    labels, seeds = ("local", "kapc"), range(4)
    scores = {"local": [0.5, 0.6, 0.7, 0.8], "kapc": [0.6, 0.7, 0.8, 0.9]}
    study = make_study([(label, {}, seed, scores[label], {}) for seed in seeds for label in labels])
    for seed in seeds:
        for label in labels:
            file = study / f"runs/all/{label}/seed-{seed}/provenance.json"
            file.write_text(
                json.dumps([{"source": "new" if seed > 1 else "old"}]), encoding="utf-8"
            )
    assert run_line(f"compare {study}") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "runs were trained on 2 versions of the data, which differ: seeds 0, 1 (" in text
    assert "seeds 2, 3 (" in text
    assert run_line(f"archive {study}") == 0
    assert run_line(f"compare {study}.zip") == 0
    assert "runs were trained on 2 versions of the data" in " ".join(
        capsys.readouterr().out.split()
    )
