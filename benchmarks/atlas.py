"""The atlas: which method wins where, from studies of configs/studies/atlas.

    python benchmarks/atlas.py cells STUDIES                 add finished studies to atlas/KIND-cells.csv
    python benchmarks/atlas.py page --pictures docs/images   print the tables, draw the pictures

STUDIES/KIND is the folder of `fl-train study atlas/KIND.yaml`. A setting, a kind at one strength,
enters the page where training alone has all seeds and at most two methods lack some: those have no
number there, and the last rank.
"""  # noqa: E501

from __future__ import annotations

import argparse
import hashlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from measure import markdown
from pandas import DataFrame, Series, concat, read_csv
from scipy import stats

from fl_lightning import __version__
from fl_lightning.foundation.files import write_whole
from fl_lightning.lab.statistics import holm
from fl_lightning.lab.study.compare import share_harmed
from fl_lightning.lab.study.scores import read
from fl_lightning.results.result import worst_tenth

ROOT = Path(__file__).resolve().parents[1]
ATLAS = ROOT / "atlas"
KINDS = {
    "hsu": "Hsu's label skew, alpha",
    "classes": "classes a client:",
    "dirichlet": "label skew by class, alpha",
    "mixture": "groups of class mixes:",
    "quantity": "one large client, others have",
    "rotation": "rotated in groups:",
    "labels": "labels shifted in groups:",
    "iid": "alike, samples:",
    "glyphs": "typefaces, samples:",
    "watch": "persons, windows a class:",
}
TRIALS = 12
"""Trials of each method: the base's settings, and draws with the same rates for all."""
ALONE, RIVAL = "local", "fedavg after"
FAILED = 2
"""Methods that may lack cells of a setting, since runs with their chosen arguments diverged."""
KEY = ["kind", "strength", "method", "seed"]
LARGEST = 20
"""Points at which colours end: FedAvg's losses in groups would leave nothing of the rest."""


# ---------------------------------------------------------------- cells


def cells_of(study: Path, kind: str) -> DataFrame:
    """Return a row for each finished run beside training alone of its setting and seed."""
    runs, _ = read([study])
    runs["harmed"] = share_harmed(runs)
    local = runs[runs.method == ALONE].set_index(["setting", "seed"]).scores
    return DataFrame(
        row_of(run, local.loc[run.setting, run.seed], kind)
        for run in runs.itertuples()
        if (run.setting, run.seed) in local.index
    )


def row_of(
    cell: Any,
    alone: Series,
    kind: str,
) -> dict[str, Any]:
    """Return a cell: accuracies and shares in 0..1, bytes of clients and server."""
    scores = cell.scores.to_numpy()
    accuracy, baseline = scores.mean(), alone.to_numpy().mean()
    mib = cell.run.spent("mib")
    golden = json.loads((ROOT / "tests/golden/golden.json").read_text(encoding="utf-8"))
    config = {key: cell.run.config[key] for key in ("method", "model", "federation", "optimizer")}
    places = ("root", "public_root", "download", "resident")
    config["data"] = {k: v for k, v in cell.run.config["data"].items() if k not in places}
    return {
        "kind": kind,
        "strength": float(cell.setting.rpartition("=")[2]),
        "samples": np.mean([row["train_samples"] for row in cell.run.rows("split")]),
        "method": cell.method,
        "seed": cell.seed,
        "judge": cell.model,
        "accuracy": accuracy,
        "alone": baseline,
        "gain": accuracy - baseline,
        "harmed": cell.harmed,
        "worst_tenth": worst_tenth(scores),
        "bytes": None if mib is None else round(mib * 2**20),
        "trials": TRIALS,
        "config": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:10],
        "version": f"{__version__}+{golden['runs'][cell.name]['bits'][:6]}",
    }


def merged(stored: DataFrame, new: DataFrame) -> DataFrame:
    """Return all rows, the new ones in place of equal cells.

    Raises:
        SystemExit: rows of a setting and method have several configurations or versions.
    """
    rows = concat([stored, new]).drop_duplicates(KEY, keep="last").sort_values(KEY)
    for column in ("config", "version"):
        values = rows.groupby(KEY[:3])[column].unique()
        for cell, different in values[values.map(len) > 1].items():
            name = ", ".join(map(str, cell))
            sys.exit(f"atlas: {name}: {column} is {' and '.join(different)}")
    return rows


