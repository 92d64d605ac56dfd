"""Kill the parts of a deployment while it runs, and compare with a simulation that nobody disturbs.

`uv run python -m tests.deploy.kills sites --sites 25`: without Flower; a process that answers a
message, as a ClientApp does.
`uv run python -m tests.deploy.kills flower --sites 5 --nodes 10 --superlinks 5`: on real Flower,
with TLS and keys; a ClientApp, a SuperNode, or the SuperLink, after which the same `flwr run` goes
on.

Two sites run KAPC with `federation.on_bad_client: retry`. In each round one part is killed (kill
-9) at a random moment. After each kill every site's folder must hold the state of all rounds that
it has answered. At the end all tables and the sites' personal models must be the simulator's, bit
by bit.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from fl_lightning.cli import main as fl_train
from fl_lightning.configuration.resolve import to_yaml
from fl_lightning.sites.app import PACKAGE
from fl_lightning.sites.ends import config_of
from fl_lightning.sites.rehearsal import differences, simulate

from .machines import PATIENCE, Machines, environment
from .processes import NAME, Killer, Processes, lost_rounds, nodes_of, other_model, run_of

CLIENTS = 2
PARTS = {"sites": ("site",), "flower": ("site", "node", "superlink")}
"""What is killed: processes that answer a message, SuperNodes, and the SuperLink."""
MOST_BEGINS = 10
FLAGS = f"""
--config kapc_exact_digits --loggers null --callbacks null --fabric.accelerator cpu --fabric.threads 1
--model mlp --model.hidden [16] --data.fraction 0.3 --data.validation 0.2 --federation.clients {CLIENTS}
--federation.local_epochs 150 --federation.batch_size 16 --federation.on_bad_client retry
"""
"""150 epochs: a second of training, so that kills fall into it, too."""


@dataclass
class Done:
    """The result of a campaign."""

    kills: list[dict[str, Any]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """States and models that a site should have, and has not."""
    unlike: list[str] = field(default_factory=list)
    """Differences from the simulation, and parts of the campaign that were not carried out."""

    def compare(self, run, folder):
        """Compare tables and personal models with those of a simulation."""
        config = config_of(folder / NAME / PACKAGE)
        simulated = simulate(config, folder)
        (simulated / "config.yaml").write_text(to_yaml(config))  # `export` reads it
        self.unlike += differences(simulated, run)
        for client in range(CLIENTS):
            self.lost += other_model(client, folder / f"at-{client}" / NAME, simulated, folder)

    @property
    def killed(self):
        """Kills by part."""
        return Counter(kill["part"] for kill in self.kills)


def of_sites(folder, count, seed, seconds=1.0):
    """Kill `count` processes of a deployment without Flower in `folder`, the working directory."""
    rounds = 2 * count  # a process may have ended before its moment
    words = [*FLAGS.split(), "--federation.rounds", str(rounds), "--rehearse", "false"]
    assert fl_train(["deploy", *words, "--out", NAME, "--sites", "sites"]) == 0
    nodes, app = nodes_of(folder, CLIENTS), folder / NAME / PACKAGE
    killer = Killer(nodes, count, seed, seconds)
    with killer.at_work():
        run = run_of(app, Processes(app, nodes), folder / "center")
    done = Done(killer.kills, killer.lost, ["a site was not killed"] * killer.left)
    done.compare(run, folder)
    return done


@dataclass
class Campaign:
    """Kills of the parts of one deployment with Flower."""

    machines: Machines
    draws: random.Random
    done: Done = field(default_factory=Done)
    flwr: subprocess.Popen[bytes] = field(init=False)
    begun: int = 0
    """How often `flwr run` was called: a busy SuperLink may refuse it."""

    def strike_all(self, counts):
        """Kill `counts` of each part, one in a round, in a random order; then wait for the end of
        the run."""
        parts = [part for part, count in counts.items() for _ in range(count)]
        self.draws.shuffle(parts)
        self._begin()
        self._until(1)  # all sites are there
        for part in parts:
            before, begun = self._rounds(), time.monotonic()
            at = self._strike(part)
            self._until(before + 1)
            seconds = round(time.monotonic() - begun, 1)
            kill = {"part": part, "round": before + 1, "at": round(at, 2), "seconds": seconds}
            self.done.kills.append(kill)
            print(json.dumps(kill), flush=True)
            for client in range(CLIENTS):
                site = self.machines.folder / f"at-{client}" / NAME
                self.done.lost += lost_rounds(site, before + 1)
        self.flwr.wait(PATIENCE)

    def _rounds(self):
        """Rounds that the centre has finished."""
        table = self.machines.folder / "runs" / NAME / "metrics.csv"
        return max(0, table.read_text().count("\n") - 1) if table.is_file() else 0

    def _begin(self):
        self.begun += 1
        with (self.machines.folder / "flwr.log").open("ab") as log:
            self.flwr = self.machines.command(log, "flwr", *self.machines.run())

    def _until(self, rounds):
        deadline = time.monotonic() + PATIENCE
        while self._rounds() < rounds:
            assert time.monotonic() < deadline, f"round {rounds} did not end"
            if self.flwr.poll() is not None:
                assert self.begun < MOST_BEGINS, "flwr run has ended before its time"
                self._begin()
            time.sleep(0.05)

    def _strike(self, part):
        """Kill one `part` within the next seconds, and start it again where nobody else does; after
        how many seconds it was killed."""
        begun, running = time.monotonic(), self.machines.running
        while True:
            time.sleep(self.draws.uniform(0, 4 if part == "site" else 12))
            client = self.draws.randrange(CLIENTS)
            name = "superlink" if part == "superlink" else f"node{client}"
            pids = [running[name].pid]
            if part == "site":
                # a ClientApp is a fork of the SuperExec, its child
                executor = running[f"executor{client}"].pid
                children = Path(f"/proc/{executor}/task/{executor}/children").read_text()
                pids = [int(pid) for pid in children.split()]
            with contextlib.suppress(ProcessLookupError, IndexError):
                os.kill(self.draws.choice(pids), signal.SIGKILL)
                break
        at = time.monotonic() - begun
        if part == "node":
            running[name].wait()
            self.machines.node(client)
        if part == "superlink":
            running[name].wait()
            self.flwr.wait(PATIENCE)
            self.machines.superlink()
            self._begin()
        return at


def of_flower(machines, counts, seed):
    """Kill `counts` of each part of a deployment in the folder of `machines`, the working
    directory."""
    machines.patience = "again=30"
    machines.open(CLIENTS, *FLAGS.split(), "--federation.rounds", str(2 + sum(counts.values())))
    campaign = Campaign(machines, random.Random(seed))
    campaign.strike_all(counts)
    campaign.done.compare(machines.folder / "runs" / NAME, machines.folder)
    return campaign.done


def main():
    """Run a campaign; 1 if a model was lost, a run could not go on, or ended in other numbers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("where", choices=PARTS)
    for part in PARTS["flower"]:
        parser.add_argument(f"--{part}s", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        os.chdir(folder)
        if args.where == "sites":
            done = of_sites(folder, args.sites, args.seed)
        else:
            counts = {part: getattr(args, f"{part}s") for part in PARTS["flower"]}
            machines = Machines(environment(folder / "env"), folder)
            try:
                done = of_flower(machines, counts, args.seed)
            finally:
                machines.end()
    minutes = round((time.monotonic() - start) / 60, 1)
    shown = {"killed": done.killed, "lost": done.lost, "unlike": done.unlike, "minutes": minutes}
    print(json.dumps(shown, indent=1))
    return 1 if done.lost or done.unlike else 0


if __name__ == "__main__":
    sys.exit(main())
