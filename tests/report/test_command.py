"""`fl-train report` from the command line."""

import subprocess
import sys
from pathlib import Path

import pytest
from lines import run_line

from fl_lightning.results.runs import run_folders


@pytest.fixture
def refused(tmp_path, monkeypatch, refused):
    """Runs a command line that must be refused, and leave the disk as it is; gives the one line it
    prints."""
    monkeypatch.chdir(tmp_path)

    def run(words):
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        line = refused(f"report {words}")
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
        return line

    return run


@pytest.mark.parametrize(
    "words, said",
    {
        "": "report: it must be given: fl-train report STUDY | RUN [RUN ...]",
        "nowhere": "run='nowhere': it must be a run folder",
        "empty": "run='empty': it must be a run folder, but has no config.yaml",
        "a nowhere": "run='nowhere'",
        "a ./a/": "run='a': it is named twice",
        "a --out no/page.html": "out='no/page.html': there is no folder",
        "a --out page.txt": "out='page.txt': it must end with .html",
        "a --out notes.html": "out='notes.html': it exists and is no report",
        "a --out=folder.html": "out='folder.html': it exists and is no report",
        "a --out": "out: it needs a value",
        "a --name x": "name='x': no such key",
    }.items(),
)
def test_bad_input_is_one_line(words, said, refused, make_run, tmp_path):
    make_run("a")
    (tmp_path / "notes.html").write_text("mine")
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "empty").mkdir()
    assert refused(words).startswith(said)


@pytest.mark.sampled("one.html")
@pytest.mark.parametrize(
    "words, page",
    {
        "a": "a/report.html",
        "a b": "report.html",
        "a --out one.html b": "one.html",
    }.items(),
)
def test_where_the_page_goes(words, page, make_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_run("a")
    make_run("b")
    for _ in range(2):  # an earlier report is written over
        assert run_line(f"report {words}") == 0
        assert capsys.readouterr().out == f"report: {page}\n"
    assert Path(page).read_text().rstrip().endswith("</html>")
    assert not list(tmp_path.rglob("*.part"))


def test_a_folder_of_runs_stands_for_all_in_it(make_run, tmp_path, monkeypatch, capsys):
    for name in ("runs/b", "runs/a", "study/runs/kapc/seed-0", "study/references/x"):
        make_run(name)
    inside = tmp_path / "runs/a/wandb/offline-run/files"
    inside.mkdir(parents=True)
    (inside / "config.yaml").write_text("{}")  # W&B's own, and no run folder
    monkeypatch.chdir(tmp_path)
    folders = run_folders([Path("runs"), Path("study"), Path("nowhere")])
    assert [str(path) for path in folders] == [
        "runs/a",
        "runs/b",
        "study/runs/kapc/seed-0",
        "nowhere",
    ]
    assert run_line("report runs") == 0
    assert capsys.readouterr().out == "report: runs/report.html\n"
    assert "2 runs side by side" in Path("runs/report.html").read_text()


@pytest.mark.slow
def test_torch_is_not_imported(make_run):
    code = (
        "import sys; from fl_lightning.cli import main; main(sys.argv[1:]); assert 'torch' not in "
        "sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "report", str(make_run())],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
