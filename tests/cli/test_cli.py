import os
import signal
import subprocess
import sys

import pytest

from fl_lightning.cli import main
from fl_lightning.foundation.errors import RunFailed

QUICK = """
import sys
from fl_lightning.cli import main
for line in sys.argv[1:]:
    print("CODE", main(line.split()), file=sys.stderr)
heavy = {"torch", "torchvision", "lightning"} & sys.modules.keys()
assert not heavy, heavy
"""
QUICKLY = {
    "--help": 0,
    "fit --help": 0,
    "list": 0,
    "fti": 2,
    "fit --federation.ronds 3": 2,
    "fit --federation.rounds many": 2,
    "fit --data.alpha 0": 2,
    "fit --method fedvag": 2,
    "fit --method fedprox --help": 0,
    "list methods fedprox": 0,
    "--version": 0,
    "fit --config nothing.yaml": 2,
}
"""Lines that are answered before torch is imported, and the exit code."""


def test_answers_at_once():
    words = [sys.executable, "-c", QUICK, *QUICKLY]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    codes = [line.split()[1] for line in done.stderr.splitlines() if line.startswith("CODE")]
    assert codes == [str(code) for code in QUICKLY.values()]
    assert done.stderr.count("fl-train: error: ") == codes.count("2")


@pytest.mark.parametrize(
    "said, meant",
    {"fitt": "fit", "train": "fit", "evaluate": "test", "resume": "fit --resume"}.items(),
)
def test_an_unknown_command(refused, said, meant):
    begin = f"there is no command '{said}' (did you mean {meant}?); commands: fit, test, "
    assert refused(said).startswith(begin)


def _raise(error):
    raise error


@pytest.mark.parametrize(
    "action, code",
    [
        (lambda: _raise(RunFailed("client 3 failed:\nloss is not finite")), 1),
        (lambda: _raise(KeyboardInterrupt()), 130),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), 143),
        (lambda: _raise(ZeroDivisionError()), 70),
    ],
)
def test_exit_codes(engine, action, code, capsys):
    before = signal.getsignal(signal.SIGTERM)
    engine.action = action
    assert main(["fit"]) == code
    assert signal.getsignal(signal.SIGTERM) == before
    err = capsys.readouterr().err
    assert ("Traceback" in err) == (code == 70)
    if code == 1:
        assert err == "fl-train: error: client 3 failed: loss is not finite\n"
