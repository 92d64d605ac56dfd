"""Kill runs, resume them, compare: `uv run python tests/faults/kills.py --kills 100`.

A run is killed (kill -9) again and again, at named points of writing or at random moments after
training has begun, and resumed each time, until it is done; then all its tables, relations and
weights must equal those of a run that was never killed. Every kill is a line of the log. On two
ranks the processes are started as torchrun starts them, and one of them is killed, or both.
"""

import argparse
import importlib.util
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from forked import forked, ranks, strike

ROUNDS = 10
SMALL = f"""
--config kapc_exact_digits --loggers null --callbacks.heatmaps null --callbacks.progress null --fabric.accelerator cpu
--fabric.threads 1 --fabric.timeout 30 --data.fraction 0.4 --model.hidden [16] --federation.clients 5
--federation.local_epochs 1 --federation.rounds {ROUNDS} --federation.participation 0.6
--callbacks.checkpoint.seconds 0
"""
RUNS = {
    "kapc": "--optimizer.momentum 0.5 --optimizer.keep_state true --callbacks "
    "layerselection,quantize",
    "fedavg": "--method fedavg --callbacks.checkpoint.keep 1 --callbacks.checkpoint.best false",
    # the default: tables run ahead of checkpoints
    "rare": "--method fedavg --callbacks.checkpoint.seconds 10",
}
WRITING = [  # within the writing of a checkpoint
    "fsync half row",
    "fsync before row",
    "fsync after row",
    "replace before row",
    "replace after row",
    "fsync before rows",
    "fsync after rows",
    "fsync half server",
    "fsync after server",
    "replace before server",
    "replace after server",
    "fsync before checkpoints",
    "fsync after checkpoints",
    "fsync half manifest",
    "fsync before manifest",
    "replace before manifest",
    "replace after manifest",
    "unlink before row",
    "unlink after row",
    "unlink before server",
    "unlink before manifest",
    "unlink after manifest",
]
ON_RANK_1 = [
    point
    for point in WRITING
    if point.endswith((" row", " rows")) and not point.startswith("unlink")
]
TABLES = [
    "fsync half metrics.csv",
    "fsync after metrics.csv",
    "fsync half clients.csv",
    "replace after relation",
]


