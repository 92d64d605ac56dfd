"""Own code of a run: which files it is, and what its folder tells of versions and their rounds."""

import importlib
import sys

import pytest
from refusals import refuses

from fl_lightning.configuration.config import Component, Config, DataConfig, ModelConfig
from fl_lightning.results import owncode

FEDAVG = Component("fl_lightning.methods.fedavg.FedAvg")


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # edits within a second of one another
    return tmp_path


def write(folder, **texts):
    for name, text in texts.items():
        file = folder / f"{name.replace('__', '/')}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)


def test_files_by_import_path_with_what_they_descend_from(workplace):
    write(workplace, fl_own_base="import torch\nclass Base(torch.nn.Module): ...\n")
    for folder in ("fl_own_a", "fl_own_b"):
        write(
            workplace,
            **{f"{folder}__models": "from fl_own_base import Base\nclass Net(Base): ...\n"},
        )
        (workplace / folder / "__init__.py").write_text("")
        importlib.import_module(f"{folder}.models")
    models = [ModelConfig(Component(f"{folder}.models.Net")) for folder in ("fl_own_a", "fl_own_b")]
    found = owncode.files(owncode.paths(Config(FEDAVG, models)))
    names = [
        "fl_own_a/__init__.py",
        "fl_own_a/models.py",
        "fl_own_b/__init__.py",
        "fl_own_b/models.py",
        "fl_own_base.py",
    ]
    assert list(found) == names
    assert all(file == workplace / name for name, (_, file) in found.items())


def test_files_that_own_files_import_from_their_folder(workplace):
    write(
        workplace,
        fl_own_c__methods="from .steps import half\nimport json, torch\nfrom fl_lightning.methods "
        "import Method\n"
        "class Mine(Method):\n    def step(self):\n        from fl_own_c import late\n",
        fl_own_c__steps="from fl_own_top import flip as half\nfrom . import more\n",
        fl_own_c__late="import random\n",
        fl_own_c__more="import fl_own_c.steps\n",  # a circle
        fl_own_c__apart="",
        fl_own_top="flip = -1\n",
        random="# never imported: the standard library comes first\n",
    )
    config = Config(Component("fl_own_c.methods.Mine"), [])
    names = [
        "fl_own_c/late.py",
        "fl_own_c/methods.py",
        "fl_own_c/more.py",
        "fl_own_c/steps.py",
        "fl_own_top.py",
    ]
    assert list(owncode.files(owncode.paths(config))) == names  # without importing anything
    importlib.import_module("fl_own_c.methods")
    assert list(owncode.files(owncode.paths(config))) == names


def test_every_part_of_a_configuration_counts_but_loggers(workplace):
    write(
        workplace, **{f"fl_own_{part}": "class A: ...\n" for part in ("d", "e", "f", "g", "h", "i")}
    )
    own = [Component(f"fl_own_{part}.A") for part in ("d", "e", "f", "g")]
    data = DataConfig(source="fl_own_h.A", partition="fl_own_i.A")
    config = Config(
        own[0],
        [ModelConfig(own[1])],
        data=data,
        callbacks={"mine": own[2]},
        loggers={"mine": own[3]},
    )
    assert list(owncode.current_digests(config)) == [
        f"fl_own_{part}.py" for part in ("d", "e", "f", "h", "i")
    ]
    assert list(owncode.current_digests(config, owncode.SHARED)) == [
        f"fl_own_{part}.py" for part in ("e", "h", "i")
    ]
    assert owncode.current_digests(Config(Component("torch.nn.Linear"), [])) == {}  # installed


def test_what_a_loaded_module_executes_is_told_not_what_was_edited_since(workplace):
    write(workplace, fl_own_j="sign = 1\nclass Mine: ...\n")
    config = Config(Component("fl_own_j.Mine"), [])
    module = importlib.import_module("fl_own_j")
    before = owncode.current_digests(config)
    write(workplace, fl_own_j="sign = -1\nclass Mine: ...\n")
    assert module.sign == 1 and owncode.current_digests(config) == before
    importlib.invalidate_caches()
    importlib.reload(module)
    assert module.sign == -1 and owncode.changed_files(before, owncode.current_digests(config)) == [
        "fl_own_j.py"
    ]


def test_versions_are_kept_with_their_rounds_and_never_overwritten(tmp_path):
    one, two, three = ({"a.py": text, "b/c.py": b"same"} for text in (b"1", b"2", b"3"))

    def told():
        return [
            (version["first_round"], version["folder"]) for version in owncode.versions(tmp_path)
        ]

    assert owncode.store_version(tmp_path, one, 1) == [] and told() == [(1, "source")]
    assert owncode.store_version(tmp_path, one, 4) == [] and told() == [(1, "source")]
    assert owncode.store_version(tmp_path, two, 6) == ["a.py"]
    assert told() == [(1, "source"), (6, "source/from-round-0006")]
    assert owncode.store_version(tmp_path, two, 8) == [] and len(told()) == 2
    assert owncode.store_version(tmp_path, three, 6) == [
        "a.py"
    ]  # rounds from 6 on were lost, or taken back
    assert told() == [(1, "source"), (6, "source/from-round-0006-2")]
    assert owncode.store_version(tmp_path, one, 9) == ["a.py"]  # as at first: no third copy
    assert told()[2:] == [(9, "source")]
    assert owncode.store_version(tmp_path, one, 3) == [] and told() == [(1, "source")]
    texts = {
        place: (tmp_path / place / "a.py").read_bytes()
        for place in ("source", "source/from-round-0006")
    }
    assert texts == {"source": b"1", "source/from-round-0006": b"2"}
    assert (tmp_path / "source/from-round-0006-2/a.py").read_bytes() == b"3"
    assert (
        owncode.store_version(tmp_path / "none", {}, 1) == [] and not (tmp_path / "none").exists()
    )


def test_a_damaged_list_of_versions_is_named(tmp_path):
    owncode.store_version(tmp_path, {"a.py": b"1"}, 1)
    (tmp_path / owncode.ROUNDS).write_text("{")
    with refuses(r"^run=.*source/rounds\.json cannot be read"):
        owncode.versions(tmp_path)
