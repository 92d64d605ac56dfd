"""crosskapc in the atlas, beside FedAvg with and without shrunk steps: the tables of
docs/results/crosskapc.md.

python benchmarks/atlas.py run STUDIES [KIND ...] --methods crosskapc,local
python benchmarks/atlas.py cells STUDIES
python benchmarks/crosskapc.py shrunk OUT [KIND ...]     train FedAvg with shrunk steps in the atlas's settings
python benchmarks/crosskapc.py keep OUT                  keep its accuracies in atlas/shrunk.csv
python benchmarks/crosskapc.py page [--picture FILE]     the tables, from atlas/
python benchmarks/crosskapc.py picks STUDIES             what the runs of crosskapc have grouped, and why
"""  # noqa: E501

from __future__ import annotations

import argparse
import csv
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from atlas_page import ALONE, RIVAL, Atlas, interval, mean_ranks, read
from measure import markdown

from atlas import ATLAS, KINDS
from fl_lightning.cli import main, studyfile
from fl_lightning.foundation.csvtable import as_csv
from fl_lightning.foundation.files import write_whole
from fl_lightning.lab.study.scores import read as cells_of

OURS, LABEL = "crosskapc", "fedavg shrunk"
SHRUNK = {"name": OURS, "label": LABEL, "optimizer.lr": 0.25, "init_args": {"guard": 1e6}}
"""FedAvg with shrunk steps: no groups are ever distinct enough. The rate is crosskapc's."""
NOTABLE = 0.5
"""Points below FedAvg that are counted."""


def train_shrunk(out: Path, kinds: list[str]) -> None:
    """FedAvg with shrunk steps, all strengths and seeds of the kinds."""
    for kind in kinds:
        study = studyfile.read(f"atlas/{kind}") | {
            "methods": [SHRUNK],
            "forced": False,
            "seeds": "40-49",
        }
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / f"{kind}.yaml", yaml.safe_dump(study, sort_keys=False))
        main(["study", str(out / f"{kind}.yaml"), "--out", str(out / kind), "--workers", "1"])


def keep(folders: list[Path]) -> None:
    """Accuracies of FedAvg with shrunk steps, by kind, strength and seed; a run of crosskapc
    without a trial is one."""
    rows = {}
    for study in (
        place for out in folders for kind in KINDS for place in (out / kind / "map", out / kind)
    ):
        cells = cells_of([study])[0].itertuples() if (study / "study.json").is_file() else []
        for cell in cells:
            kind = study.parent.name if study.name == "map" else study.name
            tried = cell.run.rows("metrics")[-1].get("groups_z_last") is not None
            if cell.method == LABEL or (cell.method == OURS and not tried):
                key = (kind, cell.setting.rpartition("=")[2], cell.seed)
                rows[key] = dict(zip(("kind", "strength", "seed"), key, strict=True)) | {
                    "accuracy": accuracy(cell)
                }
    write_whole(ATLAS / "shrunk.csv", as_csv([rows[key] for key in sorted(rows)]))


def accuracy(cell: Any) -> float:
    """Mean over a cell's clients."""
    return math.fsum(cell.scores) / len(cell.scores)


def shrunk(atlas: Atlas) -> np.ndarray:
    """What `keep` has kept, in points, (settings, seeds); NaN where there is none."""
    scores = np.full((len(atlas.settings), len(atlas.seeds)), np.nan)
    if (ATLAS / "shrunk.csv").is_file():
        for row in csv.DictReader((ATLAS / "shrunk.csv").read_text(encoding="utf-8").splitlines()):
            if (row["kind"], row["strength"]) in atlas.settings:
                place = (
                    atlas.settings.index((row["kind"], row["strength"])),
                    atlas.seeds.index(int(row["seed"])),
                )
                scores[place] = 100 * float(row["accuracy"])
    return scores


def worded(differences: np.ndarray) -> str:
    """Mean and 95 % interval over seeds, (seeds,); a star where it leaves out 0."""
    if np.isnan(differences).any():
        return "–"
    low, high = map(float, interval(differences))
    star = "*" if low > 0 or high < 0 else ""
    return f"{differences.mean():+.1f} [{low:+.1f}, {high:+.1f}]{star}"


def by_setting(atlas: Atlas) -> list[str]:
    """In each setting crosskapc beside FedAvg (after, and shrunk), training alone, selfkapc and the
    best other."""
    at = {name: k for k, name in enumerate(atlas.methods)}
    ours, of_shrunk = atlas.accuracy[:, at[OURS]], shrunk(atlas)
    means = atlas.accuracy.mean(axis=-1)
    rows = []
    for c, setting in enumerate(atlas.settings):
        others = np.where(
            np.arange(len(atlas.methods)) == at[OURS], -np.inf, np.nan_to_num(means[c], nan=-np.inf)
        )
        best = int(others.argmax())
        differences = [ours[c] - atlas.accuracy[c, at[name]] for name in (RIVAL, ALONE, "selfkapc")]
        differences.insert(1, ours[c] - of_shrunk[c])
        beside_best = f"{atlas.methods[best]} {ours[c].mean() - others[best]:+.1f}"
        rows.append(
            [atlas.name(setting), f"{ours[c].mean():.1f}", *map(worded, differences), beside_best]
        )
    head = [
        "setting",
        "crosskapc, %",
        "- FedAvg after",
        "- FedAvg shrunk",
        "- local",
        "- selfkapc",
        "- the best other",
    ]
    return markdown(head, rows)


