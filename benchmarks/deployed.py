"""What a deployment costs beside a simulation: seconds of a round, and the memory that a hostile answer takes.

`uv run python -m benchmarks.deployed seconds`: a round of ten clients with digits, four ways: simulated in one process;
sites behind sockets, without Flower; under Flower's simulation engine; with a SuperLink and SuperNodes.
`uv run python -m benchmarks.deployed huge --gigabytes 10`: one of two sites answers with so many bytes (zeros;
`--random`: bytes of which no piece is like another), and the greatest memory of each process while the run goes on.
FL_FLOWER names an environment with Flower that is there already; else one is made.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

from fl_lightning.cli import main as fl_train
from fl_lightning.cli.ends import config_of
from fl_lightning.deploy.app import PACKAGE
from fl_lightning.deploy.rehearsal import differences, simulate
from fl_lightning.results.folder import RunFolder
from tests.deploy.machines import Machines, environment
from tests.deploy.processes import NAME, configs_of, end_all, run_of

ROOT = Path(__file__).resolve().parents[1]
FLAGS = """
--config kapc_digits --loggers null --callbacks null --fabric.accelerator cpu --fabric.threads 1 --rehearse false
"""
HOSTILE = """
    if int(config["client"]) == 1 and b'"visit' in body_of(message)[:4096]:
        answer = {answer}
    return Message"""
"""In place of the ClientApp's last line: the answer of client 1 to a visit."""


def seconds_of(run: Path) -> float:
    """A round of a run folder: the median of all but the first, in which processes start."""
    return median(row["seconds"] for row in RunFolder(run).read("metrics")[1:])


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A folder to work in, which goes."""
    with tempfile.TemporaryDirectory() as made:
        os.chdir(made)
        try:
            yield Path(made)
        finally:
            os.chdir(ROOT)


def seconds(flower: Path, clients: int, rounds: int, ways: Sequence[str]) -> dict[str, float]:
    """Seconds of a round, by the way that it is run; every way must come to the simulator's numbers."""
    words = [*FLAGS.split(), "--federation.clients", str(clients), "--federation.rounds", str(rounds)]
    taken: dict[str, float] = {}
    for way in ways:
        with workplace() as folder:
            if way == "sockets":
                assert fl_train(["deploy", *words, "--out", NAME, "--sites", "sites"]) == 0
                configs = configs_of(folder, [f"s{k}" for k in range(clients)])
                try:
                    run = run_of(folder / NAME / PACKAGE, configs, folder / "center")
                finally:
                    end_all(configs)
            else:
                run = _by_flower(flower, folder, words, clients if way == "supernodes" else 0, clients)
            simulated = simulate(config_of(folder / NAME / PACKAGE), folder)
            assert differences(simulated, run) == []
            taken.setdefault("simulated", seconds_of(simulated))
            taken[way] = seconds_of(run)
            print(f"{way}: {taken[way]:.2f} s a round, simulated beside it {seconds_of(simulated):.2f} s", flush=True)
    return taken


def _by_flower(flower: Path, folder: Path, words: list[str], nodes: int, clients: int) -> Path:
    """A run with so many SuperNodes; none: under the simulation engine."""
    machines = Machines(flower, folder)
    try:
        assert fl_train(["deploy", *words, "--out", NAME, "--sites", "sites"]) == 0
        machines.open(nodes) if nodes else machines.simulation(clients)
        out = machines.flwr(*machines.run())
        assert (folder / "runs" / NAME / "summary.json").is_file(), out[-3000:]
    finally:
        machines.end()
    return folder / "runs" / NAME


# ---------------------------------------------------------------- a hostile answer


def huge(flower: Path, gigabytes: float, random: bool) -> dict[str, int]:
    """Greatest memory in MiB by kind of process, in a run that goes on without the site that answers so."""
    size = int(gigabytes * 2**30)
    answer = f"__import__('numpy').random.default_rng(0).bytes({size})" if random else f"bytes({size})"
    with workplace() as folder:
        machines = Machines(flower, folder)
        machines.patience = "again=600 visit=900"
        words = [*FLAGS.split(), "--federation.clients", "2", "--federation.rounds", "1"]
        assert (
            fl_train(["deploy", *words, "--federation.on_bad_client", "skip", "--out", NAME, "--sites", "sites"]) == 0
        )
        ends = folder / NAME / PACKAGE / "flower.py"
        parts = ends.read_text().rsplit("\n    return Message", 1)
        ends.write_text(HOSTILE.format(answer=answer).join(parts))
        watch = _Memory(machines)
        try:
            machines.open(2)
            watch.start()
            out = machines.flwr(*machines.run())
            run = folder / "runs" / NAME
            print(f"the run came to its end: {(run / 'summary.json').is_file()}")
            print([(row["client"], row["outcome"]) for row in RunFolder(run).read("failures")] or out[-2000:])
            print("\n".join(line for line in (run / "log.txt").read_text().splitlines() if "failed" in line))
        finally:
            watch.over.set()
            machines.end()
    return dict(watch.most)


class _Memory(threading.Thread):
    """Notes the greatest memory of each kind of process of a deployment, until it is `over`."""

    KINDS = ("flower-superlink", "flwr-serverapp", "flower-supernode", "flwr-clientapp", "ends center", "ends site")

    def __init__(self, machines: Machines) -> None:
        super().__init__(daemon=True)
        self.machines, self.over, self.most = machines, threading.Event(), defaultdict[str, int](int)

    def run(self) -> None:
        """Look again and again."""
        while not self.over.wait(0.5):
            for pid, command in self.machines.processes():
                kind = next((kind for kind in self.KINDS if kind in command), "")
                with contextlib.suppress(OSError, StopIteration):
                    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
                    self.most[kind] = max(self.most[kind], peak // 1024)


def main() -> int:
    """Measure what is named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("seconds", "huge"))
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", default="sockets,engine,supernodes")
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--random", action="store_true")
    args = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as made:
        ways = args.ways.split(",")
        flower = environment(Path(made) / "env") if args.what == "huge" or ways != ["sockets"] else Path()
        if args.what == "seconds":
            print(seconds(flower, args.clients, args.rounds, ways))
        else:
            print(huge(flower, args.gigabytes, args.random))
    print(f"{(time.monotonic() - begun) / 60:.1f} minutes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