def stored(kind: str) -> DataFrame:
    file = ATLAS / f"{kind}-cells.csv"
    return read_csv(file) if file.is_file() else DataFrame()


def keep(out: Path) -> None:
    """Merge the studies in `out` into a table of cells for each kind."""
    for kind in KINDS:
        if (out / kind / "study.json").is_file():
            rows = merged(stored(kind), cells_of(out / kind, kind))
            write_whole(ATLAS / f"{kind}-cells.csv", rows.to_csv(index=False))
            print(f"{kind}: {len(rows)} cells")


# ---------------------------------------------------------------- page


def name(setting: Any) -> str:
    kind, strength = setting
    return f"{KINDS[kind]} {strength:g}"


def complete(cells: DataFrame) -> DataFrame:
    """Return the cells of the settings that enter; index: `KEY`."""
    cells = cells.set_index(KEY).sort_index()
    accuracies = cells["accuracy"].unstack("seed").dropna()
    counts = accuracies.groupby(["kind", "strength"]).size()
    alone = accuracies.xs(ALONE, level="method").index
    entering = counts.index[counts >= counts.max() - FAILED].intersection(alone)
    accuracies = accuracies[accuracies.index.droplevel("method").isin(entering)]
    left_out = [name(setting) for setting in counts.index.difference(entering)]
    print(f"Left out, cells are missing: {', '.join(left_out) or 'none'}")
    return cells[cells.index.droplevel("seed").isin(accuracies.index)]


def by_seed(
    cells: DataFrame,
    column: str = "accuracy",
    scale: float = 100,
) -> DataFrame:
    """Return a column: a row for each setting and method, a column for each seed."""
    return scale * cells[column].unstack("seed")


def against(table: DataFrame, baseline: str) -> DataFrame:
    """Return differences to a method of the same setting and seed."""
    other = table.xs(baseline, level="method")
    return table - other.reindex(table.index.droplevel("method")).to_numpy()


def intervals(differences: DataFrame) -> DataFrame:
    """Return means over seeds and Student's t intervals (95 %)."""
    mean = differences.mean(axis=1)
    quantile = stats.t.ppf(0.975, differences.shape[1] - 1)
    half = quantile * differences.sem(axis=1)
    return DataFrame(
        {
            "mean": mean,
            "low": mean - half,
            "high": mean + half,
        }
    )


def starred(row: Any) -> str:
    """Return a difference, with a star where its interval leaves out 0."""
    return f"{row['mean']:+.1f}{'*' if row['low'] > 0 or row['high'] < 0 else ''}"


def mean_ranks(table: DataFrame) -> Any:
    """Return mean ranks over settings, best first; a method without a number is last there."""
    means = table.mean(axis=1).round(9).unstack("method").fillna(-1)
    return means.rank(axis=1, ascending=False).mean().sort_values(kind="stable")


def wide(column: Any, table: DataFrame) -> DataFrame:
    """Return a row for each method, best first, and a column for each setting."""
    return column.unstack("method").T.reindex(mean_ranks(table).index)


def heat(table: DataFrame, baseline: str) -> str:
    """Return differences to `baseline`, a line for each method."""
    texts = intervals(against(table, baseline)).apply(starred, axis=1)
    texts = wide(texts, table)
    return markdown_of(texts.set_axis(map(name, texts.columns), axis=1))


def markdown_of(rows: DataFrame) -> str:
    return markdown(rows.fillna("–").reset_index().to_dict("records"))


def winners(table: DataFrame) -> str:
    """Return each setting's best mean, and how many methods it cannot be told from (Holm)."""
    rows = []
    for setting, scores in table.groupby(["kind", "strength"], sort=False):
        scores = scores.droplevel(["kind", "strength"])
        means = scores.mean(axis=1)
        best = means.idxmax()
        others = scores.drop(best)
        p = holm(list(stats.ttest_rel(scores.loc[best], others, axis=1).pvalue))
        gain = intervals(scores.loc[[best]] - scores.loc[ALONE]).iloc[0]
        rows.append(
            {
                "setting": name(setting),
                "local, %": f"{means[ALONE]:.1f}",
                "best": best,
                "points above local": "{mean:+.1f} [{low:+.1f}, {high:+.1f}]".format(**gain),
                "not significantly below": f"{sum(value > 0.05 for value in p)} of {len(others)}",
            }
        )
    return markdown(rows)


