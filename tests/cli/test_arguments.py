"""Arguments of methods without their modules: the same as those of the classes, refused early, and
explained."""

import json
import re
import sys

import pytest
import yaml
from lines import run_line

import fl_lightning.methods
from fl_lightning.cli import COMMANDS, command_keys, main
from fl_lightning.configuration import catalogue, describe, index
from fl_lightning.configuration.explain import page


@pytest.mark.slow
def test_the_index_is_fresh():
    """It has all our classes as they are; else: the command of CONTRIBUTING.md."""
    assert index.FILE.read_text(encoding="utf-8") == describe.text()


TOY = """
from dataclasses import dataclass
from fl_lightning.methods.base import Method
from fl_lightning.configuration.ranges import NonNegativeFloat
from fl_lightning.configuration.search import LogRange, searched

@dataclass(frozen=True)
class Toy(Method):
    \"\"\"FedAvg under another name.

    Args:
        push: what it has. 1: ours.
    \"\"\"

    push: NonNegativeFloat = searched(1.0, LogRange(0.1, 10), "a decade around it")
"""
ROW = (
    "| `method.push` | a number, 0 or more | `1.0` | 0.1 to 10 (log): a decade around it | what it "
    "has. 1: ours. |"
)


@pytest.mark.slow
def test_a_new_method_is_one_file_and_a_few_lines_of_yaml(tmp_path, monkeypatch, capsys):
    """Nothing else is written: index, page, names and checks of arguments follow from the class."""
    (tmp_path / "own" / "room").mkdir(parents=True)
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "toy.yaml").write_text("base: digits\nmethod: toy\nmethod.push: 2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "fl_lightning.methods.__path__", [*fl_lightning.methods.__path__, str(tmp_path)]
    )
    monkeypatch.setattr(describe, "FILE", tmp_path / "own" / "room" / "index.json")
    describe.write()
    monkeypatch.setattr(index, "read", lambda: json.loads(describe.FILE.read_text()))
    assert ROW in page(index.read()["methods"])
    monkeypatch.setitem(catalogue._TABLES, "methods", lambda: catalogue._classes("methods"))
    assert run_line("fit --config toy.yaml --print_config") == 0
    assert yaml.safe_load(capsys.readouterr().out)["method"] == {
        "name": "toy",
        "init_args": {"push": 2.0},
    }
    assert run_line("fit --method toy --method.push -1") == 2
    assert "method.push=-1.0: it must be 0 or more" in capsys.readouterr().err
    sys.modules.pop("fl_lightning.methods.toy")


def test_help_lists_exactly_the_keys_that_are_read(capsys):
    for command in (name for name in COMMANDS if name not in ("list", "status")):
        assert main([command, "--help"]) == 0
        listed = re.findall(r"^  --([\w.+]+) ", capsys.readouterr().out, re.MULTILINE)
        assert set(listed) == {key for group in command_keys(command) for key in group} and len(
            listed
        ) == len(set(listed)), command