@dataclass
class Log:
    """What happened."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    compared: int = 0

    def counts(self):
        """Kills by ranks and sort, rounds lost, seconds until a surviving rank stopped."""
        sorts = Counter(
            f"{line['ranks']} rank{'s' * (line['ranks'] > 1)}, {line['sort']}"
            for line in self.lines
        )
        waits = sorted(
            line["survivor_seconds"]
            for line in self.lines
            if line.get("survivor_seconds") is not None
        )
        return {
            "kills": len(self.lines),
            **dict(sorted(sorts.items())),
            "points": dict(
                sorted(Counter(line["point"] for line in self.lines if line["point"]).items())
            ),
            "resumed": sum(line["resumed_from"] is not None for line in self.lines),
            "rounds lost": dict(sorted(Counter(line["lost"] for line in self.lines).items())),
            "runs compared": self.compared,
            "survivors that named the lost rank": len(waits),
            "seconds until a survivor stopped": [waits[0], waits[len(waits) // 2], waits[-1]]
            if waits
            else None,
            "failures": self.failures,
        }


class Chain:
    """One run, killed and resumed until it is done."""

    def __init__(self, folder, name, flags, count, draws):
        self.folder, self.name, self.count, self.draws = folder, name, count, draws
        self.run = folder / "runs" / name
        self.argv = [
            "fit",
            *SMALL.split(),
            *flags.split(),
            "--name",
            name,
            "--resume",
            "--out",
            str(folder / "runs"),
        ]
        self.said = folder / f"{name}.said"
        self.begun = folder / f"{name}.begun"

    def start(self, prepare, rank):
        self.begun.unlink(missing_ok=True)

        def prepared(inner=prepare):
            from fl_lightning.engine.federation import Federation

            fit = Federation.fit

            def told(fed):
                if fed.run.is_main:
                    self.begun.write_text(str(fed.run.resumed_from))
                return fit(fed)

            Federation.fit = told
            inner()

        if self.count == 1:
            return [forked(self.argv, self.said, prepared)]
        if rank == 0:
            return ranks(self.count, self.argv, self.said, prepared, 0)
        # Rank 0 tells where it begins, rank 1 is struck: the hook for telling does nothing on other
        # ranks.
        return ranks(self.count, self.argv, self.said, prepared, -1)

    def rows(self):
        """Whole rows of metrics.csv."""
        file = self.run / "metrics.csv"
        return max(0, file.read_text().count("\n") - 1) if file.exists() else 0

    def resumed_from(self):
        try:
            return int(self.begun.read_text())
        except (OSError, ValueError):
            return None


def both(first, rank, count):
    """`first` on `rank` only, where all ranks are prepared alike."""

    def prepare():
        if count == 1 or int(os.environ["RANK"]) == rank:
            first()

    return prepare


def campaign(kills, seed, folder, say=print):
    """Strike `kills` times: a third on two ranks, half of them at named points of writing a
    checkpoint."""
    draws, log = random.Random(seed), Log()
    whole = {}
    for name, flags in RUNS.items():
        chain = Chain(folder, f"whole-{name}", flags, 1, draws)
        start = time.monotonic()
        if forked(chain.argv, chain.said).wait() != 0:
            raise SystemExit(chain.said.read_text())
        whole[name] = record(chain.run), time.monotonic() - start
    plan = [
        (2 if k % 3 == 2 else 1, "writing" if k % 2 == 0 else "table" if k % 10 == 1 else "random")
        for k in range(kills)
    ]
    open_chains = {}
    number = 0
    for ranks_, sort in plan:
        struck = False
        while not struck:
            if ranks_ not in open_chains:
                name = draws.choice(list(RUNS))
                number += 1
                open_chains[ranks_] = Chain(folder, f"{name}-{number}", RUNS[name], ranks_, draws)
            chain = open_chains[ranks_]
            done = _attempt(chain, sort, log, whole[chain.name.split("-")[0]][1], say)
            struck = done != "finished"
            if not struck:
                _compare(open_chains.pop(ranks_), whole, log, say)
            if done == "failed":
                open_chains.pop(ranks_)
    for chain in open_chains.values():
        end = [a.wait() for a in chain.start(lambda: None, 0)]
        _resumed(chain, log)
        if any(end):
            log.failures.append(f"{chain.name}: could not be resumed: {end}")
        else:
            _compare(chain, whole, log, say)
    return log


def _resumed(chain, log):
    """Fill in where the run went on after its last kill, and how many finished rounds that cost."""
    last = next((line for line in reversed(log.lines) if line["run"] == chain.name), None)
    begun = chain.resumed_from()
    if last is None or begun is None or last["resumed_from"] is not None:
        return
    last["resumed_from"] = begun
    last["lost"] = max(0, last["rows"] - begun)
    if last["lost"] > 1 and not chain.name.startswith("rare"):
        log.failures.append(f"{chain.name}: {last['lost']} rounds were lost")


def record(folder):
    """What of a run folder must be equal between equal runs: as the tests of whole runs see it."""
    spec = importlib.util.spec_from_file_location(
        "whole_runs", Path(__file__).parents[1] / "e2e" / "conftest.py"
    )
    module = sys.modules.setdefault("whole_runs", importlib.util.module_from_spec(spec))
    if not hasattr(module, "record_of"):
        spec.loader.exec_module(module)
    return module.record_of(folder)


def _attempt(chain, sort, log, seconds, say):
    """Resume `chain` and kill it: "struck", "finished" before the blow, or "failed"."""
    draws = chain.draws
    rank = draws.randrange(chain.count)
    point, nth, both_die = None, 0, False
    if sort != "random":
        points = TABLES if sort == "table" else WRITING if rank == 0 else ON_RANK_1
        rank = 0 if sort == "table" else rank
        point, nth = draws.choice(points), draws.randint(1, 6)
        processes = chain.start(both(strike(point, nth), rank, chain.count), rank)
    else:
        processes = chain.start(lambda: None, 0)
        both_die = draws.random() < 0.5
        deadline = time.monotonic() + 120
        while (
            chain.resumed_from() is None
            and not processes[0].ended()
            and time.monotonic() < deadline
        ):
            time.sleep(0.002)
        moment = time.monotonic() + draws.uniform(0, 0.7 * seconds)
        while time.monotonic() < moment and not processes[0].ended():
            time.sleep(0.001)
        for process in processes if both_die else [processes[rank]]:
            process.send(signal.SIGKILL)
    victim = processes[rank]
    try:
        victim.wait()
    except TimeoutError as error:
        raise TimeoutError(
            f"{error}; the others: {[(p.ended(), p.code, p.err) for p in processes]}"
        ) from None
    fell = time.monotonic()
    others = [p for p in processes if p is not victim]
    codes = [p.wait() for p in others]
    waited = time.monotonic() - fell
    _resumed(chain, log)
    if victim.code == 0 and not any(codes):
        return "finished"
    line = {
        "run": chain.name,
        "ranks": chain.count,
        "sort": sort,
        "point": point,
        "nth": nth,
        "rank": rank,
        "both": both_die,
        "rows": chain.rows(),
        "resumed_from": None,
        "lost": None,
    }
    if victim.code != -signal.SIGKILL:
        log.failures.append(
            f"{chain.name} {point} {nth}: exit code {victim.code}: {victim.err[-500:]}"
        )
        return "failed"
    if others and not both_die:
        named = [f"rank {rank} " in p.err or p.code == 0 for p in others]
        line["survivor_seconds"] = round(waited, 1)
        if not all(named) or any("Traceback" in p.err for p in others):
            log.failures.append(
                f"{chain.name} {point} {nth}: rank {rank} was not named: {others[0].err[-500:]}"
            )
    log.lines.append(line)
    say(json.dumps(line))
    return "struck"


def _compare(chain, whole, log, say):
    log.compared += 1
    equal = record(chain.run) == whole[chain.name.split("-")[0]][0]
    say(f"{chain.name}: {'equal' if equal else 'DIFFERENT'}")
    if equal:
        shutil.rmtree(chain.run)
    else:
        log.failures.append(f"{chain.name} differs from the unbroken run")


def main():
    """Run a campaign; 1 if a run could not be resumed, lost more than a round, or ended in other
    numbers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="JSON file of counts and kills")
    args = parser.parse_args()
    import fl_lightning.run  # noqa: F401  (what takes long, once)

    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        log = campaign(args.kills, args.seed, Path(folder))
    counts = {**log.counts(), "minutes": round((time.monotonic() - start) / 60, 1)}
    print(json.dumps(counts, indent=1))
    if args.log:
        kills = ",\n  ".join(json.dumps(line) for line in log.lines)
        args.log.write_text(
            f'{{"counts": {json.dumps(counts, indent=1)},\n "kills": [\n  {kills}\n ]}}\n'
        )
    return 1 if log.failures else 0


if __name__ == "__main__":
    sys.exit(main())
