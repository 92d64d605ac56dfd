"""The documentation says what is so: its links, commands, code, keys and columns."""

import inspect
import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from fl_lightning.cli import command_keys, main
from fl_lightning.configuration import catalogue, describe
from fl_lightning.configuration.resolve import BASES, _import
from fl_lightning.foundation.csvtable import CsvTable
from fl_lightning.foundation.errors import BadInput, RunFailed
from fl_lightning.foundation.exits import BUG
from fl_lightning.methods import Method

ROOT = Path(__file__).resolve().parents[1]
TOP = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
PAGES = [*(ROOT / name for name in TOP), *sorted((ROOT / "docs").rglob("*.md"))]
OWN = (
    "my_aggregators",
    "my_callbacks",
    "my_data",
    "my_frozen",
    "my_groups",
    "my_losses",
    "my_methods",
    "my_models",
    "my_optimizer",
    "my_sites",
    "my_watch",
)
QUIET = shlex.split("--loggers null --callbacks.heatmaps null --callbacks.progress null")
QUICK = [
    *QUIET,
    *shlex.split("--federation.rounds 1 --federation.local_epochs 1 --fabric.accelerator cpu"),
]


def blocks(page, language):
    """The code blocks of a page that are marked as `language`."""
    fenced = re.findall(r"^```([\w{}-]*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for name, text in fenced if name == language]


def files(page):
    """The page's Python files by name: blocks whose first line is `# NAME.py`."""
    named = {block.partition("\n")[0].removeprefix("# "): block for block in blocks(page, "python")}
    return {name: block for name, block in named.items() if name.endswith(".py")}


def commands(page):
    """The `fl-train` lines of the page's plain blocks."""
    return [
        line
        for block in blocks(page, "")
        for line in block.splitlines()
        if line.startswith("fl-train ")
    ]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory that holds the Python files of all pages."""
    for page in PAGES:
        for name, text in files(page).items():
            (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_JOB_NAME"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path
    for name in OWN:
        sys.modules.pop(name, None)


# ---------------------------------------------------------------- links and commands


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    local = [target for target in targets if not target.startswith("https://")]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_decisions_that_the_code_and_the_pages_name_exist():
    sources = [
        *ROOT.glob("fl_lightning/**/*.py"),
        *ROOT.glob("callbacks/*.py"),
        ROOT / "pyproject.toml",
    ]
    named = {
        number
        for file in sources
        for number in re.findall(r"docs/decisions/(\d{4})", file.read_text())
    }
    assert named
    assert named <= {path.name[:4] for path in (ROOT / "docs" / "decisions").iterdir()}


@pytest.mark.sampled("README", "studies", "methods.md", "tune")
@pytest.mark.sampled(
    "README.md", "CHANGELOG", "own-model", "add-a-method", "reference", "studies", "methods", "tune"
)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_understood(page, folder, capsys):
    for line in commands(page):
        _, command, *words = shlex.split(line)
        if command == "fit" and "--help" in words:
            assert main(["fit", *words]) == 0, line
            assert "  --method." in capsys.readouterr().out, line
        elif command == "fit":
            assert main(["fit", *words, "--print_config"]) == 0, (line, capsys.readouterr().err)
            assert "federation" in yaml.safe_load(capsys.readouterr().out), line
        elif command == "list":
            assert main(["list", *words]) == 0, line
            capsys.readouterr()
        elif command == "submit":
            assert main(["submit", *words, "--dry-run"]) == 0, line
            assert capsys.readouterr().out.startswith("#!/bin/bash"), line
        else:
            known = {key for group in command_keys(command) for key in group}
            flags = {
                word[2:].partition("=")[0].replace("-", "_")
                for word in words
                if word.startswith("--")
            }
            arguments = {flag for flag in flags if flag.startswith(("method.", "model."))}
            assert flags - known <= (arguments if "method" in known else set()), line
    assert not (folder / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["own-model-and-data.md", "add-a-method.md", "server-optimiser.md"]
)
def test_examples_run(name, folder, capsys):
    page = ROOT / "docs" / name
    for line in "".join(blocks(page, "")).splitlines():
        tool, *words = shlex.split(line)
        if tool == "python":
            runpy.run_path(words[0])
        elif tool == "pytest":
            assert words == ["test_my_methods.py"]  # run below
        else:
            less = QUICK if words[0] == "fit" else LESS.get(words[0], [])
            assert main([*words, *less]) == 0, (line, capsys.readouterr().err)
    for text in blocks(page, "yaml"):
        (folder / "own.yaml").write_text(text)
        assert main(["fit", "--config", "own.yaml", *QUICK]) == 0


# ---------------------------------------------------------------- tutorials


SMALL = shlex.split(
    "--federation.rounds 2 --federation.local_epochs 1 --data.fraction 0.4 --fabric.accelerator cpu"
)
LESS = {
    "fit": [*QUIET, *SMALL, "--fabric.devices", "1"],
    "study": [*SMALL, "--workers", "1"],
    "worth": shlex.split(
        "--federation.rounds 2 --repeats 5 --methods fedper --workers 1 --fabric.accelerator cpu"
    ),
    "check-method": ["--only", "runs,seed", "--federation.rounds", "3"],
}
"""What is added to a tutorial's commands, so that they take no time; a run that goes on gets one
round more."""
TUTORIALS = ("first-run", "paper", "cluster", "reading-a-relation", "python", "hospitals")
LONG = {
    "fl-train tune study.yaml --out tuned/mine --trials 20": "study/test_tune.py",
    "fl-train compare tuned/mine/study --baseline local --format latex "
    "--out tuned.tex": "study/test_tune.py",
}
"""Lines of tutorials that take longer than a test may, and the tests that run their like."""


@pytest.mark.slow
@pytest.mark.parametrize("name", TUTORIALS)
def test_tutorials_run(name, folder, capsys, monkeypatch):
    """Every line of a tutorial, in its order, in an empty folder."""
    page = ROOT / "docs" / f"{name}.md"
    studies = [
        text for source in (page, ROOT / "docs" / "studies.md") for text in blocks(source, "yaml")
    ]
    (folder / "study.yaml").write_text(studies[0])
    for line in "".join(blocks(page, "")).splitlines():
        if line in LONG:
            assert (ROOT / "tests" / LONG[line]).exists()
            continue
        tool, *words = shlex.split(line)
        if tool == "python":
            monkeypatch.setattr(sys, "argv", words)
            runpy.run_path(words[0], run_name="__main__")
            continue
        assert tool == "fl-train", line
        words += [] if "--slurm" in words else LESS.get(words[0], [])
        words += ["--federation.rounds", "3"] if "--resume" in words else []
        assert main(words) == 0, (line, capsys.readouterr().err)
    out = capsys.readouterr().out
    if name == "paper":
        assert r"\toprule" in (folder / "table.tex").read_text()
    if name == "reading-a-relation":
        # 3 of 7 without groups
        assert float(re.findall(r"stays in the group ([\d.]+)", out)[0]) > 0.7
    if name == "hospitals":
        rows = json.loads((folder / "worth" / "days" / "worth.json").read_text())["silos"]
        assert [row["silo"] for row in rows] == ["Aarau", "Basel", "Chur", "Davos", "Olten", "Zug"]
        assert all(row["gain"] == pytest.approx(row["alone"] - row["federated"]) for row in rows)
        assert re.search(r"value_2 .*Chur", out)  # check-data
        assert "\nno,yes\n" in out  # at Aarau's own machine
    if name == "python":
        assert "(5, 10) (10, 3, 10)" in out


# ------------------------------------------------------- the method that a page builds from nothing


@pytest.mark.slow
def test_the_pages_method_is_short_and_keeps_its_promises(folder):
    """Its global model is FedAvg's to the bit; without a pull its personal models are those of
    training alone."""
    assert len((folder / "my_methods.py").read_text().splitlines()) <= 40
    tests = [
        thing
        for name, thing in runpy.run_path("test_my_methods.py").items()
        if name.startswith("test_")
    ]
    assert len(tests) == 2
    for number, test in enumerate(tests):
        test(folder / str(number))


def test_every_hook_stands_on_the_page():
    text = (ROOT / "docs" / "add-a-method.md").read_text()
    hooks = [name for name in vars(Method) if not name.startswith("_")]
    assert len(hooks) > 20
    assert [name for name in hooks if f"`{name}`" not in text and f"`{name}(" not in text] == []


# ---------------------------------------------------------------- the reference


@pytest.fixture
def reference():
    return (ROOT / "docs" / "reference.md").read_text()


@pytest.mark.slow
def test_every_key_stands_in_the_reference(reference):
    assert describe.replaced(reference, describe.keys_of_a_run()) == reference, (
        "python -m ...configuration.describe"
    )


@pytest.mark.parametrize("kind", sorted(BASES))
def test_every_component_and_argument_stands_in_the_reference(kind, reference):
    if kind == "methods":  # on a page of its own, which is made with the site
        return
    for entry in catalogue.table(kind).values():
        assert f"`{entry.name}`" in reference
        parameters = inspect.signature(_import(kind, kind, entry.class_path)).parameters
        for name in parameters.keys() - BASES[kind][1]:
            assert f"`{name}`" in reference, (entry.name, name)


def test_the_page_on_methods_is_whole():
    """Of each method that it treats a row and a bullet, by families; every switch that it names is
    one of its arguments."""
    page = (ROOT / "docs" / "methods.md").read_text()
    bullets = dict(
        re.findall(r"^- \*\*`(\w+)`\*\* (.*?)(?=^- \*\*`|^#|\Z)", page, re.MULTILINE | re.DOTALL)
    )
    methods = catalogue.table("methods")
    assert bullets.keys() <= methods.keys()
    for family in catalogue.families("methods").values():
        names = [entry.name for entry in family if entry.name in bullets]
        assert [name for name in bullets if name in names] == names
    for name, bullet in bullets.items():
        assert f"| `{name}` |" in page, name
        arguments = inspect.signature(
            _import("methods", "method", methods[name].class_path)
        ).parameters
        named = [words.split()[0] for words in re.findall(r"`([a-z_]+ [^`]+)`", bullet)]
        assert set(named) <= arguments.keys(), name


@pytest.mark.slow
def test_every_column_and_file_stands_in_the_reference(reference, folder):
    shown = shlex.split("--loggers tensorboard --callbacks heatmaps,wireless --data.validation 0.1")
    shown += shlex.split("--data.held_out_clients 0.34")
    flags = shlex.split(
        "--method fedavg --evaluation.judge finetuned --federation.clients 3 --name a"
    )
    assert main(["fit", *QUICK, *flags, *shown]) == 0
    run = folder / "runs" / "a"
    names = {
        re.sub(r"^class_\d+$", "class_0", name)
        for table in run.glob("*.csv")
        for name in CsvTable(table).header()
    }
    names |= json.loads((run / "summary.json").read_text()).keys()
    assert len(names) > 30
    assert [name for name in sorted(names) if f"`{name}`" not in reference] == []
    for path in run.iterdir():
        assert f"`{path.name}{'/' * path.is_dir()}" in reference


def test_every_exit_code_stands_in_the_reference(reference):
    for code in (0, RunFailed.exit_code, BadInput.exit_code, BUG, 130, 143):
        assert f"| {code} |" in reference