def over_settings(atlas: Atlas) -> list[str]:
    """Of some methods what they come to over all settings; FedAvg shrunk is ranked in crosskapc's
    place."""
    at = {name: k for k, name in enumerate(atlas.methods)}
    in_place = atlas.accuracy.copy()
    in_place[:, at[OURS]] = shrunk(atlas)
    rows = []
    for name, accuracies, m in [
        *((name, atlas.accuracy, at[name]) for name in (OURS, RIVAL, "ditto", "selfkapc")),
        (LABEL, in_place, at[OURS]),
    ]:
        mine, means = accuracies[:, m], accuracies.mean(axis=-1)
        if np.isnan(mine).any():
            continue
        to_rival, to_alone = (
            mine - atlas.accuracy[:, at[RIVAL]],
            mine - atlas.accuracy[:, at[ALONE]],
        )
        (low, high), (low_alone, high_alone) = interval(to_rival), interval(to_alone)
        regrets = np.nanmax(means, axis=1) - means[:, m]
        field = Atlas(**(vars(atlas) | {"accuracy": accuracies}))
        rows.append(
            [
                name,
                f"{to_alone.mean():+.2f}",
                f"{mean_ranks(field)[m]:.2f}",
                f"{regrets.max():.1f}",
                f"{regrets.mean():.2f}",
                f"{to_rival.mean():+.2f}",
                f"{to_rival.mean(axis=-1).min():+.2f}",
                f"{(low > 0).sum()}",
                f"{(high < 0).sum()}",
                f"{(to_rival.mean(axis=-1) < -NOTABLE).sum()}",
                f"{(low_alone > 0).sum()}",
                f"{(high_alone < 0).sum()}",
            ]
        )
    head = [
        "method",
        "above local",
        f"mean rank of {len(atlas.methods)}",
        "worst regret",
        "mean regret",
        "above FedAvg after",
        "least of it",
        "above it *",
        "below it *",
        f"more than {NOTABLE:g} below it",
        "above local *",
        "below local *",
    ]
    return markdown(head, rows)


def picks(studies: Path) -> list[str]:
    """What runs have grouped: settings by counts, and the range of d' and z."""
    settings: dict[tuple[str, str], list[list[str]]] = {}
    for kind in KINDS:
        for place in (studies / kind / "map", studies / kind):
            cells = cells_of([place])[0].itertuples() if (place / "study.json").is_file() else []
            for cell in (c for c in cells if c.method == OURS):
                last = cell.run.rows("metrics")[-1]
                columns = [
                    f"groups_{k}" for k in ("separation", "z_last", "z_first", "z_first_over_last")
                ]
                values = [float(last[k]) if last.get(k) is not None else math.nan for k in columns]
                grouped = ", ".join(cell.run.summary["grouped_layers"]) or "none"
                settings.setdefault((kind, cell.setting.rpartition("=")[2]), []).append(
                    [grouped, *map(str, values)]
                )
    rows = []
    for (kind, strength), runs in settings.items():
        numbers = np.array([list(map(float, run[1:])) for run in runs])
        ranges = [
            f"{np.nanmin(column):.1f} to {np.nanmax(column):.1f}"
            if not np.isnan(column).all()
            else "–"
            for column in numbers.T
        ]
        counts = Counter(run[0] for run in runs).most_common()
        rows.append([kind, strength, ", ".join(f"{name} {n}" for name, n in counts), *ranges])
    head = ["kind", "strength", "grouped in, runs", "d'", "z last", "z first", "z first over last"]
    return markdown(head, rows)


def draw(atlas: Atlas, file: Path) -> None:
    """Points above FedAvg judged after local training, with intervals: crosskapc and selfkapc, a
    line a setting."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 0.27 * len(atlas.settings) + 1), layout="constrained")
    axes = figure.add_subplot()
    lines = np.arange(len(atlas.settings))[::-1]
    for name, colour, shift in (("selfkapc", "0.6", -0.18), (OURS, "#0a5", 0.18)):
        differences = atlas.against(RIVAL)[:, atlas.methods.index(name)]
        (low, high), mean = interval(differences), differences.mean(axis=-1)
        axes.errorbar(
            mean,
            lines + shift,
            xerr=[mean - low, high - mean],
            fmt="o",
            markersize=4,
            color=colour,
            label=name,
        )
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(lines, [atlas.name(setting) for setting in atlas.settings], fontsize=7)
    axes.set_xlim(-8, 8)  # selfkapc, 21 points below it beside a large client, lies outside
    axes.set_xlabel("points above FedAvg judged after local training, 95 % interval")
    axes.legend(loc="lower right")
    figure.savefig(file, dpi=80)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("shrunk", "keep", "page", "picks"))
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("more", nargs="*", help="kinds, or further folders")
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    if given.what == "shrunk":
        train_shrunk(given.folder, given.more or [kind for kind in KINDS if kind != "glyphs"])
    elif given.what == "keep":
        keep([given.folder, *map(Path, given.more)])
    elif given.what == "picks":
        print(*picks(given.folder), sep="\n")
    else:
        atlas = read(ATLAS)
        print(*by_setting(atlas), "", *over_settings(atlas), sep="\n")
        if given.picture:
            draw(atlas, given.picture)
