"""What Flower's two ends need beside Flower: frames of bytes, and a site's process that is found or
started.

The standard library alone: `fl-train deploy` copies this file into the app's folder, where nothing
else is installed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
START = 180.0
"""Seconds for a site's process to load torch and its data."""
WAIT = 5.0
"""Seconds that a process which is being started elsewhere has before the next try: each try costs a
Python's start."""
SIMULATED = 600.0
"""Seconds without a message after which the process of a simulated node ends: all others may have
to start first."""
LENGTHS = struct.Struct(">IQ")
"""Of a frame: bytes of its JSON and of its body."""
REFUSED = "refused.txt"
"""In a site's folder: the sentence that its process has left for the centre, where it could not
start."""
FLOWERS = ("flower-", "flwr-")
"""How the names of Flower's commands begin."""
KEEPERS = ("flower-supernode", "flwr-simulation")
"""Commands of Flower that a site belongs to: it ends with them."""
LOOK = 1.0
"""Seconds between two looks whether the process that this one belongs to is still there (ours)."""
GRACE = 10.0
"""Seconds that a process then has to close what is open: as `fl-train` gives its ranks."""
SLACK = 2**28
"""Bytes for whatever else a process does while it takes in an answer: threads, connections
(ours)."""
COMMAND = ("-m", "fl_lightning.sites.ends")


def write_frame(out: Any, about: dict[str, Any], body: bytes = b"") -> None:
    """One frame into a file or a socket's file."""
    text = json.dumps(about).encode()
    out.write(LENGTHS.pack(len(text), len(body)) + text + body)
    out.flush()


def read_frame(source: Any) -> tuple[dict[str, Any], bytes]:
    """The next frame; raises EOFError where the other end has gone."""
    head = source.read(LENGTHS.size)
    if len(head) < LENGTHS.size:
        raise EOFError
    text, body = LENGTHS.unpack(head)
    content = source.read(text + body)
    if len(content) < text + body:
        raise EOFError
    return json.loads(content[:text]), content[text:]


