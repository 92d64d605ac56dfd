"""The atlas: which method wins where. A study file for each kind of heterogeneity lies in
configs/studies/atlas.

    python benchmarks/atlas.py run OUT [KIND ...]        what is missing: tune all methods alike, then the map
    python benchmarks/atlas.py cells OUT                 merge what has ended into atlas/KIND-cells.csv, settings.csv
    python benchmarks/atlas.py rerun --out DIR [--number 5] [--seed 0]
                                                         train cells drawn at random again: the same
                                                         numbers?

`run` searches each kind's middle strength with 12 trials a method, each on two splits, on
validation data; then it trains ten fresh seeds of all strengths with the choices. It goes on where
it was stopped. The choices, a study file that anybody can run, are kept beside the cells as
atlas/KIND.yaml: a kind that has one is not searched again.
"""  # noqa: E501

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fl_lightning import __version__
from fl_lightning.cli import main, studyfile
from fl_lightning.foundation.csvtable import as_csv
from fl_lightning.foundation.files import write_whole
from fl_lightning.lab.study.compare import share_harmed
from fl_lightning.lab.study.scores import read
from fl_lightning.results.result import RunResult, worst_tenth

ROOT = Path(__file__).resolve().parents[1]
ATLAS = ROOT / "atlas"
KINDS = (
    "hsu",
    "classes",
    "dirichlet",
    "mixture",
    "quantity",
    "rotation",
    "labels",
    "iid",
    "glyphs",
    "watch",
)
TRIALS = 12
"""Of each method: ten at random with the same rates for all, two by their scores."""
NOT_SEARCHED = ("crosskapc",)
"""It came later: its rate is 0.25 in all kinds, near FedAvg's choices, and its arguments are the
defaults."""
SPLITS = [1000, 1001]
"""Seeds of the trials' splits; their first models have seed 1000. None of the map's seeds."""
COLUMNS = (
    "kind",
    "strength",
    "samples",
    "method",
    "seed",
    "judge",
    "accuracy",
    "alone",
    "gain",
    "harmed",
    "worst_tenth",
    "bytes",
    "trials",
    "config",
    "version",
)
KEY = ("kind", "strength", "method", "seed")
FEATURES = ("samples", "jensen_shannon", "feature_shift", "feature_shift_within", "quantity_gini")
"""What clients can tell before they train: mean training samples, and distances between them as
every run measures."""
Row = dict[str, Any]


def run(out: Path, kinds: list[str], workers: int, only: list[str]) -> None:
    """Search and map the kinds; `only`: arguments for `fl-train study`, such as `--seeds 40-44`."""
    for kind in kinds:
        place = out / kind
        place.mkdir(parents=True, exist_ok=True)
        content = studyfile.read(f"atlas/{kind}")
        (axis, strengths), *_ = content["grid"].items()
        search = content | {"grid": {axis: [strengths[1]], "data.partition_seed": SPLITS}}
        write_whole(place / "search.yaml", yaml.safe_dump(search, sort_keys=False))
        words = ["--trials", str(TRIALS), "--workers", str(workers), "--study", "false"]
        choices = [place / "tuned" / "tuned.yaml", ATLAS / f"{kind}.yaml"]
        if not any(file.is_file() for file in choices):
            _do("tune", str(place / "search.yaml"), "--out", str(place / "tuned"), *words)
        chosen = yaml.safe_load(
            next(file for file in choices if file.is_file()).read_text(encoding="utf-8")
        )
        study = content | {"methods": chosen["methods"], "forced": False}
        _check_versions(place / "versions.json", {one["name"] for one in chosen["methods"]})
        write_whole(
            place / "map.yaml",
            f"# The atlas, {kind}: arguments as chosen\n" + yaml.safe_dump(study, sort_keys=False),
        )
        _do(
            "study",
            str(place / "map.yaml"),
            "--out",
            str(place / "map"),
            "--workers",
            str(workers),
            *only,
        )


