"""What the cells in atlas/ say, as tables and pictures: which method wins where, whom it harms, and
what tuning chose.

    python benchmarks/atlas_page.py --pictures docs/images    the tables of docs/results/atlas.md, in Markdown
    python benchmarks/atlas_page.py --newcomers STUDY ...     what clients held out of studies get
    python benchmarks/atlas_page.py --traffic STUDY ...       MiB up to a target, of studies that score every round

A setting is a kind of heterogeneity at one strength. It enters where training alone has all seeds
and at most `FAILED` methods lack some: those have no number there, and the last rank.
"""  # noqa: E501

from __future__ import annotations

import argparse
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from measure import markdown
from pandas import DataFrame, concat, read_csv

from fl_lightning.lab import statistics
from fl_lightning.lab.report.tables import reached
from fl_lightning.lab.study.compare import Ranks
from fl_lightning.lab.study.picture import draw_ranks
from fl_lightning.lab.study.scores import read as cells_of

ROOT = Path(__file__).resolve().parents[1]
ALONE, RIVAL = "local", "fedavg after"
FAILED = 2
"""Methods that may lack cells of a setting, since runs with their chosen arguments diverged."""
Setting = tuple[str, str]


@dataclass
class Atlas:
    """Means over clients by setting, method and seed."""

    settings: list[Setting]
    methods: list[str]
    seeds: list[int]
    accuracy: np.ndarray
    """(settings, methods, seeds), in points, nan where a method lacks a seed; so are `worst_tenth`
    and `harmed` (per cent of clients)."""
    worst_tenth: np.ndarray
    harmed: np.ndarray
    mib: np.ndarray
    samples: list[float]
    judges: dict[str, str]
    left_out: list[Setting]

    def against(self, method: str) -> np.ndarray:
        """Differences to one method of the same setting and seed, (settings, methods, seeds)."""
        return self.accuracy - self.accuracy[:, [self.methods.index(method)]]

    def name(self, setting: Setting) -> str:
        """In words."""
        kind, strength = setting
        words = {
            "hsu": "Hsu's label skew, alpha",
            "dirichlet": "label skew by class, alpha",
            "classes": "classes a client:",
            "mixture": "groups of class mixes:",
            "quantity": "one large client, others have",
            "iid": "alike, samples:",
            "rotation": "rotated in groups:",
            "labels": "labels shifted in groups:",
            "glyphs": "typefaces, samples:",
            "watch": "persons, windows a class:",
        }
        return f"{words[kind]} {strength.removesuffix('.0')}"


def read(folder: Path) -> Atlas:
    """The atlas in a folder with tables of cells."""
    cells = concat(
        [read_csv(file, dtype={"strength": str}) for file in sorted(folder.glob("*-cells.csv"))]
    )
    methods, seeds = cells["method"].unique().tolist(), sorted(cells["seed"].unique().tolist())
    judges = dict(zip(cells["method"], cells["judge"], strict=True))
    settings = list(dict.fromkeys(zip(cells["kind"], cells["strength"], strict=True)))
    cells = cells.set_index(["kind", "strength", "method", "seed"])
    ended = set(cells["accuracy"].unstack("seed").dropna().index)  # with all seeds
    lacks = {
        setting: sum((*setting, method) not in ended for method in methods) for setting in settings
    }
    whole = [
        setting for setting in settings if (*setting, ALONE) in ended and lacks[setting] <= FAILED
    ]

    def table(key: str, scale: float) -> np.ndarray:
        rows = cells[key].fillna(0).unstack("seed").dropna()
        rows = rows.reindex([(*setting, method) for setting in whole for method in methods])
        return scale * rows.to_numpy().reshape(len(whole), len(methods), len(seeds))

    samples = [float(cells.loc[(*setting, ALONE, seeds[0]), "samples"]) for setting in whole]
    numbers = (
        table("accuracy", 100),
        table("worst_tenth", 100),
        table("harmed", 100),
        table("bytes", 2**-20),
    )
    return Atlas(
        whole, methods, seeds, *numbers, samples, judges, [c for c in settings if c not in whole]
    )


