"""All that a machine with one GPU tells of this project in some minutes, the most telling first.

    uv run python benchmarks/device_day.py --minutes 9 --out DIR
    uv run python benchmarks/device_day.py --only study server-100 --out DIR    some items, beside what DIR has
    uv run python benchmarks/device_day.py --table DIR                          what was measured, as tables for docs/

The items are the accelerator's tests, CUDA's sanitizers on short runs, seconds a round of every
executor against the hand-written loop, the server's step and a study. Real data are looked for in
FL_DATA or `shared/data` beside the repository; where they are absent, noise of the same shape takes
their place, and the tables say so.

On a machine with one GPU that has torch, but neither uv nor a network: bring the checkout and
wheels of what is absent, which the command names at once (`pip download --platform ...`), and begin
with

    python3 -m pip install --no-index --no-deps --target SITE WHEELS/*.whl; export PYTHONPATH=SITE
    python3 -m pip install --no-index --no-deps --no-build-isolation -e .       (setuptools from 77 on)
    python3 benchmarks/device_day.py --minutes 9 --out DIR

Each item is a process of its own, so an error of the device ends that item alone; it loads its
libraries while the one before works, and opens the device when that has ended. Every number is
added to DIR/day.jsonl as it comes, so what was measured is kept, whatever ends the program.
DIR/log.txt has the end of what each item printed. Both stay below 1 MB.

Times are wall seconds, read once the device has finished all queued work, after two rounds that do
not count (they load libraries); sides take turns. TF32 and the rest are torch's defaults, which the
first line of the tables names. torch.profiler counts kernels and launches in a further round. Idle
is the share of a round's seconds (taken without the profiler) for which, in that further round,
nothing ran on the device. Of runs that train together, numbers are those of one.
"""  # noqa: E501

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BOUNDS = {
    "machine": 60,
    "suite": 120,
    "rounds-100-mlps": 75,
    "rounds-10-mnist-cnns": 75,
    "rounds-10-resnet18": 75,
    "sanitizers": 90,
    "study": 75,
    "rounds-100-cifar-cnns": 75,
    "rounds-10-resnet18-bf16": 75,
    "server-10": 30,
    "server-100": 60,
    "rounds-100-mnist-cnns": 75,
    "rounds-10-cifar-cnns": 75,
    "server-30": 40,
    "golden": 300,
}
"""Items in their order, and the seconds after which each is ended. Ours: some twice what each
should take."""
LEAST = 20.0
"""Seconds that must be left for an item to begin."""
KEPT = 20_000
"""Bytes of an item's output that go into the log."""


@dataclass
class Item:
    """A process that has begun, and what it prints."""

    name: str
    process: subprocess.Popen[bytes]
    output: IO[bytes]

    def end(self) -> str:
        """Kill it with all that it has started; the end of what it has printed."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        with self.output:
            self.output.seek(max(0, self.output.seek(0, os.SEEK_END) - KEPT))
            return self.output.read().decode(errors="replace")


@dataclass
class Day:
    """Where lines go, and what is measured how."""

    out: Path
    device: str
    tiny: bool = False

    def note(self, item: str, **line: Any) -> None:
        """Add a line to the file, for good."""
        with (self.out / "day.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"item": item, **line}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def started(self, item: str) -> Item:
        """A process that loads its libraries and then waits."""
        words = [
            sys.executable,
            str(HERE / "device_items.py"),
            item,
            str(self.out),
            self.device,
            str(int(self.tiny)),
        ]
        path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
        output = tempfile.TemporaryFile()  # noqa: SIM115
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | own,
            start_new_session=True,
        )
        return Item(item, process, output)

    def run(self, item: Item, bound: float) -> str:
        """Let it work for `bound` seconds at most; what has become of it, in a line."""
        start = time.monotonic()
        self.note(item.name, begun=time.strftime("%Y-%m-%d %H:%M:%S"))
        try:
            item.process.communicate(b"go\n", bound)
            code = item.process.returncode
            outcome = "ended" if code == 0 else f"failed (exit {code})"
        except subprocess.TimeoutExpired:
            outcome = f"stopped after its {bound:.0f} s"
        finally:
            text = item.end()
        with (self.out / "log.txt").open("a", encoding="utf-8") as log:
            log.write(f"---- {item.name}: {outcome}\n{text}\n")
        if outcome.startswith("failed"):
            outcome += (
                f": "
                f"{next((line for line in reversed(text.splitlines()) if line.strip()), '')[-300:]}"
            )
        self.note(
            item.name, ended=True, outcome=outcome, seconds=round(time.monotonic() - start, 1)
        )
        return outcome


def absent() -> list[str]:
    """Packages that are needed and not installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [re.split(r"[\[<>=]", line)[0] for line in project["dependencies"]]
    missing = []
    for name in [
        "fl_lightning",
        *needed,
        "typeshed-client",
        "torchvision",
        "pytest",
        "pytest-xdist",
    ]:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    return missing


def main(argv: Sequence[str] | None = None) -> int:
    """Run what there is time for, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, help="folder of day.jsonl and log.txt; lines are added to what it has"
    )
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="the whole command takes no longer (default 9)"
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(BOUNDS), metavar="ITEM", help="%(choices)s"
    )
    parser.add_argument(
        "--device", default="cuda", help="as fabric.accelerator has it (default cuda)"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="sizes that tell nothing, to see that it works"
    )
    parser.add_argument(
        "--table", type=Path, nargs="+", metavar="DIR", help="measure nothing, print what DIRs hold"
    )
    args = parser.parse_args(argv)
    if args.table or args.out is None:
        if not args.table:
            parser.error("--out is needed: the folder of what is measured")
        return _printed(args.table)
    if missing := absent():
        print(
            f"device_day.py: error: not installed for {sys.executable}: {', '.join(missing)}",
            file=sys.stderr,
        )
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the item in progress is ended, too
    day, start = Day(args.out.resolve(), args.device, args.tiny), time.monotonic()
    names = list(args.only or BOUNDS)
    ahead = [day.started(names[0])]
    try:
        for name, after in zip(names, [*names[1:], None], strict=True):
            item = ahead.pop()
            ahead += [day.started(after)] if after else []
            left = 60 * args.minutes - (time.monotonic() - start)
            if left < LEAST:
                item.end()
                outcome = f"not begun: {max(0.0, left):.0f} s left"
                day.note(name, ended=True, outcome=outcome)
            else:
                outcome = day.run(item, left - 5 if args.tiny else min(BOUNDS[name], left - 5))
            print(
                f"{time.monotonic() - start:5.0f} s  {name}: {outcome}", file=sys.stderr, flush=True
            )
    finally:
        for item in ahead:
            item.end()
    return _printed([args.out])


def _printed(folders: Sequence[Path]) -> int:
    """Print the tables of what was measured in these."""
    from device_tables import tables

    files = [folder / "day.jsonl" for folder in folders]
    if lacking := [str(file) for file in files if not file.exists()]:
        print(f"device_day.py: error: there is no {', no '.join(lacking)}", file=sys.stderr)
        return 2
    print(tables([file.read_text(encoding="utf-8") for file in files]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
