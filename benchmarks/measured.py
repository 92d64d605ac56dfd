"""The table and the picture of docs/results/measured.md, from the three studies kapc/measured, -watch and -glyphs.

    python benchmarks/measured.py STUDY [STUDY ...] --picture docs/images/measured.png

Prints, in Markdown, each method's difference to training alone by setting with its 95 % interval, and what they come to
over all settings, as `fl-train compare` has them. Settings in which not all methods have equally many seeds are left
out for all.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import tempfile
from pathlib import Path

from fl_lightning.cli import main

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
Row = dict[str, str]


def compared(study: str, baseline: str) -> list[Row]:
    """The rows of one setting each of `fl-train compare STUDY --baseline BASELINE --format csv`."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        file = Path(folder) / "table.csv"
        main(["compare", study, "--baseline", baseline, "--format", "csv", "--out", str(file)])
        with file.open(newline="", encoding="utf-8") as stream:
            rows = list(csv.DictReader(stream))
    return [row | {"study": study} for row in rows if row["setting"] != "all settings"]


def setting(row: Row) -> str:
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


def number(row: Row, column: str) -> float | None:
    """In points."""
    return 100 * float(row[column]) if row.get(column) else None


def tables(studies: list[str]) -> tuple[dict[str, dict[str, Row]], dict[str, dict[str, Row]]]:
    """Rows by setting and method: to training alone, and to `OURS`; settings where some method is missing left out."""
    both: list[dict[str, dict[str, Row]]] = []
    for baseline in ("local", OURS):
        table: dict[str, dict[str, Row]] = {}
        for study in studies:
            for row in compared(study, baseline):
                table.setdefault(setting(row), {})[row["method"]] = row
        whole = {name: rows for name, rows in table.items() if rows.keys() >= NAMES.keys()}
        both.append({name: rows for name, rows in whole.items() if len({r["seeds"] for r in rows.values()}) == 1})
    return both[0], both[1]


def gain(rows: dict[str, Row], method: str) -> float:
    """Points above training alone. FedAvg fine-tuned has another judge, and so no paired difference: that of means."""
    paired = number(rows[method], "difference")
    mean, alone = number(rows[method], "mean"), number(rows["local"], "mean")
    assert mean is not None and alone is not None
    return paired if paired is not None else mean - alone


def cell(rows: dict[str, Row], method: str) -> str:
    """A difference with its interval; a star where that leaves out 0."""
    low, high = number(rows[method], "low"), number(rows[method], "high")
    if low is None or high is None:
        return f"{gain(rows, method):+.1f}"
    return f"{gain(rows, method):+.1f} [{low:+.1f}, {high:+.1f}]{'*' if low > 0 or high < 0 else ''}"


def mean(values: list[float]) -> float:
    """Of numbers."""
    return sum(values) / len(values)


def written(alone: dict[str, dict[str, Row]], ours: dict[str, dict[str, Row]]) -> str:
    """Both tables in Markdown."""
    settings, methods, lines = list(alone), [m for m in NAMES if m != "local"], []
    for part in (methods[:5], methods[5:]):
        lines.append(f"| setting | seeds | local, % | {' | '.join(NAMES[m] for m in part)} |")
        lines.append("| --- " * (len(part) + 3) + "|")
        for name in settings:
            rows = alone[name]
            cells = " | ".join(cell(rows, m) for m in part)
            lines.append(f"| {name} | {rows['local']['seeds']} | {number(rows['local'], 'mean'):.1f} | {cells} |")
        lines.append("")
    head = ("mean difference to local", "worst regret to the best other", "below local *", "above local *")
    lines += [f"| method | {' | '.join(head)} | harmed, mean | harmed, worst |", "| --- " * 7 + "|"]
    for method in NAMES:
        regrets, low, high, harmed = {}, 0, 0, []
        for name in settings:
            rows = alone[name]
            regrets[name] = max(gain(rows, m) for m in NAMES if m != method) - gain(rows, method)
            low += (number(rows[method], "high") or 0) < 0
            high += (number(rows[method], "low") or 0) > 0
            harmed.append(number(rows[method], "harmed") or 0.0)
        at, share = max(regrets, key=regrets.__getitem__), f"{mean(harmed):.0f} % | {max(harmed):.0f} %"
        total = f"{mean([gain(alone[n], method) for n in settings]):+.2f}"
        lines.append(f"| {NAMES[method]} | {total} | {regrets[at]:.1f} ({at}) | {low} | {high} | {share} |")
    others = [m for m in NAMES if m not in (OURS, "fedavg finetuned")]
    best = [n for n in settings if all((number(ours[n][m], "high") or 0) < 0 for m in others)]
    lines += ["", f"{OURS} above every other with an interval that leaves out 0: {', '.join(best) or 'in no setting'}."]
    return "\n".join(lines)


def draw(alone: dict[str, dict[str, Row]], file: Path) -> None:
    """Difference to training alone by setting, a line for each method; the band is our interval."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    settings = sorted(alone, key=lambda name: gain(alone[name], OURS))
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    x = range(len(settings))
    low = [float(alone[n][OURS]["low"] or "nan") * 100 for n in settings]
    high = [float(alone[n][OURS]["high"] or "nan") * 100 for n in settings]
    axes.fill_between(x, low, high, color="C0", alpha=0.15, linewidth=0)
    for place, method in enumerate(DRAWN):
        width = 2.5 if method == OURS else 1.2
        values = [gain(alone[n], method) for n in settings]
        axes.plot(x, values, color=f"C{place}", label=NAMES[method], linewidth=width, marker="o", markersize=3)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_ylim(bottom=LOWEST)
    axes.set_xticks(list(x), settings, rotation=40, ha="right", fontsize=8)
    axes.set_ylabel("points above training alone")
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(file, dpi=75)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("studies", nargs="+", help="study folders")
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    alone, ours = tables(given.studies)
    print(written(alone, ours))
    if given.picture:
        draw(alone, given.picture)
