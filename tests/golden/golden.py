"""Golden runs: small whole runs of `fl-train`, and every number that they leave behind.

Only what a user can see is read: the tables, relation/, traffic/ and summary.json of the run
folder, and each client's model as `fl-train export` writes it. So the engine may be rebuilt under
them.

    python tests/golden/golden.py [NAME ...]            compare with what is kept, and print every difference
    python tests/golden/golden.py --write [NAME ...]    the same, and keep the new numbers in golden.json
    python tests/golden/golden.py --out FILE [NAME ...] write every number of the runs, with all its digits
    python tests/golden/golden.py --compare A B [--tolerance 1e-9]    name what differs between two such files

To compare two commits on one machine, write a file with each and compare the two; with this file,
another working tree runs by `PYTHONPATH=TREE python tests/golden/golden.py --out FILE`.

The same machine must give the same bits: same kind of processor, same versions of torch and numpy
(`machine`). Runs that were written by name on another machine than the rest name theirs; `also`:
the bits of a second host that is the same machine by all that `machine` looks at. On any other,
float64 sums may be added up in another order, and numbers are compared within `TOLERANCE`, those of
runs with parts in 32 bits within `SINGLE`; runs wholly in 32 bits are compared on the same machine
alone.
"""

import argparse
import contextlib
import csv
import hashlib
import io
import json
import math
import os
import platform
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from cases import CLIENTS, SETTINGS, Interruptible, Touchy, bad_data, merged, runs
from safetensors.torch import load_file

import fl_lightning
from fl_lightning.cli import main as fl_train

sys.path.append(str(Path(__file__).resolve().parents[1] / "faults"))
from forked import ranks

KEPT = Path(__file__).with_name("golden.json")
TOLERANCE = 1e-9
"""Relative. Another order of float64 sums changes some 1e-14 here, a factor of 1 + 1e-6 in a
formula 1e-7 and more."""
SINGLE = 1e-5
"""The same for runs with parts in 32 bits: two kinds of processors were 2e-7 apart in pFedLA's
relation."""
FEW = 3
"""Up to so many numbers of a column are kept one by one; of more, a weighted sum."""

Numbers = dict[str, list[Any]]
"""All numbers of a run: by file and column (metrics.csv/mean_accuracy), array, or client and
tensor, in their order."""


# ---------------------------------------------------------------- carrying them out


