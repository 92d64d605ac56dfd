"""What carries a message to a site's process: it starts the process, and starts it again where it
was killed."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fl_lightning.sites import relay

LISTENS = (
    "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); "
    "time.sleep(20)"
)
KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Takes programs: the site's process is the first of them, started again the next one; gives
    those started."""
    monkeypatch.setattr(relay, "socket_of", lambda folder: tmp_path / "socket")
    begun: list[subprocess.Popen[bytes]] = []

    def use(*programs: str) -> list[subprocess.Popen[bytes]]:
        def started(folder: Path, path: Path, config: Any) -> subprocess.Popen[bytes]:
            begun.append(subprocess.Popen([sys.executable, "-c", programs[len(begun)], str(path)]))
            return begun[-1]

        monkeypatch.setattr(relay, "started", started)
        return begun

    yield use
    for process in begun:
        process.kill()
        process.wait()


def test_a_process_that_is_killed_as_it_begins_is_started_again(
    processes: Any, tmp_path: Path
) -> None:
    begun = processes(KILLED, KILLED, LISTENS)
    connection = relay.connect(tmp_path, {})
    assert isinstance(connection, socket.socket) and len(begun) == 3
    connection.close()


def test_one_that_ends_with_an_error_is_not(processes: Any, tmp_path: Path) -> None:
    begun = processes("raise SystemExit(1)", LISTENS)
    assert (
        relay.connect(tmp_path, {})
        == "its process does not start; see site.log in the site's folder"
    )
    assert len(begun) == 1


def test_killed_for_good_it_is_given_up(
    processes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "START", 0.5)
    processes(*[KILLED] * 50)
    assert relay.connect(tmp_path, {}) == "its process did not start within 0 s"