def _check_versions(file: Path, methods: set[str]) -> None:
    """Keep by what code the map is made; end where it was begun by another one."""
    now = {name: version_of(name) for name in sorted(methods)}
    known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else now
    if changed := [name for name in now if known.get(name, now[name]) != now[name]]:
        sys.exit(
            f"atlas: {file.parent}: {', '.join(changed)} came to other golden numbers when its "
            f"map was begun"
        )
    write_whole(file, json.dumps(known | now))


def _do(*words: str) -> None:
    if code := main(list(words)):
        sys.exit(code)


# ---------------------------------------------------------------- cells


def cells_of(study: Path, kind: str) -> list[Row]:
    """A row for each cell of a kind's map that has ended, beside training alone of its setting and
    seed."""
    runs, _ = read([study])
    runs["harmed"] = share_harmed(runs)
    file = study.parent / "versions.json"
    versions = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    local = runs[runs.method == "local"].set_index(["setting", "seed"]).scores
    rows = []
    for cell in runs.itertuples():
        if (cell.setting, cell.seed) in local.index:
            row = row_of(cell, local.loc[cell.setting, cell.seed].tolist(), kind)
            rows.append(row | {"version": versions.get(cell.name, row["version"])})
    return rows


def features_of(study: Path, kind: str) -> list[Row]:
    """Of each strength of a kind's map: `FEATURES`, means over the seeds that have ended; 0 where
    undefined."""
    cells, _ = read([study])
    rows = []
    for setting, of_setting in cells.groupby("setting", sort=False):
        runs = of_setting.run[of_setting.method == "local"].tolist()
        values = [
            [float(run.summary.get(f"heterogeneity_{name}") or 0) for name in FEATURES[1:]]
            for run in runs
        ]
        sizes = [np.mean([row["train_samples"] for row in run.rows("split")]) for run in runs]
        means = [np.mean(sizes), *np.mean(values, axis=0)]
        names = {"kind": kind, "strength": setting.rpartition("=")[2]}
        rows.append(names | dict(zip(FEATURES, map(float, means), strict=True)))
    return rows


def row_of(cell: Any, alone: list[float], kind: str) -> Row:
    """A cell; accuracies and shares lie in 0..1, bytes are those of clients and server in the whole
    run."""
    scores = cell.scores.tolist()
    ours, theirs = (math.fsum(values) / len(values) for values in (scores, alone))
    sizes = [row["train_samples"] for row in cell.run.rows("split")]
    mib = cell.run.spent("mib")
    return {
        "kind": kind,
        "strength": cell.setting.rpartition("=")[2],
        "samples": math.fsum(sizes) / len(sizes),
        "method": cell.method,
        "seed": cell.seed,
        "judge": cell.model,
        "accuracy": ours,
        "alone": theirs,
        "gain": ours - theirs,
        "harmed": None if cell.method == "local" else cell.harmed,
        "worst_tenth": worst_tenth(np.array(scores)),
        "bytes": None if mib is None else round(mib * 2**20),
        "trials": 0 if cell.method in NOT_SEARCHED else TRIALS,
        "config": config_hash(cell.run),
        "version": version_of(cell.name),
    }


def config_hash(run: RunResult) -> str:
    """Of the run's whole configuration but its seed, places and machine."""
    left = ("seed", "fabric", "loggers", "out", "name")
    kept = {key: value for key, value in run.config.items() if key not in left}
    kept["data"] = {
        k: v
        for k, v in kept["data"].items()
        if k not in ("root", "public_root", "download", "resident")
    }
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:10]


def version_of(method: str) -> str:
    """The package's version, and the bits of the method's golden run: what its numbers are made
    by."""
    runs = json.loads((ROOT / "tests" / "golden" / "golden.json").read_text(encoding="utf-8"))[
        "runs"
    ]
    return f"{__version__}+{runs[method]['bits'][:6]}"


