"""Kill a study whose runs train together, again and again: `uv run python
tests/study/kills_together.py --kills 20`.

With kill -9, in turns, the process in which the runs train and the study's own (its workers end
with it), at random moments after a round has been written down; the same command goes on. In the
end tables and weights must be those of a study that was left alone.
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent))
from small import TINY, results

STUDY = {
    **TINY,
    "base": [*TINY["base"], {"federation.rounds": 12, "callbacks.checkpoint.seconds": 0}],
    "methods": ["kapc", {"name": "fedprox", "mu": 0.5}, "fedproto", "apfl"],
    "seeds": [0, 1],
}


def _begun(folder, out):
    line = [
        sys.executable,
        "-m",
        "fl_lightning",
        "study",
        "study.yaml",
        "--out",
        out,
        "--workers",
        "1",
        "--together",
        "8",
    ]
    with (folder / f"{out}.log").open("ab") as log:
        return subprocess.Popen(line, cwd=folder, stdout=log, stderr=log)


def _rounds(study):
    """Rounds that stand in tables."""
    total = 0
    for file in study.glob("runs/**/metrics.csv"):
        with contextlib.suppress(OSError):
            total += max(0, len(file.read_text().splitlines()) - 1)
    return total


def _children(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def differences(folder, kills, seed=0):
    """Which runs ended otherwise than undisturbed ones, and how many kills met a study at work."""
    (folder / "study.yaml").write_text(yaml.safe_dump(STUDY))
    assert _begun(folder, "want").wait() == 0, (folder / "want.log").read_text()
    draws, met = random.Random(seed), 0
    while met < kills:
        process, before, start = (
            _begun(folder, "killed"),
            _rounds(folder / "killed"),
            time.monotonic(),
        )
        while process.poll() is None and _rounds(folder / "killed") <= before:
            time.sleep(0.02)
            assert time.monotonic() - start < 600
        time.sleep(draws.uniform(0, 0.3))
        if process.poll() is not None:
            if process.returncode == 0:
                break  # the study was at its end
            continue  # the workers of the last one were still ending
        workers = _children(process.pid)
        victim = workers[0] if met % 2 and workers else process.pid
        os.kill(victim, signal.SIGKILL)
        process.wait()
        met += 1
    while (process := _begun(folder, "killed")).wait() == 2:
        time.sleep(0.5)
    want, found = results(folder / "want"), results(folder / "killed")
    return sorted(
        name for name in want.keys() | found.keys() if want.get(name) != found.get(name)
    ), met


def main():
    """Print what came of it; exit code 1 where a run differs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        unlike, met = differences(Path(folder), given.kills, given.seed)
        runs = len(results(Path(folder) / "want"))
    print(
        f"{met} kills, {runs} runs, {len(unlike)} differ from undisturbed ones: "
        f"{', '.join(unlike) or 'none'}"
    )
    raise SystemExit(bool(unlike))


if __name__ == "__main__":
    main()