def numbers(names, known=None, models=True):
    """Carry out the named runs, those on several ranks last, and give what they leave behind.

    Args:
        names: of the runs.
        known: the runs; None: those of `runs`.
        models: export and read the clients' models too.
    """
    known = runs() if known is None else known
    found, here, names = {}, Path.cwd(), list(names)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            bad_data(Path("bad.npz"))
            for name in names:
                settings = merged(SETTINGS, known[name].settings)
                Path(f"{name}.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
            # forks cost least when all is imported
            for name in sorted(names, key=lambda name: known[name].ranks):
                if known[name].ranks > 1:
                    _on_ranks(name, known[name].ranks)
                else:
                    _fit(name, known[name].interrupted)
                found[name] = _tables(Path("runs", name)) | (_models(name) if models else {})
        finally:
            os.chdir(here)
    return found


def _line(name):
    return ["fit", "--config", f"{name}.yaml", "--name", name]


def _fit(name, interrupted):
    Touchy.seen = Interruptible.steps = 0
    Interruptible.at = interrupted
    try:
        _quietly(_line(name), 130 if interrupted else 0)
    finally:
        Interruptible.at = 0
    if interrupted:
        _quietly([*_line(name), "--resume"], 0)


def _quietly(line, code):
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        ended = fl_train(line)
    if ended != code:
        raise RuntimeError(
            f"fl-train {' '.join(line)} ended with {ended}, not {code}:\n{told.getvalue()}"
        )


def _on_ranks(name, count):
    """The run on several processes, forked from this one and told what torchrun tells its own."""
    for rank, attempt in enumerate(ranks(count, _line(name), Path(name))):
        if attempt.wait():
            raise RuntimeError(f"{name} failed on rank {rank}:\n{attempt.err}")


# ---------------------------------------------------------------- reading what they leave behind

MEASURED = ("seconds", "wall_seconds", "memory", "version", "world_size", "best_checkpoint")
"""Columns and keys that say something of this machine, not of the run."""


def _tables(folder):
    """Every number of the run folder's tables, arrays and summary; of failures who, when, and what
    came of it."""
    found = {}
    for name in ("metrics.csv", "clients.csv", "final.csv", "failures.csv"):
        if not (folder / name).exists():
            continue
        with (folder / name).open(newline="") as file:
            rows = list(csv.DictReader(file))
        for column in [c for c in rows[0] if not c.startswith((*MEASURED, "reason", "stage"))]:
            found[f"{name}/{column}"] = [_value(row[column]) for row in rows]
    for key, value in json.loads((folder / "summary.json").read_text()).items():
        if not key.startswith(MEASURED):
            found[f"summary.json/{key}"] = [value]
    for file_ in sorted([*folder.glob("relation/*.npz"), *folder.glob("traffic/*.npz")]):
        with np.load(file_) as held:
            for key in held.files:
                found[f"{file_.parent.name}/{file_.stem}/{key}"] = [
                    *held[key].shape,
                    *held[key].ravel().tolist(),
                ]
    return found


def _models(name):
    """Each client's model, as `fl-train export` writes it."""
    found = {}
    for client in range(CLIENTS):
        out = f"{name}-{client}.safetensors"
        _quietly(["export", "--run", f"runs/{name}", "--client", str(client), "--out", out], 0)
        for key, tensor in sorted(load_file(out).items()):
            found[f"model of client {client}/{key}"] = [*tensor.shape, *tensor.flatten().tolist()]
    return found


def _value(cell):
    try:
        return float(cell) if cell else None
    except ValueError:
        return cell


# ---------------------------------------------------------------- comparing and keeping


def machine():
    """What two machines must share to give the same bits: processor, versions of what computes, and
    its threads."""
    facts = [platform.machine(), platform.python_version(), torch.__version__, np.__version__]
    facts += [torch.backends.cpu.get_cpu_capability(), torch.__config__.show()]
    about = Path("/proc/cpuinfo")
    lines = about.read_text().split("\n\n")[0].splitlines() if about.exists() else []
    kinds = ("vendor_id", "cpu family", "model", "model name", "stepping", "cache size", "flags")
    facts += [line for line in lines if line.split(":")[0].strip() in kinds]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def bits(found):
    """A digest of every bit: all digits of each float are in its text."""
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def facts(found):
    """What is kept of `found`, to 12 digits: few numbers as they are, of many a sum with weights
    that no two share.

    Each column of a table has its own; the arrays of a file, and the tensors of a client, have one
    together.
    """
    columns = {}
    for name, values in found.items():
        file = name.rpartition("/")[0]
        columns.setdefault(name if file.endswith((".csv", ".json")) else file, []).extend(values)
    return {name: _facts(values) for name, values in columns.items()}


def _facts(values):
    if len(values) <= FEW:
        return [_short(v) if isinstance(v, float) else v for v in values]
    row = np.array([v for v in values if isinstance(v, int | float)], dtype=np.float64)
    return [len(values), _short(float(row @ np.cos(np.arange(1, len(row) + 1))))]


def _short(value):
    return float(f"{value:.12g}")


def differences(old, new, tolerance=TOLERANCE):
    """A line for each name whose numbers are not what they were; tolerance 0: to the bit."""
    for name in {**old, **new}:
        if name not in old or name not in new:
            yield f"{name}: {'is new' if name in new else 'is gone'}"
        elif len(old[name]) != len(new[name]):
            yield f"{name}: {len(old[name])} -> {len(new[name])} values"
        else:
            pairs = list(zip(old[name], new[name], strict=True))
            apart = [pair for pair in pairs if not _alike(*pair, tolerance)]
            if apart:
                first = f"first {apart[0][0]!r} -> {apart[0][1]!r}"
                yield (
                    f"{name}: {len(apart)} of {len(pairs)} differ, {first}, relative change "
                    f"{_change(apart):.1e}"
                )


def _alike(old, new, tolerance):
    if not (isinstance(old, int | float) and isinstance(new, int | float)) or tolerance == 0:
        return repr(old) == repr(new)
    return (
        old == new
        or (old != old and new != new)
        or math.isclose(old, new, rel_tol=tolerance, abs_tol=1e-12)
    )


def _change(apart):
    numeric = [
        (a, b) for a, b in apart if isinstance(a, int | float) and isinstance(b, int | float)
    ]
    return max((abs(b - a) / max(abs(a), 1e-300) for a, b in numeric), default=math.inf)


def kept():
    """What is kept: the `machine`, and by run its `bits`, `numbers` and, if it is not that one, its
    own `machine`."""
    found = json.loads(KEPT.read_text()) if KEPT.exists() else {"machine": "", "runs": {}}
    return found


def changes(name, run, found, held):
    """How a run's numbers differ from those that are kept: to the bit on the same machine, else
    within a tolerance."""
    if name not in held["runs"]:
        return ["nothing is kept of it"]
    old = held["runs"][name]
    same = old.get("machine", held["machine"]) == machine()
    if (run.bits_only and not same) or (same and bits(found) in (old["bits"], old.get("also"))):
        return []
    lines = list(
        differences(
            old["numbers"], facts(found), 1e-11 if same else SINGLE if run.single else TOLERANCE
        )
    )
    return lines or (
        ["bits differ, beyond the digits that are kept: compare two files of --out"] if same else []
    )


def unlike(name, run, all_):
    """How a run's numbers differ from those of the run that it must equal (to the bit) or come near
    to."""
    other = run.equals or run.near
    if not other or other not in all_:
        return []

    def compared(found):
        return {
            key: value for key, value in found.items() if not key.startswith(run.without or ("\0",))
        }

    return list(
        differences(compared(all_[other]), compared(all_[name]), 0 if run.equals else TOLERANCE)
    )


def rewritten(found, held, *, all_):
    """The text of golden.json with `found` in it, a line for each name; unless these are `all_`, in
    place of theirs in what is `held`."""
    known, here = runs(), machine()
    header = here if all_ else held["machine"]
    own = {} if header == here else {"machine": here}
    new = {
        n: {**own, "bits": bits(v), "numbers": facts(v)}
        for n, v in found.items()
        if not known[n].equals
    }
    kept_ = {} if all_ else held["runs"]
    lines = []
    for name in [name for name in known if name in kept_ or name in new]:
        run = dict((kept_ | new)[name])
        text = ",\n   ".join(
            f"{json.dumps(key)}: {json.dumps(value)}" for key, value in run.pop("numbers").items()
        )
        lines.append(f'  "{name}": {json.dumps(run)[:-1]}, "numbers": {{\n   {text}}}}}')
    return f'{{"machine": "{header}", "runs": {{\n' + ",\n".join(lines) + "\n}}\n"


# ---------------------------------------------------------------- the command


@dataclass
class Report:
    """Prints what differs, and counts the runs that do."""

    differ: int = field(default=0)

    def say(self, name, lines):
        """One run."""
        self.differ += bool(lines)
        print(f"{name}: {len(lines)} differences" if lines else f"{name}: as it was", flush=True)
        for line in lines:
            print(f"  {line}")


def compare(first, second, tolerance):
    """Name every difference between two files of `--out`; returns how many runs differ."""
    held = [json.loads(path.read_text()) for path in (first, second)]
    if held[0]["machine"] != held[1]["machine"]:
        print("note: the two come from different machines")
    old, new = held[0]["runs"], held[1]["runs"]
    report = Report()
    for name in {**old, **new}:
        if name in old and name in new:
            report.say(name, list(differences(old[name], new[name], tolerance)))
        else:
            report.say(name, [f"only in {first if name in old else second}"])
    how = "to the bit" if tolerance == 0 else f"within {tolerance:g}"
    print(f"{report.differ} of {len({**old, **new})} runs differ ({how})")
    return report.differ


def main(argv=None):
    """The command; returns its exit code: 1 where runs differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="runs; none: all")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", nargs=2, type=Path)
    parser.add_argument("--tolerance", type=float, default=0.0)
    given = parser.parse_args(argv)
    if given.compare:
        return int(compare(*given.compare, given.tolerance) > 0)
    known, held = runs(), kept()
    if set(given.names) - known.keys():
        parser.error(f"the runs are: {', '.join(known)}")
    torch.set_num_threads(1)
    print(f"of {Path(fl_lightning.__file__).parents[1]}")
    found = numbers(given.names or known)
    if given.out:
        given.out.write_text(json.dumps({"machine": machine(), "runs": found}))
    report = Report()
    for name, values in found.items():
        run = known[name]
        report.say(
            name,
            unlike(name, run, found) + ([] if run.equals else changes(name, run, values, held)),
        )
    if given.write:
        KEPT.write_text(rewritten(found, held, all_=not given.names))
    print(f"{report.differ} of {len(found)} runs differ" + ("; written" if given.write else ""))
    return int(report.differ > 0 and not given.write and not given.out)


if __name__ == "__main__":
    sys.exit(main())
