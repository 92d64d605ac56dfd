"""The table and the picture of docs/results/measured.md, from the three studies kapc/measured, -watch and -glyphs.

    python benchmarks/measured.py STUDY [STUDY ...] --picture docs/images/measured.png

Prints, in Markdown, each method's difference to training alone by setting with its 95 % interval, and what they come to
over all settings, as `fl-train compare` has them. Settings in which not all methods have equally many seeds are left
out for all.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from pandas import DataFrame, MultiIndex, Series, concat

from fl_lightning import compare

OURS = "selfkapc"
NAMES = {
    "selfkapc": "selfkapc",
    "pfedgraph": "pFedGraph",
    "kapc rho 0.3": "KAPC, exact, rho 0.3",
    "kapc rho 3": "KAPC, exact, rho 3",
    "kapc paper": "KAPC, paper",
    "fedavg after": "FedAvg, after local training",
    "fedavg finetuned": "FedAvg, fine-tuned",
    "fedper": "FedPer",
    "ditto": "Ditto",
    "fedamp": "FedAMP",
    "local": "local",
}
DRAWN = ("selfkapc", "pfedgraph", "kapc rho 0.3", "kapc rho 3", "fedavg after", "fedper", "ditto")
"""Of the picture: the others lie far below it in some settings."""
LOWEST = -15.0
"""Points below training alone at which the picture ends."""
POINTS = ["mean", "difference", "low", "high", "harmed"]


def setting(row: Any) -> str:
    """In a few words."""
    keys = dict(part.split("=", 1) for part in row["setting"].split(", "))
    if "data.samples_per_class" in keys:
        return f"watch, {keys['data.samples_per_class']} windows"
    data = "glyphs" if "glyphs" in row["study"] else "digits"
    partition, planted = keys["data.partition"], keys["data.planted"]
    if planted != "none":
        return f"{data}, groups by {planted}"
    words = {"iid": "iid", "hsu": f"Hsu {keys['data.alpha']}", "dirichlet": f"by class {keys['data.alpha']}"}
    return f"{data}, {words[partition]}"


def table(studies: list[str], baseline: str) -> DataFrame:
    """Rows of `fl-train compare STUDY --baseline BASELINE` by setting and method, `POINTS` in points; `gain`: above
    training alone. Settings where some method is missing are left out.

    FedAvg fine-tuned has another judge, and so no paired difference: its gain is the difference of means.
    """
    rows = concat([compare(study, baseline=baseline).assign(study=study) for study in studies])
    rows = rows[rows["setting"] != "all settings"]
    rows[POINTS] = 100 * rows[POINTS].astype(float)
    rows.index = MultiIndex.from_arrays([rows.apply(setting, axis=1), rows["method"]], names=["in", "by"])
    rows = rows.groupby("in", sort=False).filter(
        lambda part: set(NAMES) <= set(part["method"]) and part["seeds"].nunique() == 1
    )
    alone = rows["mean"].xs("local", level="by").reindex(rows.index.get_level_values("in")).to_numpy()
    return rows.assign(gain=rows["difference"].fillna(rows["mean"] - alone))


def by_setting(rows: DataFrame, column: str) -> DataFrame:
    """One number of all methods (columns) in all settings."""
    return rows[column].unstack("by", sort=False)[list(NAMES)]


def cell(row: Series) -> str:
    """A difference with its interval; a star where that leaves out 0."""
    gain, low, high = row["gain"], row["low"], row["high"]
    star = "*" if low > 0 or high < 0 else ""
    return f"{gain:+.1f}" if np.isnan(low) else f"{gain:+.1f} [{low:+.1f}, {high:+.1f}]{star}"


def written(alone: DataFrame, ours: DataFrame) -> str:
    """Both tables in Markdown, of the rows against training alone and against `OURS`."""
    methods, lines = [m for m in NAMES if m != "local"], []
    gains, low, high, harmed = (by_setting(alone, name) for name in ("gain", "low", "high", "harmed"))
    for part in (methods[:5], methods[5:]):
        lines.append(f"| setting | seeds | local, % | {' | '.join(NAMES[m] for m in part)} |")
        lines.append("| --- " * (len(part) + 3) + "|")
        for name in gains.index:
            local, cells = alone.loc[name, "local"], " | ".join(cell(alone.loc[name, m]) for m in part)
            lines.append(f"| {name} | {local['seeds']} | {local['mean']:.1f} | {cells} |")
        lines.append("")
    head = ("mean difference to local", "worst regret to the best other", "below local *", "above local *")
    lines += [f"| method | {' | '.join(head)} | harmed, mean | harmed, worst |", "| --- " * 7 + "|"]
    for m in NAMES:
        regret, share = gains.drop(columns=m).max(axis=1) - gains[m], harmed[m].fillna(0.0)
        cells = [f"{gains[m].mean():+.2f}", f"{regret.max():.1f} ({regret.idxmax()})", f"{(high[m] < 0).sum()}",
                 f"{(low[m] > 0).sum()}", f"{share.mean():.0f} %", f"{share.max():.0f} %"]  # fmt: skip
        lines.append(f"| {NAMES[m]} | {' | '.join(cells)} |")
    others = [m for m in NAMES if m not in (OURS, "fedavg finetuned")]
    below = (by_setting(ours, "high")[others] < 0).all(axis=1)
    best = ", ".join(name for name in gains.index if below[name])
    return "\n".join(
        [*lines, "", f"{OURS} above every other with an interval that leaves out 0: {best or 'in no setting'}."]
    )


def draw(alone: DataFrame, file: Path) -> None:
    """Difference to training alone by setting, a line for each method; the band is our interval."""
    from matplotlib.figure import Figure

    gains = by_setting(alone, "gain").sort_values(OURS, kind="stable")
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.add_subplot()
    x = range(len(gains))
    low, high = (by_setting(alone, end)[OURS][gains.index] for end in ("low", "high"))
    axes.fill_between(x, low, high, color="C0", alpha=0.15, linewidth=0)
    for place, m in enumerate(DRAWN):
        width = 2.5 if m == OURS else 1.2
        axes.plot(x, gains[m], color=f"C{place}", label=NAMES[m], linewidth=width, marker="o", markersize=3)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_ylim(bottom=LOWEST)
    axes.set_xticks(list(x), list(gains.index), rotation=40, ha="right", fontsize=8)
    axes.set_ylabel("points above training alone")
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(file, dpi=75)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("studies", nargs="+", help="study folders")
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    alone = table(given.studies, "local")
    print(written(alone, table(given.studies, OURS)))
    if given.picture:
        draw(alone, given.picture)
