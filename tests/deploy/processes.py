"""A deployment without Flower: every message is answered by a process of its own, as by a
ClientApp.

Processes are killed, too: Flower would add seconds to each round, and nothing to what they lose.
"""

import contextlib
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from safetensors.torch import load_file
from torch import equal

from fl_lightning.cli import main
from fl_lightning.run import fit_on_rank, launch
from fl_lightning.sites.app import fingerprint
from fl_lightning.sites.center import federation_of
from fl_lightning.sites.data import SiteFacts
from fl_lightning.sites.ends import answer, config_of
from fl_lightning.sites.exchange import Exchange, Limits, Reply
from fl_lightning.sites.rehearsal import LocalTransport
from fl_lightning.storage import manifest as disk

NAME = "app"
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["fl_lightning.sites.ends", __name__])


def client_app(out, app, node, message):
    """Answer one message."""
    out.send_bytes(answer(app, NAME, node, message))


class Processes:
    """A transport with a process for each message. `app`: the folder of the package."""

    def __init__(self, app, nodes):
        self.app, self.nodes, self.pool = app, nodes, ThreadPoolExecutor(8)
        self.arrived = SimpleQueue[tuple[str, Reply]]()
        self.number, self.running = 0, list[Any]()

    def addresses(self):
        """Sites by their place."""
        return list(range(len(self.nodes)))

    def push(self, address, message, ttl):
        """Start a process for the message."""
        self.number += 1
        self.pool.submit(self._carry, str(self.number), address, message)
        return str(self.number)

    def _carry(self, name, address, message):
        ours, theirs = SERVER.Pipe(duplex=False)
        work = (theirs, self.app, self.nodes[address], message)
        process = SERVER.Process(target=client_app, args=work)
        process.start()
        theirs.close()
        self.running.append(process)
        try:
            content = ours.recv_bytes()
        except EOFError:
            content = None
        process.join()
        self.running.remove(process)
        self.arrived.put((name, content))

    def pull(self, most):
        """The answers that have come."""
        return [self.arrived.get() for _ in range(self.arrived.qsize())]

    def pause(self):
        """Wait a moment."""
        time.sleep(0.02)


def in_process(app, nodes):
    """A transport that answers in this process."""

    def site(node):
        return lambda message: answer(app, NAME, node, message)

    return LocalTransport([site(node) for node in nodes])


def nodes_of(folder, count=2):
    """Node configurations of sites whose data lie in `sites` of `folder`."""
    return [
        {
            "client": k,
            "data": str(folder / "sites" / f"site-{k}.npz"),
            "folder": str(folder / f"at-{k}"),
        }
        for k in range(count)
    ]


def run_of(app, transport, folder, resume=False):
    """Run the centre of the package `app` in this process; the run folder."""
    config, facts = config_of(app), SiteFacts.read(app / "facts.json")
    folder.mkdir(exist_ok=resume)
    held = app.parents[1] / "sites" / "public.npz"
    public = held if held.is_file() else None
    exchange = Exchange(transport, "run", fingerprint(app, config), Limits(300, 300, 60))

    def put_together(*built):
        return federation_of(exchange, facts, public, *built)

    launch(config, fit_on_rank, folder, resume, put_together)
    return folder


# ---------------------------------------------------------------- kills


def lost_rounds(site, rounds):
    """A line if the folder of a site has no intact state after `rounds` rounds."""
    checkpoints = site / "checkpoints"
    saved = list(disk.manifests(checkpoints))
    lost = max(saved, default=0) < rounds
    return [f"{site} has the states of rounds {saved}, not of {rounds}"] if lost else []


def other_model(client, site, simulated, folder):
    """A line if the model in a site's folder is not that of `client` in the simulation."""
    models = []
    for name, run in (("simulated", simulated), ("deployed", site)):
        file = folder / f"{name}-{client}.safetensors"
        assert main(["export", "--run", str(run), "--client", str(client), "--out", str(file)]) == 0
        models.append(load_file(file))
    one, other = models
    same = one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    return [] if same else [f"the model of client {client} is another than the simulator's"]


class Killer:
    """Kills `count` processes, one in a round, at a random moment of the round's visits.

    `seconds`: of the longest wait before a kill. `kills` says what was killed, `lost` which sites'
    folders did not hold a round that they have answered.
    """

    def __init__(self, nodes, count, seed, seconds):
        self.nodes, self.left, self.seconds = nodes, count, seconds
        self.draws = random.Random(seed)
        self.kills = []
        self.lost = []

    @contextlib.contextmanager
    def at_work(self):
        """While this lasts."""
        ask = Exchange.ask

        def disturbed(exchange, t, kind, *rest):
            if kind != "visit":
                return ask(exchange, t, kind, *rest)
            over = threading.Event()
            killer = threading.Thread(target=self._strike, args=(exchange.transport, t, over))
            killer.start()
            try:
                return ask(exchange, t, kind, *rest)
            finally:
                over.set()
                killer.join()
                for node in self.nodes:
                    self.lost += lost_rounds(Path(node["folder"]) / NAME, t)

        Exchange.ask = disturbed  # type: ignore[assignment]
        try:
            yield
        finally:
            Exchange.ask = ask  # type: ignore[method-assign]

    def _strike(self, transport, t, over):
        """Kill a process, if one runs at the drawn moment; else a later round has its turn."""
        begun = time.monotonic()
        if not self.left or over.wait(self.draws.uniform(0, self.seconds)):
            return
        running = [process.pid for process in list(transport.running) if process.is_alive()]
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(self.draws.choice(running), signal.SIGKILL)
            self.left -= 1
            self.kills.append(
                {"part": "site", "round": t, "at": round(time.monotonic() - begun, 2)}
            )
            print(json.dumps(self.kills[-1]), flush=True)