@contextlib.contextmanager
def memory_for(count: int) -> Iterator[None]:
    """Within this, the process may take `count` bytes more and `SLACK`; beyond that it gets a
    `MemoryError`. Linux."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.is_file() else []
    now = next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmData:")), None)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    least = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    if now is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (min([now + count + SLACK, *least]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def python_of(config: Any) -> str:
    """The Python that has fl_lightning: `python` of the node's or run's configuration, else that of
    `fl-train`."""
    if config.get("python"):
        return str(config["python"])
    command = shutil.which("fl-train")
    if command is not None:
        beside = Path(command).resolve().parent / "python"
        return str(beside) if beside.exists() else sys.executable
    return sys.executable


# ---------------------------------------------------------------- processes that end with another


class Process(NamedTuple):
    """What the system says of a process."""

    state: str
    parent: int
    command: str


def process_of(pid: int) -> Process | None:
    """The process with this number; None: there is none, or it cannot be looked at."""
    place = Path("/proc")
    try:
        if (place / "self" / "stat").is_file():
            stat = (place / str(pid) / "stat").read_text(encoding="utf-8")
            state, parent, *_ = stat.rpartition(")")[2].split()
            command = (
                (place / str(pid) / "cmdline")
                .read_bytes()
                .replace(b"\0", b" ")
                .decode(errors="replace")
            )
        else:  # macOS
            ps = ["ps", "-o", "stat=,ppid=,command=", "-p", str(pid)]
            state, parent, command = subprocess.run(
                ps, capture_output=True, text=True
            ).stdout.split(None, 2)
        return Process(state, int(parent), command)
    except (OSError, ValueError):
        return None


def keeper() -> int | None:
    """The number of the SuperNode, or of the simulation, among whose descendants this process is;
    None: there is none.

    Where SuperNodes do not start ClientApps themselves, it is the outermost command of Flower's.
    """
    outermost, pid = None, os.getppid()
    while pid > 1 and (process := process_of(pid)) is not None:
        # behind a Python's name, too
        names = [Path(word).name for word in process.command.split()[:3]]
        if any(name in KEEPERS for name in names):
            return pid
        if any(name.startswith(FLOWERS) for name in names):
            outermost = pid
        pid = process.parent
    return outermost


def end_with(pid: int) -> None:
    """End this process soon after process `pid` has ended, however that came: `kill -9` tells
    nobody."""

    def watch() -> None:
        while (process := process_of(pid)) is not None and process.state[0] not in "ZX":
            time.sleep(LOOK)
        os.kill(os.getpid(), signal.SIGTERM)  # unwind: close what is open
        time.sleep(GRACE)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


# ---------------------------------------------------------------- a site


def node_of(node: Any, run: Any) -> dict[str, Any]:
    """A node's configuration; a node of Flower's simulation engine gets one by its number, with
    data in `sites`."""
    config = dict(node)
    if "client" not in config and "partition-id" in config and run.get("sites"):
        client = int(config["partition-id"])
        own = Path(str(run["sites"])) / f"site-{client}"
        config |= {
            "client": client,
            "data": f"{own}.npz",
            "folder": str(own),
            "python": run.get("python"),
            "idle": SIMULATED,
        }
    return config


def answered(body: bytes, run: str, config: Any) -> bytes:
    """The answer of the site's process, which is started again where it ends before it has
    answered."""
    if Path(run).name != run or not config.get("folder") or "client" not in config:
        return failed(body, config, "its node config lacks client, data or folder")
    folder = Path(str(config["folder"])) / run
    folder.mkdir(parents=True, exist_ok=True)
    for _ in range(3):
        connected = connect(folder, config)
        if isinstance(connected, str):
            return failed(body, config, connected)
        try:
            with connected, connected.makefile("rwb") as file:
                write_frame(file, {"app": str(HERE)}, body)
                return read_frame(file)[1]
        except (OSError, EOFError):  # it has died, or was of an earlier app and has made room
            time.sleep(0.2)
    return failed(body, config, "its process died three times; see site.log in the site's folder")


def socket_of(folder: Path) -> Path:
    """Where the process of `folder` listens: a short path that only this user may enter."""
    digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    place = Path(tempfile.gettempdir()) / f"fl-site-{os.getuid()}-{digest}"
    place.mkdir(mode=0o700, exist_ok=True)
    if place.stat().st_uid != os.getuid():
        raise PermissionError(place)
    return place / "socket"


def connect(folder: Path, config: Any) -> socket.socket | str:
    """A connection to the site's process, started where there is none; a sentence where it cannot
    be started."""
    path, process, earliest = socket_of(folder), None, 0.0
    deadline = time.monotonic() + START
    while time.monotonic() < deadline:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(path))
            return connection
        except OSError:
            connection.close()
        if process is not None and process.poll() is not None:
            sentence = folder / REFUSED
            if process.returncode > 0 and sentence.is_file():
                return sentence.read_text(encoding="utf-8")
            if process.returncode > 0:
                return "its process does not start; see site.log in the site's folder"
            # another one had the folder; or it was killed as it began
            pause = WAIT if process.returncode == 0 else 0.0
            process, earliest = None, time.monotonic() + pause
        if process is None and time.monotonic() >= earliest:
            process = started(folder, path, config)
        time.sleep(0.1)
    return f"its process did not start within {START:.0f} s"


def started(folder: Path, path: Path, config: Any) -> subprocess.Popen[bytes]:
    """The site's process, which outlives this one, and ends with the SuperNode."""
    command = [python_of(config), *COMMAND, "site", "--app", str(HERE), "--socket", str(path)]
    command += ["--folder", str(folder)]
    for key in ("data", "client", "site", "idle"):
        if key in config:
            command += [f"--{key}", str(config[key])]
    if (pid := keeper()) is not None:
        command += ["--keeper", str(pid)]
    with (folder / "site.log").open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=dict(os.environ),
        )


def failed(body: bytes, config: Any, why: str) -> bytes:
    """An answer that says so: the header of a safetensors file without tensors."""
    about: dict[str, Any] = {}
    try:
        size = int.from_bytes(body[:8], "little")
        header = json.loads(json.loads(body[8 : 8 + size])["__metadata__"]["fl_lightning"])
        about = {key: header[key] for key in ("kind", "run", "round", "client")}
    except (ValueError, KeyError, TypeError):
        pass
    about |= {"failed": ["data", why], "site": config.get("client"), "name": config.get("site", "")}
    text = json.dumps({"__metadata__": {"fl_lightning": json.dumps(about)}}).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