def merged(before: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """All rows, the new ones in place of equal cells.

    Raises:
        SystemExit: rows of one kind and method are of different configurations or versions.
    """
    rows = {tuple(str(row[key]) for key in KEY): row for row in [*before, *new]}
    known: dict[tuple[str, ...], Row] = {}
    for row in rows.values():
        other = known.setdefault((row["kind"], str(row["strength"]), row["method"]), row)
        for key in ("config", "version"):
            if other[key] != row[key]:
                name = f"{row['kind']}, {row['strength']}, {row['method']}"
                seeds = f"{other[key]} in seed {other['seed']}, {row[key]} in seed {row['seed']}"
                sys.exit(f"atlas: {name}: {key} is {seeds}")
    order = {kind: place for place, kind in enumerate(KINDS)}
    return sorted(
        rows.values(),
        key=lambda row: (
            order[row["kind"]],
            float(row["strength"]),
            row["method"],
            int(row["seed"]),
        ),
    )


def stored(name: str = "*-cells") -> list[Row]:
    """The rows of atlas/NAME.csv, as text."""
    texts = (file.read_text(encoding="utf-8") for file in sorted(ATLAS.glob(f"{name}.csv")))
    return [row for text in texts for row in csv.DictReader(text.splitlines(keepends=True))]


def keep(out: Path) -> None:
    """Merge all maps in `out` into a table of cells for each kind, their clients' features into
    settings.csv; keep the choices."""
    new, features = list[Row](), list[Row]()
    for kind in KINDS:
        if (out / kind / "map" / "study.json").is_file():
            new += cells_of(out / kind / "map", kind)
            features += features_of(out / kind / "map", kind)
    rows = merged(stored(), new)
    ATLAS.mkdir(exist_ok=True)
    for kind in KINDS:
        for file, name in {
            "map.yaml": f"{kind}.yaml",
            "tuned/tuned.csv": f"{kind}-tuned.csv",
        }.items():
            if (out / kind / file).is_file():
                write_whole(ATLAS / name, (out / kind / file).read_bytes())
    others = [
        row for row in stored("settings") if row["kind"] not in {one["kind"] for one in features}
    ]
    write_whole(ATLAS / "settings.csv", as_csv([*others, *features]))
    # one table of all would be above a megabyte
    for kind in dict.fromkeys(row["kind"] for row in rows):
        cells = [{key: row[key] for key in COLUMNS} for row in rows if row["kind"] == kind]
        write_whole(ATLAS / f"{kind}-cells.csv", as_csv(cells))
    print(f"{ATLAS.name}: {len(rows)} cells, {len(new)} of them from {out}")


# ---------------------------------------------------------------- again


def rerun(out: Path, number: int, seed: int) -> int:
    """Train cells drawn at random again from atlas/KIND.yaml; how many came to other numbers."""
    rows = stored()
    wrong = 0
    for row in random.Random(seed).sample(rows, number):
        study = studyfile.read(str(ATLAS / f"{row['kind']}.yaml"))
        (axis, _), *_ = study["grid"].items()
        place = out / "-".join(row[key] for key in KEY).replace(" ", "_")
        words = ["--methods", f"{row['method']},local", "--seeds", row["seed"], "--workers", "1"]
        words += ["--settings", f"{axis}={row['strength']}"]
        _do("study", str(ATLAS / f"{row['kind']}.yaml"), "--out", str(place), *words)
        again = [one for one in cells_of(place, row["kind"]) if one["method"] == row["method"]]
        texts = next(csv.DictReader(as_csv(again).splitlines()))
        differs = [key for key in COLUMNS if texts[key] != row[key]]
        wrong += bool(differs)
        print(f"{place.name}: {', '.join(differs) or 'the same numbers'}")
    return wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("run", "cells", "rerun"))
    parser.add_argument("folder", nargs="?", type=Path, help="of studies")
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--number", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    given, rest = parser.parse_known_args()
    if given.what == "rerun":
        sys.exit(
            rerun(given.out or parser.error("rerun needs --out"), given.number, given.seed) > 0
        )
    folder = given.folder or parser.error(f"{given.what} needs a folder")
    if given.what == "run":
        run(folder, given.kinds or list(KINDS), given.workers, rest)
    else:
        keep(folder)
