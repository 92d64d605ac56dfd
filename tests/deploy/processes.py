"""A deployment without Flower: sites are processes behind sockets, and so are relays, as Flower's
ClientApps are.

It kills sites and relays, too: a Flower of its own would add seconds to each round, and nothing to
what they lose.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from fl_lightning.run import fit_on_rank, launch
from fl_lightning.sites.app import PACKAGE, fingerprint
from fl_lightning.sites.center import federation_of
from fl_lightning.sites.data import Facts
from fl_lightning.sites.ends import config_of
from fl_lightning.sites.exchange import Come, Exchange, Limits

from .kept import lost_rounds

NAME = "app"
A_VISIT = 0.3
"""Seconds that a relay lives: its start, and the training of a small client."""
RELAY = f"""
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from {PACKAGE} import relay
body = sys.stdin.buffer.read()
sys.stdout.buffer.write(relay.answered(body, {NAME!r}, json.loads(sys.argv[2])))
"""
"""What a ClientApp does, with the app's own copy of the relay."""


class Processes:
    """A transport to sites that are processes, each behind its socket. `app`: the folder that holds
    the package."""

    def __init__(self, app: Path, configs: Sequence[dict[str, Any]]) -> None:
        self.app, self.configs, self.pool = app, configs, ThreadPoolExecutor(8)
        self.come, self.number, self.relays = (
            SimpleQueue[tuple[str, Come]](),
            0,
            list[subprocess.Popen[bytes]](),
        )

    def addresses(self) -> list[int]:
        """Sites by their place."""
        return list(range(len(self.configs)))

    def push(self, address: int, message: bytes, ttl: float) -> str:
        """A process for the message, as Flower has it."""
        self.number += 1
        name = str(self.number)
        self.pool.submit(self._carry, name, address, message)
        return name

    def _carry(self, name: str, address: int, message: bytes) -> None:
        command = [sys.executable, "-c", RELAY, str(self.app), json.dumps(self.configs[address])]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as relay:
            self.relays.append(relay)
            answer, _ = relay.communicate(message)
            self.relays.remove(relay)
        self.come.put((name, answer if relay.returncode == 0 else None))

    def pull(self, most: int) -> list[tuple[str, Come]]:
        """What has come."""
        return [self.come.get() for _ in range(self.come.qsize())]

    def pause(self) -> None:
        """A moment."""
        time.sleep(0.02)


def configs_of(folder: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """Node configurations of sites with these names, whose data lie in `sites` of `folder`."""
    return [
        {
            "client": k,
            "site": name,
            "data": str(folder / "sites" / f"site-{k}.npz"),
            "python": sys.executable,
            "folder": str(folder / f"at-{name}"),
            "idle": 120.0,
        }
        for k, name in enumerate(names)
    ]


def pid_of(config: dict[str, Any]) -> int:
    """Of a site's process, running or not."""
    return int((Path(config["folder"]) / NAME / "lock").read_text().split()[1])


def end_all(configs: Sequence[dict[str, Any]]) -> None:
    """Kill the processes of sites."""
    for config in configs:
        with contextlib.suppress(OSError, ValueError, IndexError):
            os.kill(pid_of(config), signal.SIGKILL)


def run_of(
    app: Path, configs: Sequence[dict[str, Any]], folder: Path, resume: bool = False, **more: Any
) -> Path:
    """A centre in this process, and the sites; the run folder. `app`: the package. `more`: see
    `Exchange`."""
    config = config_of(app)
    mark = fingerprint(app, config)
    folder.mkdir(exist_ok=resume)
    exchange = Exchange(
        Processes(app.parent, configs), "run", mark, **{"limits": Limits(300, 300, 60), **more}
    )
    held = app.parents[1] / "sites" / "public.npz"
    public = held if held.is_file() else None
    put_together = partial(federation_of, exchange, Facts.read(app / "facts.json"), public)
    launch(config, fit_on_rank, folder, resume, put_together)
    return folder


# ---------------------------------------------------------------- kills


class Killer:
    """Kills one part in each round, at a random moment of its visits: a site's process, or a relay.

    `seconds`: of the longest wait before a kill. What was killed in which round is in `kills`;
    `lost` are sites whose folder did not hold a round that they have answered.
    """

    def __init__(
        self, configs: Sequence[dict[str, Any]], parts: Sequence[str], seed: int, seconds: float
    ) -> None:
        self.configs, self.left, self.draws, self.seconds = (
            configs,
            list(parts),
            random.Random(seed),
            seconds,
        )
        self.draws.shuffle(self.left)
        self.visit = A_VISIT
        self.kills: list[dict[str, Any]] = []
        self.lost: list[str] = []

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """While this lasts."""
        ask = Exchange.ask

        def disturbed(exchange: Exchange, t: int, kind: str, *rest: Any) -> Any:
            if kind != "visit":
                return ask(exchange, t, kind, *rest)
            over = threading.Event()
            killer = threading.Thread(target=self._strike, args=(exchange.transport, t, over))
            killer.start()
            try:
                return ask(exchange, t, kind, *rest)
            finally:
                over.set()
                # the next round begins with it dead at the latest, and starts it again
                killer.join()
                self.lost += [
                    line for c in self.configs for line in lost_rounds(Path(c["folder"]) / NAME, t)
                ]

        Exchange.ask = disturbed  # type: ignore[assignment]
        try:
            yield
        finally:
            Exchange.ask = ask  # type: ignore[method-assign]

    def _strike(self, transport: Processes, t: int, over: threading.Event) -> None:
        """Kill the next part, where there is one at that moment; else it is left for another
        round."""
        if not self.left:
            return
        begun = time.monotonic()
        there: list[int] = []
        if self.left[-1] == "relay":
            while not self._relays(transport) and not over.wait(0.002):
                pass
            over.wait(self.draws.uniform(0, self.visit))
            there = self._relays(transport)
            # it has ended before: on this machine visits are shorter
            self.visit /= 1 if there else 2
        else:
            over.wait(self.draws.uniform(0, self.seconds))
            there = self._sites()
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(self.draws.choice(there), signal.SIGKILL)
            self.kills.append(
                {"part": self.left.pop(), "round": t, "at": round(time.monotonic() - begun, 2)}
            )
            print(json.dumps(self.kills[-1]), flush=True)

    def _relays(self, transport: Processes) -> list[int]:
        return [relay.pid for relay in list(transport.relays) if relay.poll() is None]

    def _sites(self) -> list[int]:
        with contextlib.suppress(OSError, ValueError, IndexError):
            return [pid for pid in map(pid_of, self.configs) if Path(f"/proc/{pid}").exists()]
        return []
