"""A study of two methods on a few digits, and all of a study that equal ones share."""

import csv
import hashlib
import json

SMALL = {
    "fabric.accelerator": "cpu",
    "data.fraction": 0.4,
    "model": {"hidden": [16]},
    "federation.clients": 4,
    "federation.local_epochs": 1,
    "federation.rounds": 2,
}
TINY = {
    "base": ["kapc_exact_digits", SMALL],
    "methods": ["kapc", {"name": "fedprox", "mu": 0.5}],
    "seeds": [0],
    "forced": False,
}


def table(file):
    """All of a table that must be equal between equal runs."""
    with file.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    return [
        {k: v for k, v in row.items() if not k.startswith(("seconds", "memory"))} for row in rows
    ]


def results(study, only=None):
    """The tables and final weights of every run, or of those that are named."""
    content = {}
    for run in sorted(study.glob("runs/**/seed-*")):
        if only is not None and str(run.relative_to(study)) not in only:
            continue
        newest = max(run.glob("checkpoints/manifest-*.json"))
        kept = json.loads(newest.read_text())["manifest"]
        files = [kept["server"]["file"], *(entry["file"] for entry in kept["clients"].values())]
        digests = [
            hashlib.sha256((run / "checkpoints" / file).read_bytes()).hexdigest() for file in files
        ]
        tables = [table(run / f"{name}.csv") for name in ("metrics", "clients", "final")]
        content[str(run.relative_to(study))] = (tables, digests)
    return content
