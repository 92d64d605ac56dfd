"""Who holds which classes, a row for each client, runs over seeds, and charts as files."""

from pathlib import Path

import yaml
from lines import run_line

from fl_lightning.lab.report.tables import differences, overview
from fl_lightning.results.runs import load, run_folders

from .conftest import cells


def change(path, **settings):
    held = yaml.safe_load((path / "config.yaml").read_text())
    (path / "config.yaml").write_text(yaml.safe_dump(held | settings))
    return path


def row(runs, name):
    return cells(overview(runs))[name]


def test_settings_that_differ_are_seen_to_differ(make_run):
    """A method without arguments holds an empty mapping where another has a key for each."""
    runs = load(
        [make_run("a"), make_run("b", config={"method": {"name": "local", "init_args": {}}})]
    )
    assert set(differences(runs).index) == {"method.name", "method.init_args.lam"}


def test_a_folder_of_runs_stands_for_all_in_it(make_run, tmp_path, monkeypatch, capsys):
    for name in ("runs/b", "runs/a", "study/runs/kapc/seed-0", "study/references/x"):
        make_run(name)
    inside = tmp_path / "runs/a/wandb/offline-run/files"
    inside.mkdir(parents=True)
    (inside / "config.yaml").write_text("{}")  # W&B's own, and no run folder
    monkeypatch.chdir(tmp_path)
    found = run_folders([Path("runs"), Path("study"), Path("nowhere")])
    assert [str(path) for path in found] == [
        "runs/a",
        "runs/b",
        "study/runs/kapc/seed-0",
        "nowhere",
    ]
    assert run_line("report runs") == 0
    assert capsys.readouterr().out == "report: runs/report.html\n"
    assert "2 runs side by side" in Path("runs/report.html").read_text()
