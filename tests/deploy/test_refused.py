"""What is refused before anything is written, in one line that names key, value and what is
allowed."""

import errno
import os
import re
from pathlib import Path

import pytest
from lines import run_line

from fl_lightning.callbacks.base import Transform
from fl_lightning.configuration import catalogue
from fl_lightning.configuration.config import Component

from .test_equal import SMALL

KINDS = {
    name: Component(entry.class_path, {}).load()
    for name, entry in catalogue.table("callbacks").items()
}
REFUSED = sorted(
    name
    for name, kind in KINDS.items()
    # nobody names it
    if issubclass(kind, Transform) and not kind.deployed and name != "stepprivacy"
)
NEEDED = {
    "blurrelation": "--callbacks.blurrelation.top=1",
    "attack": "--callbacks.attack.clients=[0] --callbacks.attack.kind=sign_flip",
    "canaries": "--callbacks.canaries.share=1",
    "normbound": "--callbacks.normbound.bound=1",
    "centralprivacy": "--callbacks.centralprivacy.clip=1 --callbacks.centralprivacy.noise=1",
}
"""Arguments without which they are refused for another reason."""


def refused(words, line, capsys):
    """`fl-train deploy` ends with this line and leaves nothing behind."""
    before = set(Path().iterdir())
    assert run_line(f"deploy {SMALL} {words} --out app --sites sites") == 2
    shown = capsys.readouterr().err
    assert re.search(line, shown), shown
    assert len(shown.strip().splitlines()) == 1
    assert set(Path().iterdir()) == before


@pytest.mark.parametrize("name", REFUSED)
def test_transforms_that_sites_cannot_run_are_named(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = f"--method fedavg --callbacks {name} {NEEDED.get(name, '')}"
    refused(
        words,
        rf"callbacks.{name}='\w+': it must be null: sites cannot run it",
        capsys,
    )


@pytest.mark.sampled("scaler", "held out", "executor")
@pytest.mark.parametrize(
    "words, line",
    {
        "--optimizer.privacy.clip 1 --optimizer.privacy.noise 1": r"optimizer.privacy=.*null: sites cannot run it",
        "--data.scale sklearn.preprocessing.QuantileTransformer": r"data.scale=.*: an exported file cannot do more",
        "--data.global_test true": r"data.global_test=True: it must be false",
        "--data.held_out [1]": r"data.held_out=.*1.*: it must be null: fl-train join",
        "--data.held_out_clients 0.34": r"data.held_out_clients=0.34: it must be 0: fl-train join",
        "--fabric.executor vmap": r"fabric.executor='vmap': it must be auto or loop: a site has",
    }.items(),
    ids=["private", "scaler", "global test", "held out", "share held out", "executor"],
)
def test_data_and_settings_without_a_meaning_at_sites_are_named(
    words,
    line,
    tmp_path,
    monkeypatch,
    capsys,
):
    monkeypatch.chdir(tmp_path)
    rows = [f"{k % 7},{k % 5 / 2},{'sick' if k % 3 else 'well'}" for k in range(90)]
    Path("table.csv").write_text("\n".join(["one,two,outcome", *rows]) + "\n")
    table = (
        "--method fedavg --data.fraction 1 --data.public null --data.root table.csv "
        "--data.label_column outcome"
    )
    refused(f"{table} {words}", line, capsys)


def test_an_app_that_the_disk_refuses_leaves_its_names_free(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    move = os.replace

    def full(aside, path):
        if Path(path).name == "site-1.npz":
            raise OSError(errno.ENOSPC, "No space left on device")
        move(aside, path)

    monkeypatch.setattr("fl_lightning.foundation.files.os.replace", full)
    line = f"deploy {SMALL} --method fedavg --rehearse false --out app --sites sites"
    assert run_line(line) == 1
    assert (
        capsys.readouterr().err
        == "fl-train: error: cannot write sites/site-1.npz: No space left on device\n"
    )
    assert list(tmp_path.iterdir()) == []