def summary(cells: DataFrame) -> str:
    """Return a row for each method over all settings."""
    table = by_seed(cells)
    gains = intervals(against(table, ALONE))
    means = wide(table.mean(axis=1), table)
    harmed = wide(by_seed(cells, "harmed").mean(axis=1), table)
    tenth = wide(
        against(by_seed(cells, "worst_tenth"), ALONE).mean(axis=1),
        table,
    )
    mib = wide(
        by_seed(cells, "bytes", 2**-20).fillna(0).mean(axis=1),
        table,
    )
    judges = cells.groupby("method")["judge"].first()
    columns = {
        "judge": judges,
        "mean rank": mean_ranks(table).map("{:.1f}".format),
        "mean gain": gains["mean"].groupby("method").mean().map("{:+.1f}".format),
        "worst regret": (means.max() - means).max(axis=1).map("{:.1f}".format),
        "below local *": (gains["high"] < 0).groupby("method").sum(),
        "above local *": (gains["low"] > 0).groupby("method").sum(),
        "harmed, %": harmed.mean(axis=1).map("{:.0f}".format),
        "harmed at worst": harmed.max(axis=1).map("{:.0f}".format),
        "worst tenth above local": tenth.mean(axis=1).map("{:+.1f}".format),
        "MiB a run": mib.mean(axis=1).map("{:.1f}".format),
        "no number": means.isna().sum(axis=1),
    }
    return markdown_of(DataFrame(columns).reindex(means.index))


def draw(
    table: DataFrame,
    baseline: str,
    words: str,
    file: Path,
) -> None:
    """Draw what `heat` prints, in colours."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from PIL import Image

    gains = intervals(against(table, baseline))
    means = wide(gains["mean"], table)
    texts = wide(gains.apply(starred, axis=1), table)
    methods, settings = means.shape
    figure = Figure(
        figsize=(2.4 + 0.5 * settings, 1.9 + 0.27 * methods),
        layout="constrained",
    )
    axes = figure.add_subplot()
    colours = colormaps["RdBu"].resampled(17)
    image = axes.imshow(
        means,
        cmap=colours,
        vmin=-LARGEST,
        vmax=LARGEST,
        aspect="auto",
    )
    for (line, column), text in np.ndenumerate(texts.fillna("–").to_numpy()):
        colour = "white" if abs(means.iat[line, column]) > 0.7 * LARGEST else "black"
        axes.text(
            column,
            line,
            text,
            ha="center",
            va="center",
            fontsize=6.5,
            color=colour,
        )
    labels = [name(setting) for setting in means.columns]
    axes.set_xticks(
        range(settings),
        labels,
        rotation=45,
        ha="right",
        fontsize=7,
    )
    axes.set_yticks(range(methods), means.index, fontsize=7)
    figure.colorbar(image, label=f"points above {words}", extend="both")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=70)
    few_colours = Image.open(picture).convert(
        "P",
        palette=Image.Palette.ADAPTIVE,
        colors=48,
    )
    few_colours.save(file, optimize=True)


def page(pictures: Path | None) -> None:
    """Print the tables of docs/results/atlas.md, and draw its pictures."""
    cells = complete(concat([stored(kind) for kind in KINDS]))
    table = by_seed(cells)
    print(f"\n## To training alone\n\n{heat(table, ALONE)}")
    print(f"\n## To FedAvg after local training\n\n{heat(table, RIVAL)}")
    print(f"\n## Winners\n\n{winners(table)}\n\n## Over all settings\n\n{summary(cells)}")
    if pictures:
        draw(table, ALONE, "training alone", pictures / "atlas-gain.png")
        draw(table, RIVAL, "FedAvg after local training", pictures / "atlas-fedavg.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", choices=("cells", "page"))
    parser.add_argument("studies", nargs="?", type=Path)
    parser.add_argument("--pictures", type=Path)
    args = parser.parse_args()
    if args.command == "page":
        page(args.pictures)
    else:
        keep(args.studies or parser.error("cells needs the folder of the studies"))
