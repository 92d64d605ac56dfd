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

from __future__ import annotations

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
from collections.abc import Mapping
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
PARTS = {"sites": ("sites",), "flower": ("sites", "nodes", "superlinks")}
"""What is killed: processes that answer a message, SuperNodes, and the SuperLink."""
FLAGS = f"""
--config kapc_exact_digits --loggers null --callbacks null --fabric.accelerator cpu --fabric.threads 1
--model mlp --model.hidden [16] --data.fraction 0.3 --data.validation 0.2 --federation.clients {CLIENTS}
--federation.local_epochs 20 --federation.batch_size 16 --federation.on_bad_client retry
"""
"""20 epochs: a second of training, so that kills fall into it, too."""


@dataclass
class Done:
    """What a campaign has come to."""

    kills: list[dict[str, Any]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """States and models that a site should have, and has not."""
    unlike: list[str] = field(default_factory=list)
    """What is other than in the simulation, or did not come to its end."""

    def compare(self, run: Path, sites: Mapping[int, Path], folder: Path) -> None:
        """Tables and personal models with those of a simulation."""
        config = config_of(folder / NAME / PACKAGE)
        simulated = simulate(config, folder)
        (simulated / "config.yaml").write_text(to_yaml(config))  # `export` reads it
        self.unlike += differences(simulated, run)
        self.lost += [
            line for c, site in sites.items() for line in other_model(c, site, simulated, folder)
        ]

    def counts(self) -> dict[str, Any]:
        """For the page."""
        return {
            "killed": Counter(kill["part"] for kill in self.kills),
            "lost": self.lost,
            "unlike": self.unlike,
        }


# ---------------------------------------------------------------- without Flower


def of_sites(folder: Path, count: int, seed: int, seconds: float = 2.0) -> Done:
    """Kill `count` processes of a deployment in `folder`, the working directory."""
    rounds = 2 * count  # a process may have ended before its moment
    words = [*FLAGS.split(), "--federation.rounds", str(rounds), "--rehearse", "false"]
    assert fl_train(["deploy", *words, "--out", NAME, "--sites", "sites"]) == 0
    nodes = nodes_of(folder, CLIENTS)
    killer = Killer(nodes, count, seed, seconds)
    app = folder / NAME / PACKAGE
    with killer.at_work():
        run = run_of(app, Processes(app, nodes), folder / "center")
    done = Done(killer.kills, killer.lost, ["a site was not killed"] * killer.left)
    sites = {node["client"]: Path(node["folder"]) / NAME for node in nodes}
    done.compare(run, sites, folder)
    return done


# ---------------------------------------------------------------- Flower


@dataclass
class Campaign:
    """Kills of the parts of one deployment, and what they did."""

    machines: Machines
    draws: random.Random
    done: Done = field(default_factory=Done)
    _flwr: subprocess.Popen[bytes] | None = None

    @property
    def folder(self) -> Path:
        """The run's, at the centre."""
        return self.machines.folder / "runs" / NAME

    def sites(self) -> dict[int, Path]:
        """Their folders."""
        return {site: self.machines.folder / f"at-{site}" / NAME for site in range(CLIENTS)}

    def rounds(self) -> int:
        """Those that the centre has finished."""
        table = self.folder / "metrics.csv"
        return max(0, table.read_text().count("\n") - 1) if table.is_file() else 0

    def strike_all(self, counts: Mapping[str, int]) -> None:
        """Kill so many of each part, one in a round, in a random order; then wait for the end of
        the run."""
        parts = [part.removesuffix("s") for part, count in counts.items() for _ in range(count)]
        self.draws.shuffle(parts)
        self._begin()
        self._until(1)  # all sites are there
        for part in parts:
            before, begun = self.rounds(), time.monotonic()
            at = self._strike(part)
            self._until(before + 1)
            seconds = round(time.monotonic() - begun, 1)
            self.done.kills.append(
                {"part": part, "round": before + 1, "at": round(at, 2), "seconds": seconds}
            )
            print(json.dumps(self.done.kills[-1]), flush=True)
            self.done.lost += [
                line for site in self.sites().values() for line in lost_rounds(site, before + 1)
            ]
        assert self._flwr is not None
        self._flwr.wait(PATIENCE)
        if not (self.folder / "summary.json").is_file():
            self.done.unlike.append("the run did not come to its end")

    def _begin(self) -> None:
        with (self.machines.folder / "flwr.log").open("ab") as log:
            self._flwr = self.machines.command(log, "flwr", *self.machines.run())

    def _until(self, rounds: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.rounds() < rounds:
            assert self._flwr is not None and self._flwr.poll() is None, (
                "flwr run has ended before its time"
            )
            assert time.monotonic() < deadline, f"round {rounds} did not end"
            time.sleep(0.05)

    def _strike(self, part: str) -> float:
        """Kill one `part` within the next seconds, and start it again where nobody else does; after
        how many seconds it was killed."""
        begun = time.monotonic()
        while True:
            time.sleep(self.draws.uniform(0, 4 if part == "site" else 12))
            site = self.draws.randrange(CLIENTS)
            there = list(self._pids(part, site))
            if there:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.draws.choice(there), signal.SIGKILL)
                    break
        at = time.monotonic() - begun
        if part == "node":
            self.machines.running[f"node{site}"].wait()
            self.machines.node(site)
        if part == "superlink":
            assert self._flwr is not None
            self.machines.running["superlink"].wait()
            self._flwr.wait(PATIENCE)
            self.machines.superlink()
            self._begin()
        return at

    def _pids(self, part: str, site: int) -> list[int]:
        if part == "site":
            # a ClientApp is a fork of the SuperExec, its child
            executor = self.machines.running[f"executor{site}"].pid
            children = Path(f"/proc/{executor}/task/{executor}/children").read_text()
            return [int(pid) for pid in children.split()]
        return [self.machines.running["superlink" if part == "superlink" else f"node{site}"].pid]


def of_flower(machines: Machines, counts: Mapping[str, int], seed: int) -> Done:
    """Kill so many parts of a deployment in the folder of `machines`, the working directory."""
    machines.patience = "again=30"
    machines.open(CLIENTS, *FLAGS.split(), "--federation.rounds", str(2 + sum(counts.values())))
    campaign = Campaign(machines, random.Random(seed))
    campaign.strike_all(counts)
    campaign.done.compare(campaign.folder, campaign.sites(), machines.folder)
    return campaign.done


def main() -> int:
    """Run a campaign; 1 if a model was lost, a run could not go on, or ended in other numbers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("where", choices=PARTS)
    for part in sorted({part for parts in PARTS.values() for part in parts}):
        parser.add_argument(f"--{part}", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start, counts = time.monotonic(), {part: getattr(args, part) for part in PARTS[args.where]}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        os.chdir(folder)
        if args.where == "sites":
            done = of_sites(folder, args.sites, args.seed)
        else:
            machines = Machines(environment(folder / "env"), folder)
            try:
                done = of_flower(machines, counts, args.seed)
            finally:
                machines.end()
    minutes = round((time.monotonic() - start) / 60, 1)
    print(json.dumps({**done.counts(), "minutes": minutes}, indent=1))
    return 1 if done.lost or done.unlike else 0


if __name__ == "__main__":
    sys.exit(main())
