"""Without a package of an extra, what needs it ends in one line with the command that installs it;
the rest works."""

import re
import sys

import pytest
from lines import run_line

from fl_lightning.cli import main
from fl_lightning.foundation import extras
from fl_lightning.foundation.exits import BUG
from fl_lightning.foundation.extras import install_hint

# what is absent is looked for by the command, not by its imports
from fl_lightning.lab.study import comparison as comparison

FIT = "fit --config kapc_exact_digits --federation.rounds 1 --fabric.accelerator cpu --loggers null"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "absent, line, begins, installs",
    [
        ("wandb", f"{FIT} --loggers wandb", "loggers.wandb=", "'wandb>="),
        ("tensorboard", f"{FIT} --loggers tensorboard", "loggers.tensorboard=", "'tensorboard>="),
        ("torchvision", f"{FIT} --model resnet18", "model=", "'torchvision>="),
        (
            "torchvision",
            f"{FIT} --data.source mnist --model cnn",
            "data.source=",
            "'torchvision>=",
        ),
        ("torchvision", f"{FIT} --data.partition rotated", "data.partition=", "'torchvision>="),
        (
            "matplotlib",
            f"{FIT} --data.source glyphs --model cnn",
            "data.source=",
            "'jinja2>=3.1' 'matplotlib>=",
        ),
        ("dp_accounting", f"{FIT} --method fedhkd", "method.sigma=", "'dp-accounting>="),
        ("jinja2", "report run", "report=", "'jinja2>="),
        ("pandas", "compare study", "compare=", "'pandas>=2.2' 'scipy>="),
    ],
)
def test_one_line_names_the_command(
    absent,
    line,
    begins,
    installs,
    folder,
    monkeypatch,
    capsys,
):
    """Exit code 2, and nothing is left behind."""
    for name in [
        name
        for name in sys.modules
        if name.partition(".")[0] == absent or name.endswith("models.resnet18")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, absent, None)
    assert run_line(line) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith(f"fl-train: error: {begins}")
    assert f"it needs {absent}, which is not installed: " in error
    assert re.search(rf"pip install .*{re.escape(installs)}", error)
    assert list(folder.iterdir()) == []


def test_without_any_extra_the_digits_are_trained(monkeypatch, folder):
    # scikit-learn has it
    names = [name for modules in extras.MODULES.values() for name in modules if name != "scipy"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)
    assert run_line(f"{FIT} --federation.local_epochs 1 --callbacks.progress null") == 0
    assert (folder / "runs" / "kapc_exact_digits-001" / "summary.json").is_file()


def test_a_module_of_no_extra_is_a_bug(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "fl_lightning.lab.status", None)
    assert main(["status"]) == BUG
    assert "Traceback" in capsys.readouterr().err
    assert install_hint("fl_lightning.lab.status") == install_hint(None) == ""
