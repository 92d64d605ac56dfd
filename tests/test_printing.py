"""No line that is printed ends a run, whatever characters names have and the terminal takes."""

import io
import os
import socket
import subprocess
import sys

import pytest
from refusals import refuses

from fl_lightning.foundation import port
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.exits import guarded
from fl_lightning.foundation.parallel import environment_of
from fl_lightning.lab.study.workers import run_all


@pytest.mark.parametrize(
    "encoding, name", [("ascii", "\\u0141\\xf3d\\u017a"), ("latin-1", "\\u0141ód\\u017a")]
)
def test_a_name_that_the_terminal_lacks_is_printed_in_escapes(encoding, name, monkeypatch):
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)

    def work():
        print("Łódź")
        raise BadInput("client", "Łódź", "東京 is no client")

    assert guarded(work) == 2
    out.flush()
    err.flush()
    assert out.buffer.getvalue().decode(encoding) == f"{name}\n"
    assert name in err.buffer.getvalue().decode(encoding)


def test_what_workers_print_is_kept_in_utf_8(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    jobs = run_all(lambda name: print(name), ["Łódź"], 1, tmp_path, lambda numbers: None)
    assert [ended.error for ended in jobs] == [None]
    assert (tmp_path / "worker-1.log").read_text(encoding="utf-8") == "Łódź\n"


def test_the_command_line_itself_prints_any_name(tmp_path):
    line = [sys.executable, "-m", "fl_lightning", "status", str(tmp_path / "Łódź")]
    done = subprocess.run(
        line, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"}, check=False
    )
    assert (
        done.returncode == 2
        and b"\\u0141\\xf3d\\u017a" in done.stderr
        and b"Traceback" not in done.stderr
    )


# ---------------------------------------------------------------- a port that is in use


@pytest.fixture
def taken():
    """A port that something listens at."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen(1)
        yield listener.getsockname()[1]


def test_own_processes_meet_at_a_free_port_whatever_is_left_in_the_environment(taken, monkeypatch):
    monkeypatch.setenv(port.NAME, str(taken))
    environment = environment_of(None)
    assert environment.main_port == environment.main_port != taken


def test_processes_that_cannot_meet_are_one_line(taken, monkeypatch):
    from torch.distributed import TCPStore

    monkeypatch.setenv(port.NAME, str(taken))
    with (
        refuses(rf"MASTER_PORT='{taken}'.*choose a free one"),
        port.port_errors_named(),
    ):
        TCPStore("localhost", taken, 2, True)
