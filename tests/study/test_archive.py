"""`fl-train archive`: what is packed gives the same table, and the same bits when a cell is run
again."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fl_lightning.cli import main
from fl_lightning.foundation.errors import RunFailed
from fl_lightning.lab.study import archive
from fl_lightning.lab.study.folder import StudyFolder
from fl_lightning.results.folder import RunFolder
from fl_lightning.results.record import RelationView

from .small import TINY

MakeStudy = Callable[..., Path]
OURS, LOCAL = [0.9, 0.8, 0.7, 0.6], [0.8, 0.9, 0.5, 0.4]


@pytest.fixture
def study(make_study: MakeStudy) -> Path:
    """Two methods, two seeds, one setting; one run has not ended."""
    cells = [
        ("kapc", {"data.alpha": 0.1}, seed, [a - 0.01 * seed for a in OURS], {}) for seed in (0, 1)
    ]
    cells += [
        ("local", {"data.alpha": 0.1}, 0, LOCAL, {}),
        ("local", {"data.alpha": 0.1}, 1, None, {}),
    ]
    return make_study(cells)


def said(capfd: pytest.CaptureFixture[str], line: str) -> tuple[int, str, str]:
    capfd.readouterr()
    code = main(shlex.split(line))
    return code, *capfd.readouterr()


def changed(file: Path, name: str, content: bytes | None) -> None:
    """Write `file` anew with another content of the member `name`; None: without it."""
    with zipfile.ZipFile(file) as held:
        members, comment = {n: held.read(n) for n in held.namelist()}, held.comment
    members |= {name: content or b""}
    with zipfile.ZipFile(file, "w") as held:
        held.comment = comment
        for n, text in members.items():
            if n != name or content is not None:
                held.writestr(n, text)


@pytest.mark.parametrize("form", ["table", "csv", "latex", "json"])
def test_an_archive_gives_the_studys_table(
    form: str, study: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = said(capfd, f"archive {study}")
    assert code == 0 and "archive: 3 runs, 3 of them without a checkpoint" in out
    ours = said(capfd, f"compare {study} --format {form} --baseline local")
    assert ours == said(capfd, f"compare {study}.zip --format {form} --baseline local")
    assert ours[0] == 0 and "kapc" in ours[1]


def test_equal_studies_give_equal_archives(study: Path, tmp_path: Path) -> None:
    (study / "runs").rename(study / "moved")
    shutil.copytree(study / "moved", study / "runs")  # other times, another order on the disk
    shutil.copytree(study, tmp_path / "other")
    for path in (tmp_path / "other").rglob("*"):
        os.utime(path, (1e9, 1e9))
    for name in ("study", "other"):
        assert main(["archive", str(tmp_path / name), "--out", str(tmp_path / f"{name}.zip")]) == 0
    assert (tmp_path / "study.zip").read_bytes() == (tmp_path / "other.zip").read_bytes()
    names = zipfile.ZipFile(tmp_path / "study.zip").namelist()
    assert names[0] == "archive.json" and not any(
        "moved" in name or "lock" in name for name in names
    )


def test_only_an_archive_of_the_same_study_is_written_over(
    study: Path, make_study: MakeStudy, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.zip"
    one = make_study(
        [("kapc", {"data.alpha": 0.1}, 0, OURS, {"config": {"data": {"root": "there"}}})], "one"
    )
    longer = make_study(
        [("kapc", {"data.alpha": 0.1}, 0, OURS, {"config": {"federation": {"rounds": 3}}})],
        "longer",
    )
    other = make_study([("local", {"data.alpha": 0.1}, 7, LOCAL, {})], "other")
    assert said(capfd, f"archive {one} --out {file}")[0] == 0
    before = file.read_bytes()
    for another in (longer, other):
        code, out, err = said(capfd, f"archive {another} --out {file}")
        assert (code, out, err.count("\n")) == (2, "", 1) and "no archive of this study" in err
        assert file.read_bytes() == before
    # it has grown, and its data have moved
    assert said(capfd, f"archive {study} --out {file}")[0] == 0
    assert said(capfd, f"archive {study} --out {file}")[1].startswith("archive: 3 runs")
    file.write_bytes(file.read_bytes()[:-40])
    assert said(capfd, f"archive {study} --out {file}")[0] == 2


@pytest.mark.parametrize("how", ["folder", "summary", "study"])
def test_no_run_is_lost_from_an_archive(
    how: str, study: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert said(capfd, f"archive {study}")[0] == 0
    file, run = study.with_suffix(".zip"), study / "runs/0.1/kapc/seed-0"
    before = file.read_bytes()
    if how == "folder":
        shutil.rmtree(run)
    elif how == "summary":
        (run / "summary.json").unlink()
    else:  # its row was taken out of the study
        content = json.loads((study / "study.json").read_text())
        content["cells"] = [
            cell for cell in content["cells"] if cell["folder"] != "runs/0.1/kapc/seed-0"
        ]
        (study / "study.json").write_text(json.dumps(content))
    code, out, err = said(capfd, f"archive {study}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert (
        f"it holds runs that {study} has not finished (runs/0.1/kapc/seed-0): give another --out"
        in err
    )
    assert file.read_bytes() == before


def test_the_search_that_chose_a_studys_settings_comes_along(
    study: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in archive.SEARCH:
        (tmp_path / name).write_text(name)
    # not of a search: what lies beside it is another's
    archive.pack(StudyFolder(study), tmp_path / "a.zip")
    assert not set(archive.SEARCH) & set(zipfile.ZipFile(tmp_path / "a.zip").namelist())
    (tmp_path / "tune.yaml").write_text("trials: 1")
    monkeypatch.chdir(study)
    archive.pack(StudyFolder(Path()), tmp_path / "a.zip")
    with zipfile.ZipFile(tmp_path / "a.zip") as held:
        assert [held.read(name).decode() for name in archive.SEARCH] == list(archive.SEARCH)
    archive.read_index(tmp_path / "a.zip")
    shutil.copytree(study, tmp_path / "other")  # in the same folder, and not the search's
    archive.pack(StudyFolder(tmp_path / "other"), tmp_path / "b.zip")
    assert not set(archive.SEARCH) & set(zipfile.ZipFile(tmp_path / "b.zip").namelist())
    code, out, err = said(capfd, f"archive {tmp_path}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"it is no study: it holds no study.json; the study of this search is {study}" in err


@pytest.mark.parametrize(
    "how", ["member", "index", "gone", "more", "cut", "zip", "text", "version"]
)
def test_what_was_changed_is_refused_in_one_line(
    how: str, study: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
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
        code, out, err = said(capfd, line)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert str(file) in err and "Traceback" not in err
    assert not (tmp_path / "out.csv").exists()


def test_newcomers_come_along_and_are_compared(study: Path, tmp_path: Path) -> None:
    run = next(study.glob("runs/**/summary.json")).parent
    (run / "newcomers.csv").write_text("client,samples_per_class,accuracy\n9,0,0.5\n")
    archive.pack(StudyFolder(study), tmp_path / "a.zip")
    with zipfile.ZipFile(tmp_path / "a.zip") as packed:
        assert any(name.endswith("newcomers.csv") for name in packed.namelist())
    other = tmp_path / "other"
    shutil.copytree(run, other)
    assert archive.differences(run, other, None) == []
    (other / "newcomers.csv").unlink()
    assert archive.differences(run, other, None) == ["newcomers.csv"]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("archive", "archive: it must be given once"),
        ("archive study --rerun x", "rerun: 'x'"),
        ("archive study --out a.tar", "it must end with .zip"),
        ("archive study --out thesis.zip", "is not written over"),
        ("archive empty", "it holds no study.json"),
        ("archive a.zip --rerun runs/kapc/seed-9", "no such run"),
        ("archive a.zip --out b.zip", "out: 'b.zip'"),
    ],
)
def test_bad_words(
    line: str,
    wanted: str,
    study: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "thesis.zip").write_text("my life's work")
    archive.pack(StudyFolder(study), tmp_path / "a.zip")
    code, out, err = said(capfd, line)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert wanted in err
    assert (tmp_path / "thesis.zip").read_text() == "my life's work"


def test_a_rerun_that_fails_leaves_no_folder(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    archive.pack(StudyFolder(study), tmp_path / "a.zip")
    monkeypatch.chdir(tmp_path)

    def fails(config: object, folder: Path) -> None:
        RunFolder(folder).write_summary({})
        raise RunFailed("client 0 failed")

    monkeypatch.setattr("fl_lightning.lab.study.packing.train", fails)
    run = next(iter(archive.read_index(Path("a.zip"))["weights"]))
    assert said(capfd, f"archive a.zip --rerun {run} --out again") == (
        1,
        "",
        "fl-train: error: client 0 failed\n",
    )
    assert not Path("again").exists()


@pytest.mark.slow
def test_a_cell_comes_to_the_same_bits_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("study.yaml").write_text(yaml.safe_dump({**TINY, "methods": ["kapc"], "seeds": [3]}))
    assert main(["study", "study.yaml", "--out", "s", "--workers", "1"]) == 0
    assert main(["archive", "s"]) == 0
    run = Path("s/runs/kapc/seed-3")
    code, out, err = said(capfd, "archive s.zip --rerun runs/kapc/seed-3 --out again")
    assert code == 0, err
    digest = archive.weights(run)
    assert f"the same bits (tables, relation, summary, weights {digest})" in out
    assert archive.weights(tmp_path / "again") == digest is not None
    # It was trained elsewhere than it is packed, and resumed.
    (start,) = json.loads((run / "provenance.json").read_text())
    elsewhere = {"processor": "Cluster CPU", "gpus": ["H9"], "host": "secret"}
    other = start | {
        "machine": start["machine"] | elsewhere,
        "versions": start["versions"] | {"torch": "1.2.3"},
    }
    (run / "provenance.json").write_text(json.dumps([other, other | {"started": "later"}]))
    (run / "environment.txt").write_text("torch==1.2.3\nmy-secret==1\ntorchvision==0.9\n")
    code, out, err = said(capfd, "archive s")
    assert code == 0 and " files, trained with torch 1.2.3 on Cluster CPU + H9\n" in out, out
    text = zipfile.ZipFile("s.zip").read("archive.json").decode()
    (told,) = json.loads(text)["runs"]["runs/kapc/seed-3"]
    assert told["versions"]["torchvision"] == "0.9"
    assert "secret" not in text and str(tmp_path) not in text and start["started"] not in text
    # What the archive says of the weights is what is held against: here it says another run's.
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("seed: 3", "seed: 4"))
    Path("s.zip").unlink()
    assert main(["archive", "s"]) == 0
    code, out, err = said(capfd, "archive s.zip --rerun runs/kapc/seed-3")
    assert (code, out) == (1, "")
    assert "runs/kapc/seed-3 differs in weights, metrics.csv, clients.csv, final.csv, " in err
    assert "it was trained with torch 1.2.3 on Cluster CPU + H9, and run again with torch" in err


def test_relation_and_summary_are_held_against_a_rerun(study: Path, tmp_path: Path) -> None:
    run, again = study / "runs/0.1/kapc/seed-0", tmp_path / "again"
    cube = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    for number in (1, 2):
        RunFolder(run).write_relation(number, RelationView(cube, [0, 1, 2], ["a", "b"], [0, 1]))
    shutil.copytree(run, again)

    def told(path: Path, **values: Any) -> None:
        content = json.loads((path / "summary.json").read_text())
        (path / "summary.json").write_text(json.dumps({**content, **values}))

    told(
        run,
        mean_best_accuracy=math.nan,
        wall_seconds=1.0,
        version="0.0.9",
        world_size=1,
        best_checkpoint_round=1,
    )
    told(
        again,
        mean_best_accuracy=math.nan,
        wall_seconds=2.0,
        version="0.1.0",
        world_size=2,
        best_checkpoint_round=2,
    )
    assert archive.differences(again, run, None) == []
    RunFolder(run).write_relation(
        2, RelationView(np.full_like(cube, 0.123), [0, 1, 2], ["a", "b"], [0, 1])
    )
    told(run, final_mean_accuracy=0.999)
    wanted = ["relation (round-0002.npz)", "summary.json (final_mean_accuracy)"]
    assert archive.differences(again, run, None) == wanted
    (again / "relation/round-0001.npz").unlink()
    assert archive.differences(again, run, None) == [
        "relation (round-0001.npz, round-0002.npz)",
        wanted[1],
    ]
