"""A run folder says where the run comes from."""

import json
import logging
import subprocess
import sys
import warnings

import pytest
from lines import run_line

import fl_lightning
from fl_lightning.cli import main
from fl_lightning.configuration.config import Component, Config, DataConfig
from fl_lightning.foundation import log
from fl_lightning.foundation.errors import BadInput, RunFailed
from fl_lightning.results import owncode, provenance

OWN = '''
from torch import nn


class Net(nn.Sequential):
    """My own."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
'''


def git(folder, *words):
    line = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@x", *words]
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
def test_every_start_is_kept_with_code_command_and_versions(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    own, folder = tmp_path / "fl_own_provenance.py", tmp_path / "runs" / "a"
    own.write_text(OWN)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", own.name)
    git(tmp_path, "commit", "-q", "-m", "mine")
    monkeypatch.setattr(sys, "argv", ["/bin/fl-train", "fit", "--name", "a b"])
    words = (
        "--config kapc_exact_digits --loggers null --callbacks null --fabric.accelerator cpu "
        "--data.fraction 0.4 --federation.clients 4 --federation.local_epochs 1 --name a "
        "--model fl_own_provenance.Net --callbacks.checkpoint.every 1 --federation.rounds 1"
    )

    def starts():
        return json.loads((folder / "provenance.json").read_text())

    assert run_line(f"fit {words}") == 0
    (start,) = starts()
    assert start["command"] == "fl-train fit --name 'a b'"
    assert start["git"] == {"commit": git(tmp_path, "rev-parse", "HEAD"), "dirty": False}
    assert start["versions"]["fl_lightning"] == fl_lightning.__version__
    assert start["machine"]["memory_gib"] > 0 and start["started"] <= start["ended"]
    assert "torch==" in (folder / "environment.txt").read_text()

    own.write_text(OWN + "\n# changed\n")
    sys.modules.pop("fl_own_provenance")  # as in another process
    provenance._git.cache_clear()
    resume = ["fit", "--name", "a", "--resume", "--federation.rounds", "2"]
    assert main([*resume, "--seed", "1"]) == 2
    assert len(starts()) == 1  # a start that was refused is none
    capsys.readouterr()
    assert main(resume) == 2
    err = capsys.readouterr().err
    line = f"code='{own.name}': it has changed since runs/a was begun"
    assert line in err and err.count("\n") == 1 and len(starts()) == 1
    assert main([*resume, "--accept_changed_code"]) == 0
    assert [start["git"]["dirty"] for start in starts()] == [False, True]
    assert [start["first_round"] for start in starts()] == [1, 2]
    assert (folder / "source" / own.name).read_text() == OWN
    versions = owncode.versions(folder)
    assert [(v["first_round"], v["changed"]) for v in versions] == [(1, []), (2, [own.name])]
    assert "# changed" in (folder / versions[1]["folder"] / own.name).read_text()


def test_where_there_is_no_repository_none_is_claimed(tmp_path):
    assert provenance._git(str(tmp_path)) is None


@pytest.mark.filterwarnings("always:odd data")
def test_the_log_keeps_what_is_said_and_warned_and_how_it_ends(tmp_path, capsys):
    file = tmp_path / "log.txt"
    with pytest.raises(KeyboardInterrupt), log.logged_to(file, "rank 1: "):
        log.say("before the first round")
        assert not file.exists()
        log.write_waiting()
        log.note("a round")
        warnings.warn("odd data", stacklevel=1)
        logging.getLogger("some.library").warning("slow disk")
        raise KeyboardInterrupt
    lines = [line.split(" ", 1)[1] for line in file.read_text().splitlines()]
    assert lines == [
        "rank 1: before the first round",
        "rank 1: a round",
        "rank 1: UserWarning: odd data",
        "rank 1: WARNING of some.library: slow disk",
        "rank 1: ended by KeyboardInterrupt",
    ]
    assert capsys.readouterr().err.startswith("before the first round\n")
    log.note("of no run")
    assert len(file.read_text().splitlines()) == len(lines)


def test_a_start_that_is_refused_leaves_no_log_and_one_that_fails_does(tmp_path):
    for error, left in ((BadInput("a", 1, "no"), False), (RunFailed("client 3\nfailed"), True)):
        with pytest.raises(type(error)), log.logged_to(tmp_path / "log.txt"):
            raise error
        assert (tmp_path / "log.txt").exists() == left
    assert (tmp_path / "log.txt").read_text().endswith(" ended by RunFailed: client 3 failed\n")


@pytest.mark.parametrize(
    "stem, data, name",
    [
        ("kapc_exact_digits", {}, "kapc_exact_digits-seed7"),
        ("kapc_resnet18", {"source": "cifar10"}, "kapc_resnet18-cifar10-seed7"),
        # the config speaks of other data
        ("kapc_exact_digits", {"source": "mnist"}, "kapc-mnist-seed7"),
        ("fedavg_digits", {}, "kapc-digits-seed7"),  # and of another method
        ("", {"source": "images", "root": "data/leaves"}, "kapc-leaves-seed7"),
    ],
)
def test_a_runs_name_says_method_data_and_seed(stem, data, name):
    config = Config(Component("fl_lightning.methods.kapc.KAPC"), [], 7, data=DataConfig(**data))  # type: ignore[arg-type]
    assert provenance.run_name(config, stem) == name
    assert provenance.run_title(config, f"{name}-001") == f"{name}-001"
    assert provenance.run_title(config, "long").endswith("-seed7 (long)")