def interval(differences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Student's t over the last axis, 95 %."""
    low, high = statistics.students([[differences[..., [k]]] for k in range(differences.shape[-1])])
    return np.asarray(low), np.asarray(high)


def starred(mean: float, low: float, high: float) -> str:
    """A difference, with a star where its interval leaves out 0."""
    return "–" if np.isnan(mean) else f"{mean:+.1f}{'*' if low > 0 or high < 0 else ''}"


def ranked(atlas: Atlas) -> list[int]:
    """Methods by mean rank over the settings, the best first."""
    return [int(k) for k in np.argsort(mean_ranks(atlas), kind="stable")]


def mean_ranks(atlas: Atlas) -> np.ndarray:
    """Over the settings, (methods,); who has no number there is last."""
    return statistics.friedman(np.nan_to_num(atlas.accuracy.mean(axis=-1), nan=-1.0))[2]


def heat(atlas: Atlas, baseline: str) -> list[str]:
    """Differences to `baseline` in Markdown: a line for each method, the best mean rank first."""
    differences = atlas.against(baseline)
    (low, high), means = interval(differences), differences.mean(axis=-1)
    rows = [
        [atlas.methods[m], *map(starred, means[:, m], low[:, m], high[:, m])] for m in ranked(atlas)
    ]
    return markdown(["method", *map(atlas.name, atlas.settings)], rows)


def winners(atlas: Atlas) -> list[str]:
    """For each setting the best mean, and how many methods it cannot be told from (Student's t over
    seeds, Holm)."""
    rows, gains = [], atlas.against(ALONE)
    for c, setting in enumerate(atlas.settings):
        means = atlas.accuracy[c].mean(axis=-1)
        best = int(np.nanargmax(means))
        others = [m for m in range(len(atlas.methods)) if m != best and not np.isnan(means[m])]
        apart = [atlas.accuracy[c, best] - atlas.accuracy[c, m] for m in others]
        p = statistics.holm(
            [statistics.over_seeds([[one[[k]]] for k in range(len(one))]) for one in apart]
        )
        alike = sum(value > statistics.LEVEL for value in p)
        low, high = interval(gains[c, best])
        gain = f"{gains[c, best].mean():+.1f} [{float(low):+.1f}, {float(high):+.1f}]"
        alone = f"{means[atlas.methods.index(ALONE)]:.1f}"
        rows.append(
            [atlas.name(setting), alone, atlas.methods[best], gain, f"{alike} of {len(others)}"]
        )
    return markdown(
        ["setting", "local, %", "best", "points above local", "not significantly below"], rows
    )


def summary(atlas: Atlas) -> list[str]:
    """For each method: mean gain, worst regret, settings below and above training alone, clients
    harmed, MiB."""
    head = (
        "method",
        "judge",
        "mean rank",
        "mean gain",
        "worst regret",
        "below local *",
        "above local *",
        "harmed, mean / worst",
        "worst tenth above local",
        "MiB a run",
        "no number",
    )
    rows = []
    gains, means = atlas.against(ALONE), atlas.accuracy.mean(axis=-1)
    low, high = interval(gains)
    ranks, failed = mean_ranks(atlas), np.isnan(means).sum(axis=0)
    regret = np.nanmax(np.nanmax(means, axis=1, keepdims=True) - means, axis=0)
    harmed, mib = atlas.harmed.mean(axis=-1), np.nanmean(atlas.mib, axis=(0, 2))
    tenth = np.nanmean(
        atlas.worst_tenth - atlas.worst_tenth[:, [atlas.methods.index(ALONE)]], axis=(0, 2)
    )
    for m in ranked(atlas):
        name = atlas.methods[m]
        rows.append(
            [
                name,
                atlas.judges[name],
                f"{ranks[m]:.1f}",
                f"{np.nanmean(gains[:, m]):+.1f}",
                f"{regret[m]:.1f}",
                f"{int((high[:, m] < 0).sum())}",
                f"{int((low[:, m] > 0).sum())}",
                f"{np.nanmean(harmed[:, m]):.0f} / {np.nanmax(harmed[:, m]):.0f} %",
                f"{tenth[m]:+.1f}",
                f"{mib[m]:.1f}",
                f"{failed[m] or ''}",
            ]
        )
    return markdown(head, rows)


def tuning(folder: Path) -> list[str]:
    """By method, points on validation data that the choice is above the defaults, a column for each
    kind searched."""
    tables = {
        file.name.removesuffix("-tuned.csv"): read_csv(file)
        for file in sorted(folder.glob("*-tuned.csv"))
    }
    gains = DataFrame(
        {kind: 100 * table.set_index("method")["gain"] for kind, table in tables.items()}
    )
    warnings = concat([table.set_index("method")["warnings"] for table in tables.values()], axis=1)
    edge = warnings.apply(lambda column: column.str.contains("edge", na=False)).sum(axis=1)
    rows = []
    for method in gains.mean(axis=1).sort_values(ascending=False, kind="stable").index:
        row = gains.loc[method]
        cells = ("–" if np.isnan(one) else f"{one:.1f}" for one in row)
        rows.append([method, *cells, f"{row.mean():.1f}", str(edge[method])])
    return markdown(["method", *gains, "mean", "choices at an edge"], rows)


def newcomers(studies: list[Path], samples: tuple[int, ...] = (0, 1, 5)) -> list[str]:
    """Accuracy of clients held out, by study and labelled samples of each class: mean over clients,
    then over seeds, +- its standard error over seeds."""
    scores: dict[tuple[str, str, int], list[float]] = {}
    for study in studies:
        for cell in cells_of([study])[0].itertuples():
            table = (
                DataFrame(cell.run.rows("newcomers"))
                .groupby("samples_per_class")["accuracy"]
                .mean()
            )
            for number in samples:
                scores.setdefault((cell.method, study.name, number), []).append(
                    100 * table.get(number, np.nan)
                )
    heads = [(study.name, number) for study in studies for number in samples]
    rows = []
    for label in dict.fromkeys(label for label, _, _ in scores):
        cells = []
        for head in heads:
            row = np.array(scores.get((label, *head), [np.nan]))
            error = row.std(ddof=1) / len(row) ** 0.5 if len(row) > 1 else np.nan
            cells.append("–" if np.isnan(row.mean()) else f"{row.mean():.1f} +- {error:.1f}")
        rows.append([label, *cells])
    return markdown(["method", *(f"{name}, {number}" for name, number in heads)], rows)


def traffic(studies: list[Path]) -> list[str]:
    """By method and study of one setting, MiB that clients and server send until the mean accuracy
    is halfway between training alone and the best method: mean over the seeds that reach it, and
    how many these are if not all.

    A study whose best method is less than a point above training alone has no target.

    Raises:
        SystemExit: a study does not score every round: what is sent up to a target is not known.
    """
    table: dict[str, list[str]] = {}
    heads = []
    for study in studies:
        runs: dict[str, list[Any]] = {}
        for cell in cells_of([study])[0].itertuples():
            if (every := cell.run.config["evaluation"]["every"]) != 1:
                raise SystemExit(
                    f"atlas_page: {study}: scored every {every} rounds; it needs "
                    f"--evaluation.every 1"
                )
            runs.setdefault(cell.method, []).append(cell)
        means = {
            label: np.mean([np.mean(list(cell.scores)) for cell in some])
            for label, some in runs.items()
        }
        alone, best = float(means[ALONE]), float(max(means.values()))
        target = (alone + best) / 2
        heads.append(f"{study.name}: {100 * target:.1f} %")
        for label, some in runs.items():
            costs = (
                [reached(cell.run, target, cell.column) for cell in some]
                if best - alone >= 0.01
                else []
            )
            ended = [cost["mib"] for cost in costs if cost is not None and cost["mib"] is not None]
            few = f" ({len(ended)} of {len(some)})" if len(ended) < len(some) else ""
            table.setdefault(label, []).append(f"{np.mean(ended):.2f}{few}" if ended else "–")
    return markdown(["method", *heads], [[label, *row] for label, row in table.items()])


def draw(atlas: Atlas, folder: Path) -> None:
    """`atlas-gain.png` and `atlas-fedavg.png` (points above training alone, and above FedAvg judged
    after local training), and `atlas-ranks.png` (mean ranks, by judge)."""
    for baseline, words, name in (
        (ALONE, "training alone", "gain"),
        (RIVAL, "FedAvg after local training", "fedavg"),
    ):
        _draw_heat(atlas, baseline, words, folder / f"atlas-{name}.png")
    draw_ranks([ranks_of(atlas)]).savefig(folder / "atlas-ranks.png", dpi=90)


def _draw_heat(atlas: Atlas, baseline: str, words: str, file: Path) -> None:
    """What `heat` says, in colours."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from PIL import Image

    order, gains = ranked(atlas), atlas.against(baseline)
    (low, high), means = interval(gains), gains.mean(axis=-1)
    size = (2.4 + 0.5 * len(atlas.settings), 1.9 + 0.27 * len(order))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    # points at which colours end: FedAvg's losses in groups would leave nothing of the rest
    most = 20.0
    image = axes.imshow(
        means[:, order].T,
        cmap=colormaps["RdBu"].resampled(17),
        vmin=-most,
        vmax=most,
        aspect="auto",
    )
    for c in range(len(atlas.settings)):
        for line, m in enumerate(order):
            text = starred(means[c, m], low[c, m], high[c, m])
            colour = "white" if abs(means[c, m]) > 0.7 * most else "black"
            axes.text(c, line, text, ha="center", va="center", fontsize=6.5, color=colour)
    axes.set_xticks(
        range(len(atlas.settings)),
        [atlas.name(c) for c in atlas.settings],
        rotation=45,
        ha="right",
        fontsize=7,
    )
    axes.set_yticks(range(len(order)), [atlas.methods[m] for m in order], fontsize=7)
    figure.colorbar(image, label=f"points above {words}", extend="both")
    whole = io.BytesIO()
    figure.savefig(whole, dpi=70)
    # a fraction of its size
    few = Image.open(whole).convert("P", palette=Image.Palette.ADAPTIVE, colors=48)
    few.save(file, optimize=True)


def ranks_of(atlas: Atlas) -> Ranks:
    """Mean ranks over settings of the methods judged after local training, as `fl-train compare`
    draws them."""
    those = [m for m, name in enumerate(atlas.methods) if atlas.judges[name] == "after"]
    scores = np.nan_to_num(atlas.accuracy.mean(axis=-1)[:, those], nan=-1.0)
    chi_square, p, ranks = statistics.friedman(scores)
    pairwise = statistics.pairwise(scores)
    names = [atlas.methods[m] for m in those]
    cliques = [[names[k] for k in group] for group in statistics.cliques(ranks, pairwise)]
    return Ranks(
        "after", names, len(scores), chi_square, p, ranks.tolist(), pairwise.tolist(), cliques
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--atlas", type=Path, default=ROOT / "atlas")
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--newcomers", type=Path, nargs="+")
    parser.add_argument("--traffic", type=Path, nargs="+")
    given = parser.parse_args()
    if given.newcomers or given.traffic:
        print(
            *(newcomers(given.newcomers) if given.newcomers else traffic(given.traffic)), sep="\n"
        )
        raise SystemExit
    atlas = read(given.atlas)
    print(
        f"{len(atlas.settings)} settings, {len(atlas.methods)} methods, seeds {atlas.seeds[0]} to "
        f"{atlas.seeds[-1]}"
    )
    for title, lines in (
        ("To training alone", heat(atlas, ALONE)),
        ("To FedAvg after local training", heat(atlas, RIVAL)),
        ("Winners", winners(atlas)),
        ("Over all settings", summary(atlas)),
        ("What tuning was worth", tuning(given.atlas)),
    ):
        print(f"\n## {title}\n", *lines, sep="\n")
    if atlas.left_out:
        print("\nLeft out, cells are missing:", ", ".join(map(atlas.name, atlas.left_out)))
    if given.pictures:
        draw(atlas, given.pictures)
