"""Random edits of configs: whatever is typed, `fl-train fit` runs, or refuses in one line.

    python tests/fuzz/fuzz.py --runs 2000 --commands 50 --seed 0

Each input is a shipped config or none, and one to four edits: keys that exist or do not, values
that fit, that lie on the edge, that are of another type or are nonsense, as flags or in YAML,
sometimes damaged YAML. Sizes are capped, so that every run is a matter of seconds. Prints what was
tried, and every input whose outcome is not allowed:

    ran       exit code 0
    refused   exit code 2 and one line on stderr, nothing left on the disk
    diverged  exit code 1 and one line that says that numbers left the finite range (a legal, wild value)

Never a traceback, more lines, a hang, or a file outside OUT.
"""

import argparse
import contextlib
import inspect
import io
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import yaml

from fl_lightning.cli import main
from fl_lightning.configuration import catalogue
from fl_lightning.configuration.keys import keys, run_parser
from fl_lightning.configuration.resolve import _import

PATIENCE = 120
"""Seconds until a run counts as one that hangs; the slowest take some 3 on a quiet core."""
SMALL = {
    "federation.rounds": "1",
    "federation.clients": "4",
    "federation.local_epochs": "1",
    "data.fraction": "0.3",
    "model": "{name: mlp, hidden: [8]}",
    "loggers": "null",
    "fabric.accelerator": "cpu",
    "fabric.threads": "1",
    "callbacks.progress": "null",
    "data.download": "false",
}
"""Under all edits: what makes a run small."""
COSTLY = {"federation.rounds", "model.hidden", "model.channels", "fabric.devices"}
COUNTS = ("_epochs", "steps")
"""Keys, and ends of keys, whose large values are legal, and take for ever."""
LEFT_OUT = {"config", "out", "print_config", "smoke", "loggers", "data.download"}
"""`out` says where OUT is; downloads and loggers reach for the network."""
NUMBERS = ["0", "1", "2", "3", "0.5", "0.1", "1e-3", "1.0", "-1", "-0.0", "1e-300", "0.9999999"]
WILD = [
    "1e30",
    "1e308",
    "nan",
    "inf",
    "-inf",
    ".nan",
    ".inf",
    "1e999",
    "99999999999999999999",
    "-5",
    "1_000",
    "0x10",
]
WORDS = [
    "",
    " ",
    "null",
    "~",
    "true",
    "false",
    "yes",
    "[]",
    "{}",
    "[1, 2]",
    "{a: 1}",
    "[[1]]",
    "{name: x}",
    "!!python/x y",
    "None",
    "a.b.C",
    "os.system",
    "torch.nn.Linear",
    "../up",
    "/",
    "é☃\u202e",
    "x" * 3000,
    "%s%n",
    "a,b",
    ",",
    "-",
    "*",
    "&a",
    "'",
    '"',
    "2026-01-01",
    "1:30",
    "{",
    "]",
    "\t",
    "a: b: c",
    "\x07",
    "fl_lightning.run.fit",
]
DAMAGE = [
    "\t",
    ": :",
    "[",
    "{",
    "- a\n- b",
    "\x00",
    "&a *a",
    "key",
    "? x",
    "!!python/object:os.system {}",
    "..",
    "é",
]


@dataclass
class Case:
    """One input: the words after `fl-train fit`, and what the file `edits.yaml` holds (None: there
    is none)."""

    words: list[str]
    text: bytes | None = None


@dataclass
class Key:
    """A key that may be edited, values that suit it, and what must be said beside it for it to mean
    something."""

    values: list[str]
    beside: dict[str, str]


def choices():
    """Every key there is."""
    found = {
        key: Key(_literals(str(getattr(action, "_typehint", ""))) or NUMBERS, {})
        for key, action in keys(run_parser()).items()
        if key not in LEFT_OUT
    }
    kinds = {"methods": "method", "models": "model", "callbacks": "callbacks"}
    for kind, key in kinds.items():
        found[key] = Key(list(catalogue.table(kind)), {})
        for entry in catalogue.table(kind).values():
            prefix = f"{key}.{entry.name}" if kind == "callbacks" else key
            parameters = inspect.signature(_import(kind, key, entry.class_path)).parameters.values()
            fitting = {p.name: _literals(str(p.annotation)) or NUMBERS for p in parameters}
            needed = {
                f"{prefix}.{p.name}": fitting[p.name][-1]
                for p in parameters
                if p.default is p.empty
            }
            beside = (
                {key: entry.name}
                if kind == "methods"
                else {"method": "fedavg", **needed}
                if needed
                else {}
            )
            found |= {f"{prefix}.{name}": Key(values, beside) for name, values in fitting.items()}
    found["data.partition"].values = list(catalogue.table("partitions"))
    found["data.source"].values = ["digits", "mnist", "arrays", "images", "cifar10"]
    found["federation.clients"].values = ["1", "2", "4", "7", "2000"]
    found["name"].values = ["a", "..", "a/b", "/tmp/x", "-", "x" * 300]
    return found


def _literals(annotation):
    """The choices that a type lists; true and false for a switch."""
    if "bool" in annotation:
        return ["true", "false"]
    return (
        [word for word in annotation.split("'") if word.isidentifier()]
        if "Literal" in annotation
        else []
    )


