"""`fl-train` in real processes that are forked from one which has imported everything: starting one
costs no start-up.

A process can be told to strike at a named point, `WHAT WHEN WHERE`: WHAT is fsync, replace or
unlink, WHEN before, half (a write that was cut short: fsync only) or after, WHERE the kind of file:
row, server, initial, manifest, part of a table's name, or a folder's. Nothing in the package knows
of it.
"""

import contextlib
import errno
import faulthandler
import os
import random
import signal
import socket
import sys
import time
import traceback
import warnings
from pathlib import Path

KINDS = (
    "client-",
    "server-",
    "initial",
    "manifest-",
    "metrics.csv",
    "clients.csv",
    "relation",
    "traffic",
)


class Attempt:
    """One process; what it writes to stdout and stderr is in `err`."""

    def __init__(self, argv, said, prepare, env):
        self.said = said
        self.code = None
        with warnings.catch_warnings():
            # Python 3.12 on threads; torch has none here
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid:
            return
        code = 99
        try:
            os.environ.update(env)
            out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(out, stream)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
            prepare()
            from fl_lightning.cli import main

            code = main(argv)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    @property
    def err(self):
        return self.said.read_text()

    def ended(self):
        """Whether it has ended; `code` is its exit code, or minus the signal."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def wait(self, seconds=300.0):
        """Its exit code; it is killed, and TimeoutError raised, if it takes longer."""
        deadline = time.monotonic() + seconds
        while not self.ended():
            if time.monotonic() > deadline:
                self.send(signal.SIGUSR1)  # let it say where it stands
                time.sleep(1.0)
                self.send(signal.SIGKILL)
                raise TimeoutError(f"still running after {seconds} s: {self.err}")
            time.sleep(0.005)
        assert self.code is not None
        return self.code

    def send(self, number):
        if not self.ended():
            os.kill(self.pid, number)


def nothing():
    """No preparation."""


def forked(argv, said, prepare=nothing):
    """`fl-train argv` in a process of its own, after `prepare()` in it."""
    return Attempt(argv, said, prepare, {})


def ranks(count, argv, said, prepare=nothing, rank=0):
    """`fl-train argv` in `count` processes that are started as torchrun starts them; `rank` is
    prepared (-1: all)."""
    port = free_port()
    shared = {
        "TORCHELASTIC_RUN_ID": "x",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GROUP_RANK": "0",
    }
    shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    line = [*argv, "--fabric.devices", str(count)]
    return [
        Attempt(
            line,
            said.with_name(f"{said.name}-{r}"),
            prepare if rank in (r, -1) else nothing,
            {**shared, "RANK": str(r), "LOCAL_RANK": str(r)},
        )
        for r in range(count)
    ]


def free_port():
    """A port below those that the system gives to outgoing connections: nobody takes it before the
    ranks meet there."""
    while True:
        port = random.randrange(15000, 30000)
        with socket.socket() as taken, contextlib.suppress(OSError):
            taken.bind(("", port))
            return port


# ---------------------------------------------------------------- in the process that is to fail


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def refuse():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def strike(point, nth, blow=die):
    """What prepares a process to suffer `blow` when it comes to `point` for the `nth` time (from
    1)."""

    def prepare():
        what, when, where = point.split()
        seen = [0]
        real = getattr(os, what)

        def hooked(*args, **kwargs):
            target = args[1] if what == "replace" else args[0]
            path = (
                os.readlink(f"/proc/self/fd/{target}")
                if isinstance(target, int)
                else os.fspath(target)
            )
            due = False
            if kind(path) == where:
                seen[0] += 1
                due = seen[0] == nth
            if due and when == "half":
                size = os.path.getsize(path)
                os.truncate(path, size - 7 if path.endswith(".csv") else size // 2)
            if due and when != "after":
                blow()
            result = real(*args, **kwargs)
            if due and when == "after":
                blow()
            return result

        setattr(os, what, hooked)

    return prepare


def kind(path):
    """What kind of file or folder `path` is, in the words of a point."""
    file = Path(path)
    if file.is_dir():
        return file.name
    if file.suffix == ".npz" or ".npz" in file.name:
        return file.parent.name
    found = next((k.rstrip("-") for k in KINDS if k in file.name), "other")
    return "row" if found == "client" else found
