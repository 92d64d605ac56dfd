"""`fl-train archive`: what is packed gives the same table, and the same bits when a cell is run
again."""

import json
import math
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import yaml
from lines import run_line

from fl_lightning.foundation.errors import RunFailed
from fl_lightning.lab.study import archive
from fl_lightning.lab.study.folder import StudyFolder
from fl_lightning.results.folder import RunFolder
from fl_lightning.results.record import RelationView

from .small import TINY

OURS, LOCAL = [0.9, 0.8, 0.7, 0.6], [0.8, 0.9, 0.5, 0.4]


@pytest.fixture
def study(make_study):
    """Two methods, two seeds, one setting; one run has not ended."""
    cells = [
        ("kapc", {"data.alpha": 0.1}, seed, [a - 0.01 * seed for a in OURS], {}) for seed in (0, 1)
    ]
    cells += [
        ("local", {"data.alpha": 0.1}, 0, LOCAL, {}),
        ("local", {"data.alpha": 0.1}, 1, None, {}),
    ]
    return make_study(cells)


def changed(file, name, content):
    """Write `file` anew with another content of the member `name`; None: without it."""
    with zipfile.ZipFile(file) as held:
        members, comment = {n: held.read(n) for n in held.namelist()}, held.comment
    members |= {name: content or b""}
    with zipfile.ZipFile(file, "w") as held:
        held.comment = comment
        for n, text in members.items():
            if n != name or content is not None:
                held.writestr(n, text)


@pytest.mark.parametrize("form", ["table", "json"])
def test_an_archive_gives_the_studys_table(form, study, fl_train):
    code, out, _ = fl_train(f"archive {study}")
    assert code == 0 and "archive: 3 runs, 3 of them without a checkpoint" in out
    ours = fl_train(f"compare {study} --format {form} --baseline local")
    assert ours == fl_train(f"compare {study}.zip --format {form} --baseline local")
    assert ours[0] == 0 and "kapc" in ours[1]


def test_equal_studies_give_equal_archives(study, tmp_path):
    (study / "runs").rename(study / "moved")
    shutil.copytree(study / "moved", study / "runs")  # other times, another order on the disk
    shutil.copytree(study, tmp_path / "other")
    for path in (tmp_path / "other").rglob("*"):
        os.utime(path, (1e9, 1e9))
    for name in ("study", "other"):
        assert run_line(f"archive {tmp_path / name} --out {tmp_path / f'{name}.zip'}") == 0
    assert (tmp_path / "study.zip").read_bytes() == (tmp_path / "other.zip").read_bytes()
    names = zipfile.ZipFile(tmp_path / "study.zip").namelist()
    assert names[0] == "archive.json" and not any(
        "moved" in name or "lock" in name for name in names
    )


def test_the_search_that_chose_a_studys_settings_comes_along(study, tmp_path, monkeypatch, refused):
    def members(folder):
        archive.pack(StudyFolder(folder), tmp_path / "a.zip")
        return set(archive.SEARCH) & set(zipfile.ZipFile(tmp_path / "a.zip").namelist())

    for name in archive.SEARCH:
        (tmp_path / name).write_text(name)
    # not of a search: what lies beside it is another's
    (tmp_path / "tune.yaml").unlink(missing_ok=True)
    assert not members(study)
    (tmp_path / "tune.yaml").write_text("trials: 1")
    shutil.copytree(study, tmp_path / "other")  # in the same folder, and not the search's
    assert not members(tmp_path / "other")
    monkeypatch.chdir(study)
    assert members(Path()) == set(archive.SEARCH)
    archive.read_index(tmp_path / "a.zip")
    line = refused(f"archive {tmp_path}")
    assert (
        f"it is no study (no study.json): give a study's folder; the study of this search is {study}"
        in line
    )


@pytest.mark.parametrize(
    "how", ["member", "index", "gone", "more", "cut", "zip", "text", "version"]
)
def test_what_was_changed_is_refused_in_one_line(how, study, tmp_path, refused):
    file = tmp_path / "a.zip"
    index = archive.pack(StudyFolder(study), file)
    run = next(iter(index["weights"]))
    if how == "member":
        changed(file, f"{run}/final.csv", b"client,accuracy\n0,1.0\n")
    elif how == "index":
        changed(
            file,
            "archive.json",
            zipfile.ZipFile(file).read("archive.json").replace(b"Linux", b"Minix"),
        )
    elif how == "gone":
        changed(file, f"{run}/final.csv", None)
    elif how == "more":
        changed(file, "../out.csv", b"1")
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:-40])
    elif how == "zip":
        with zipfile.ZipFile(file, "w") as held:
            held.writestr("thesis.tex", "")
    elif how == "text":
        file.write_text("thesis")
    else:
        changed(file, "archive.json", b'{"version": 9}')
    for line in (f"compare {file}", f"archive {file}", f"archive {file} --rerun {run}"):
        assert str(file) in refused(line)
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize(
    "line, wanted",
    {
        "archive": "archive: it must be given once",
        "archive study --rerun x": "rerun='x'",
        "archive study --out a.tar": "it must end with .zip",
        "archive study --out thesis.zip": "it exists: move it",
        "archive empty": "(no study.json)",
        "archive a.zip --rerun runs/kapc/seed-9": "no such run",
        "archive a.zip --out b.zip": "out='b.zip'",
    }.items(),
)
def test_bad_words(line, wanted, study, tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "thesis.zip").write_text("my life's work")
    archive.pack(StudyFolder(study), tmp_path / "a.zip")
    assert wanted in refused(line)
    assert (tmp_path / "thesis.zip").read_text() == "my life's work"


