"""A site or a centre that is not of this run: one line that names it, before the first round."""

from pathlib import Path

import pytest
from refusals import refuses

from fl_lightning import __version__
from fl_lightning.cli import main
from fl_lightning.foundation.errors import Damaged, RunFailed
from fl_lightning.results.folder import RunFolder
from fl_lightning.results.opening import CENTER, SITE
from fl_lightning.sites import ends, wire
from fl_lightning.sites.app import PACKAGE
from fl_lightning.sites.rehearsal import LocalTransport, rehearse

from .test_equal import SMALL, config_of

BAD = 1
"""The client whose site is another."""


def _told(**facts):
    """What a site tells of itself, changed: as one of another package would."""

    def site(one):
        def answer(message):
            told = wire.unpack(one(message))
            return wire.pack(told | (facts if told["kind"] == "hello" else {}))

        return answer

    return site


def _of_another_app(one):
    """A site whose app, or whose own code, is another."""
    one.fingerprint = "another"
    return one


@pytest.mark.sampled("version", "app")
@pytest.mark.parametrize(
    "change, line",
    [
        pytest.param(
            _told(version="0.0.1"),
            f"it has fl_lightning 0.0.1, the centre has {__version__}",
            id="version",
        ),
        pytest.param(
            _told(version="0.0.1", fingerprint="x"),
            "it has fl_lightning 0.0.1, the centre has",
            id="both",
        ),
        pytest.param(_of_another_app, "its configuration is not the centre's", id="app"),
        pytest.param(
            _told(initial="0"),
            "it begins with other weights than the centre: model.weights",
            id="weights",
        ),
    ],
)
def test_a_site_of_another_run_is_one_line(change, line, tmp_path, capsys):
    def made(sites):
        return LocalTransport([change(site) if c == BAD else site for c, site in enumerate(sites)])

    (tmp_path / "one").mkdir()
    with pytest.raises(RunFailed, match=f"^site 1 cannot take part: {line}"):
        rehearse(config_of("fedavg", "--federation.rounds", "1"), tmp_path / "one", made)
    words = ("--federation.rounds", "1", "--federation.on_bad_client", "skip")
    run = rehearse(config_of("fedavg", *words), tmp_path, made)
    assert f"site 1 cannot take part: {line}" in (shown := capsys.readouterr().err)
    assert "the run goes on without it" in shown
    assert {row["client"] for row in RunFolder(run).read("failures")} == {BAD}


def test_a_site_that_cannot_begin_keeps_the_traceback(tmp_path):
    node = {"client": 0, "data": "none.npz", "folder": str(tmp_path)}
    answer = wire.unpack(ends.answer(tmp_path / "no app", "run", node, b""))
    assert answer["failed"][0] == "data"
    assert "Traceback" in (tmp_path / "run" / "failure.txt").read_text()


def test_a_centre_does_not_go_on_with_another_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*SMALL.split(), "--method", "fedavg", "--fabric.executor", "loop"]
    assert main(["fit", *words, "--name", "app", "--federation.rounds", "1"]) == 0
    changed = [*words, "--optimizer.lr", "0.123", "--rehearse", "false"]
    assert main(["deploy", *changed, "--out", "app"]) == 0
    before = {file: file.read_bytes() for file in Path("runs/app").rglob("*") if file.is_file()}
    with refuses(r"^optimizer.lr=0.123: the run began with"):
        ends.center(Path("app") / PACKAGE, {"out": "runs", "name": "app"}, LocalTransport([]))
    assert {
        file: file.read_bytes() for file in Path("runs/app").rglob("*") if file.is_file()
    } == before


@pytest.mark.parametrize("text", ['{"run": "a", "bytes', "[]", "{}"])
def test_damaged_files_of_a_deployment_are_one_line(text, tmp_path, capsys):
    for name in (CENTER, SITE):
        (tmp_path / name).write_text(text)
    with pytest.raises(Damaged, match=r"its deployed\.json is damaged"):
        ends.run_id(tmp_path, "mark")
    assert (
        main(
            [
                "export",
                "--run",
                str(tmp_path),
                "--client",
                "0",
                "--out",
                str(tmp_path / "m.safetensors"),
            ]
        )
        == 2
    )
    line = f"fl-train: error: run={str(tmp_path)!r}: its site.json is damaged\n"
    assert capsys.readouterr().err == line
