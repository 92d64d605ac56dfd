"""What a study costs beside the rounds of its runs, and what a second worker saves: short runs on the digits.

    python benchmarks/studies.py [--runs 100] [--rounds 2 5] [--workers 1 2]

Wall seconds of `fl-train study` from its start to its end, start-up and table included, so the machine must be quiet.
The sum of rounds is that of `seconds` in the runs' metrics.csv: training, exchange, the server's step and judging.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import yaml
from measure import command

from fl_lightning.results.folder import RunFolder

METHODS = ["fedavg", "fedper", "ditto", "kapc"]


def study(runs: int, rounds: int, workers: int) -> tuple[float, float]:
    """Run a study of `runs` runs in a folder of its own: its wall seconds, and the seconds of all its runs' rounds."""
    each = -(-runs // len(METHODS))
    content = {
        "base": ["kapc_exact_digits", {"federation.rounds": rounds}],
        "methods": METHODS,
        "seeds": list(range(each)),
        "forced": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "study.yaml", Path(folder) / "out"
        file.write_text(yaml.safe_dump(content))
        line = [sys.executable, "-m", "fl_lightning", "study", str(file), "--out", str(out), "--workers", str(workers)]
        start = time.monotonic()
        command(*line)
        wall = time.monotonic() - start
        done = [summary.parent for summary in out.glob("runs/**/summary.json")]
        if len(done) != each * len(METHODS):
            raise SystemExit(f"{len(done)} of {each * len(METHODS)} runs have ended")
        return wall, sum(row["seconds"] for one in done for row in RunFolder(one).read("metrics"))


HEAD = ["runs", "rounds", "workers", "wall, s", "sum of rounds, s", "wall by sum", "first wall by this"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--rounds", type=int, nargs="+", default=[2, 5])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    print(f"| {' | '.join(HEAD)} |\n|{' --- |' * len(HEAD)}")
    for rounds in args.rounds:
        first = None
        for workers in args.workers:
            wall, seconds = study(args.runs, rounds, workers)
            first = first or wall
            cells = f"{wall:.1f} | {seconds:.1f} | {wall / seconds:.3f} | {first / wall:.2f}"
            print(f"| {args.runs} | {rounds} | {workers} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