def test_a_rerun_that_fails_leaves_no_folder(study, tmp_path, monkeypatch, fl_train):
    archive.pack(StudyFolder(study), tmp_path / "a.zip")
    monkeypatch.chdir(tmp_path)

    def fails(config, folder):
        RunFolder(folder).write_summary({})
        raise RunFailed("client 0 failed")

    monkeypatch.setattr("fl_lightning.lab.study.archive.train", fails)
    run = next(iter(archive.read_index(Path("a.zip"))["weights"]))
    assert fl_train(f"archive a.zip --rerun {run} --out again") == (
        1,
        "",
        "fl-train: error: client 0 failed\n",
    )
    assert not Path("again").exists()


@pytest.mark.slow
def test_a_cell_comes_to_the_same_bits_again(tmp_path, monkeypatch, fl_train):
    monkeypatch.chdir(tmp_path)
    Path("study.yaml").write_text(yaml.safe_dump({**TINY, "methods": ["kapc"], "seeds": [3]}))
    assert run_line("study study.yaml --out s --workers 1") == 0
    assert run_line("archive s") == 0
    run = Path("s/runs/kapc/seed-3")
    code, out, err = fl_train("archive s.zip --rerun runs/kapc/seed-3 --out again")
    assert code == 0, err
    digest = archive.checkpoint_digest(run)
    assert f"the same bits (tables, relation, summary, weights {digest})" in out
    assert archive.checkpoint_digest(tmp_path / "again") == digest is not None
    # It was trained elsewhere than it is packed, and resumed.
    (start,) = json.loads((run / "provenance.json").read_text())
    elsewhere = {"processor": "Cluster CPU", "gpus": ["H9"], "host": "secret"}
    other = start | {
        "machine": start["machine"] | elsewhere,
        "versions": start["versions"] | {"torch": "1.2.3"},
    }
    (run / "provenance.json").write_text(json.dumps([other, other | {"started": "later"}]))
    (run / "environment.txt").write_text("torch==1.2.3\nmy-secret==1\ntorchvision==0.9\n")
    Path("s.zip").unlink()
    code, out, err = fl_train("archive s")
    assert code == 0 and " files, trained with torch 1.2.3 on Cluster CPU + H9\n" in out, out
    text = zipfile.ZipFile("s.zip").read("archive.json").decode()
    (told,) = json.loads(text)["runs"]["runs/kapc/seed-3"]
    assert told["versions"]["torchvision"] == "0.9"
    assert "secret" not in text and str(tmp_path) not in text and start["started"] not in text
    # What the archive says of the weights is what is held against: here it says another run's.
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("seed: 3", "seed: 4"))
    Path("s.zip").unlink()
    assert run_line("archive s") == 0
    code, out, err = fl_train("archive s.zip --rerun runs/kapc/seed-3")
    assert (code, out) == (1, "")
    assert "runs/kapc/seed-3 differs in weights, metrics.csv, clients.csv, final.csv, " in err
    assert "it was trained with torch 1.2.3 on Cluster CPU + H9, and run again with torch" in err


def test_relation_and_summary_are_held_against_a_rerun(study, tmp_path):
    run, again = study / "runs/0.1/kapc/seed-0", tmp_path / "again"

    def relation(number, value):
        cube = np.full((3, 2, 2), value, dtype=np.float32)
        view = RelationView(cube, [0, 1, 2], ["a", "b"], [0, 1])
        RunFolder(run).write_relation(number, view)

    def told(path, **values):
        content = json.loads((path / "summary.json").read_text())
        (path / "summary.json").write_text(json.dumps({**content, **values}))

    for number in (1, 2):
        relation(number, number)
    shutil.copytree(run, again)
    may_differ = ("wall_seconds", "version", "world_size", "best_checkpoint_round")
    for path, value in ((run, 1), (again, 2)):
        told(path, mean_best_accuracy=math.nan, **dict.fromkeys(may_differ, value))
    assert archive.differences(again, run, None) == []
    relation(2, 0.123)
    told(run, final_mean_accuracy=0.999)
    wanted = ["relation (round-0002.npz)", "summary.json (final_mean_accuracy)"]
    assert archive.differences(again, run, None) == wanted
    (again / "relation/round-0001.npz").unlink()
    wanted[0] = "relation (round-0001.npz, round-0002.npz)"
    assert archive.differences(again, run, None) == wanted