def at_odds(beside, edits):
    """Whether two edits want two methods: what can only be refused is drawn often enough."""
    return beside.get("method", edits.get("method")) != edits.get("method", beside.get("method"))


def case(draw, known):
    """A random input."""
    edits = {}
    for _ in range(draw.choice([1, 1, 1, 2, 2, 3])):
        key = draw.choice([key for key in known if not at_odds(known[key].beside, edits)])
        fitting = known[key].values
        values = (
            draw.choice(
                [fitting] * 7
                + [NUMBERS, [] if key in COSTLY or key.endswith(COUNTS) else WILD, WORDS]
            )
            or fitting
        )
        edits |= known[key].beside if draw.random() < 0.9 else {}
        if draw.random() < 0.05:  # a slip of the fingers
            at = draw.randrange(len(key))
            key = key[:at] + draw.choice(["", "x", ".", "_"]) + key[at + draw.randrange(2) :]
        edits[key] = draw.choice(values)
    base = draw.choice([None, None, *catalogue.table("configs")])
    words = ["--config", base] if base else []
    words += [word for key, value in SMALL.items() for word in (f"--{key}", value)]
    words += draw.choice([["--print_config"], ["--smoke"], ["--smoke"], ["--smoke"], []])
    text = None
    if draw.random() < 0.5:
        words += [
            word
            for key, value in edits.items()
            for word in draw.choice([(f"--{key}={value}",), (f"--{key}", value)])
        ]
    else:
        content = {}
        for key, value in edits.items():
            with contextlib.suppress(yaml.YAMLError, ValueError):
                content[key] = yaml.safe_load(value) if draw.random() < 0.7 else value
        text = yaml.safe_dump(content, allow_unicode=True).encode()
        if draw.random() < 0.15:
            at = draw.randrange(len(text) + 1)
            text = text[:at] + draw.choice(DAMAGE).encode() + text[at:]
        words += ["--config", "edits.yaml"]
    return Case([*words, "--out", "OUT"], text)


class _Hang(BaseException):
    pass


def outcome(code, err, left):
    """`ran`, `refused` or `diverged`; else what is wrong."""
    outside = {path for path in left if path.split(os.sep)[0] not in ("OUT", "edits.yaml")}
    said = [line for line in err.splitlines() if not line.startswith(("relation: ", "round "))]
    if outside:
        return f"BUG: files outside OUT: {sorted(outside)}"
    if "Traceback" in err or code not in (0, 1, 2):
        return f"BUG: exit code {code} with {err[-2000:]}"
    if code == 0:
        return "ran"
    if len(said) != 1 or not said[0].startswith("fl-train: error: "):
        return f"BUG: exit code {code} and not one line: {err[-2000:]}"
    if code == 1:
        return "diverged" if "finite" in err else f"BUG: exit code 1: {err}"
    return "refused" if left <= {"edits.yaml"} else f"BUG: refused, but left {sorted(left)}"


def tried(case, as_command=False):
    """The outcome of a case, in this process or as a command, in an empty folder."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        if case.text is not None:
            Path("edits.yaml").write_bytes(case.text)
        code, err = (_command if as_command else _here)(["fit", *case.words])
        left = {str(path.relative_to(folder)) for path in Path(folder).rglob("*")}
    return outcome(code, err, left)


def _here(words):
    def stop(signum, frame):
        raise _Hang

    out, err = io.StringIO(), io.StringIO()
    before, path = signal.signal(signal.SIGALRM, stop), list(sys.path)
    signal.alarm(PATIENCE)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            return main(words), err.getvalue()
    except _Hang:
        return -1, "it hangs"
    except BaseException:
        return -1, "it escaped: Traceback " + traceback.format_exc()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        sys.path[:] = path


def _command(words):
    line = [str(Path(sys.executable).with_name("fl-train")), *words]
    try:
        done = subprocess.run(line, capture_output=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        return -1, "it hangs"
    except ValueError:  # a zero byte, which no command line can hold
        return 2, "fl-train: error: no command line"
    return done.returncode, done.stderr.decode(errors="replace")


def cases(seed, count):
    """The first `count` inputs of a seed."""
    draw, known = random.Random(seed), choices()
    for _ in range(count):
        yield case(draw, known)


def report(seed, runs, commands):
    """Try them all, print the counts; returns the number of bugs."""
    counts = Counter()
    for k, one in enumerate(cases(seed, runs)):
        as_command = commands > 0 and k % max(1, runs // commands) == 0
        found = tried(one, as_command)
        kind = found.partition(":")[0]
        counts[kind, "command" if as_command else "in process"] += 1
        if kind == "BUG":
            print(
                f"\n--- input {k} of seed {seed}\nfl-train fit "
                f"{shlex.join(one.words)}\n{one.text!r}\n{found}",
                flush=True,
            )
    for (kind, how), count in sorted(counts.items()):
        print(f"{kind:10s} {how:12s} {count}")
    return sum(count for (kind, _), count in counts.items() if kind == "BUG")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--commands", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    os.environ["WANDB_MODE"] = "offline"
    sys.exit(bool(report(given.seed, given.runs, given.commands)))
