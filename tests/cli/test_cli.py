from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from fl_lightning.cli import main
from fl_lightning.foundation.errors import RunFailed

QUICK = """
import sys
from fl_lightning.cli import main
code = main(sys.argv[1:])
heavy = {"torch", "torchvision", "lightning"} & sys.modules.keys()
assert not heavy, heavy
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("--help", 0),
        ("fit --help", 0),
        ("test --help", 0),
        ("list", 0),
        ("fti", 2),
        ("fit --federation.ronds 3", 2),
        ("fit --federation.rounds many", 2),
        ("fit --data.alpha 0", 2),
        ("fit --method fedvag", 2),
        ("fit --method fedprox --help", 0),
        ("list methods fedprox", 0),
        ("--version", 0),
        ("fit --config nothing.yaml", 2),
    ],
)
def test_answers_at_once(line: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", QUICK, *line.split()], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert bool(done.stderr) == (code == 2)


def test_no_command_at_all_gives_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "  check-method  Test your own method" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("said", "meant"),
    [("fitt", "fit"), ("train", "fit"), ("evaluate", "test"), ("resume", "fit --resume")],
)
def test_an_unknown_command(refused: Callable[..., str], said: str, meant: str) -> None:
    begin = f"there is no command '{said}' (did you mean {meant}?); commands: fit, test, "
    assert refused(said).startswith(begin)


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("action", "code"),
    [
        (lambda: _raise(RunFailed("client 3 failed:\nloss is not finite")), 1),
        (lambda: _raise(KeyboardInterrupt()), 130),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), 143),
        (lambda: _raise(ZeroDivisionError()), 70),
    ],
)
def test_exit_codes(
    engine: Any, action: Callable[[], None], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    engine.action = action
    assert main(["fit"]) == code
    assert signal.getsignal(signal.SIGTERM) == before
    err = capsys.readouterr().err
    assert ("Traceback" in err) == (code == 70)
    if code == 1:
        assert err == "fl-train: error: client 3 failed: loss is not finite\n"
