"""Figures of a study: scores by round with bands over seeds, intervals of paired differences, and
mean ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pandas import DataFrame, Series

from fl_lightning.foundation.metric import ACCURACY, FURTHER, MODELS
from fl_lightning.lab.report.vector import curve, finish, literal, looks, panels
from fl_lightning.lab.study.compare import Compared, Ranks

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(
    runs: DataFrame,
    compared: Compared,
) -> dict[str, tuple[Figure, str]]:
    """Draw the study's figures, by file name, each with its caption; figures without data are left
    out."""
    drawn: dict[str, tuple[Figure, str]] = {}
    table = compared.table
    metric = FURTHER.get(runs.metric.iloc[0], ACCURACY)
    methods = looks(table.method)
    judges = list(table.judge.unique())
    for judge in judges:
        end = f"-{judge}" if len(judges) > 1 else ""
        words = f" ({MODELS[judge]})"
        of_judge = runs[runs.model == judge]
        scored = of_judge[[_score_by_round(row) != {} for row in of_judge.itertuples()]]
        if len(scored):
            caption = (
                f"{metric.words} by round{words}: mean over seeds; bands are one standard "
                "deviation over seeds on either side"
            )
            figure = _curves(scored, methods, metric.words)
            drawn[f"{metric.name}-by-round{end}"] = figure, caption
        rows = table[(table.judge == judge) & table.difference.notna()]
        if len(rows):
            name = f"differences-to-{_as_file_name(rows.baseline.iloc[0])}{end}"
            drawn[name] = (
                _forest(rows, methods),
                f"paired differences{words}: intervals of 95 % for the mean difference of new "
                "seeds; hollow: no interval",
            )
    if compared.ranks:
        words = "mean ranks over settings; bars join methods that do not differ"
        drawn["mean-ranks"] = draw_ranks(compared.ranks), words
    return drawn


def _score_by_round(run: Any) -> dict[float, float]:
    """The mean score of a run by round."""
    return {row["round"]: row[run.column] for row in run.run.rows_with(run.column)}


def _curves(
    runs: DataFrame,
    methods: dict[str, Any],
    words: str,
) -> Figure:
    """A panel for each setting, a line for each method over the rounds that all its seeds have
    scored, and a band over seeds."""
    settings = runs.groupby("setting", sort=False)
    figure, panel_axes = panels(list(settings.groups), 3.7)
    for axes, (_, of_setting) in zip(panel_axes, settings, strict=True):
        for label, of_method in of_setting.groupby("method", sort=False):
            scores = DataFrame([_score_by_round(run) for run in of_method.itertuples()])
            by_round = scores.dropna(axis=1).sort_index(axis=1)
            if by_round.size:
                curve(
                    axes,
                    by_round.columns,
                    by_round,
                    label,
                    methods[label],
                )
        finish(axes, "round", f"{words}, mean over clients", percent=True)
    return figure


def _forest(rows: DataFrame, methods: dict[str, Any]) -> Figure:
    """A panel for each setting: each method's mean difference in points and its interval, the first
    method at the top."""
    settings = rows.groupby("setting", sort=False)
    height = 1.3 + 0.28 * rows.method.nunique()
    figure, panel_axes = panels(list(settings.groups), height, one_scale=True)
    for axes, (_, of_setting) in zip(panel_axes, settings, strict=True):
        for place, row in enumerate(of_setting.itertuples()):
            colour = methods[row.method]["color"]
            has_interval = row.low == row.low
            if has_interval:
                axes.plot(
                    [100 * row.low, 100 * row.high],
                    [place, place],
                    color=colour,
                )
            face = colour if has_interval else "white"
            axes.plot(
                100 * row.difference,
                place,
                "o",
                color=colour,
                markerfacecolor=face,
            )
        axes.axvline(0, color="grey", linewidth=1)
        names = [literal(method) for method in of_setting.method]
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(of_setting) - 0.5, -0.5)
        axes.set_xlabel(f"difference to {literal(of_setting.baseline.iloc[0])}, points")
        axes.grid(alpha=0.3, axis="x")
    return figure


def _as_file_name(label: str) -> str:
    """A label as part of a file name."""
    return "".join(c if c.isalnum() or c in "=.+-" else "-" for c in label)


def draw_ranks(ranks: Sequence[Ranks]) -> Figure:
    """Mean ranks: a panel for each judge, the best method at the top.

    Bars join methods that pairwise Wilcoxon-Holm cannot tell apart (Demsar, JMLR 2006).
    """
    titles = [
        f"{MODELS[rank.judge]}: {rank.settings} settings (Friedman p = {rank.p:.2g})"
        for rank in ranks
    ]
    most = max(len(rank.methods) for rank in ranks)
    figure, panel_axes = panels(titles, 1.3 + 0.28 * most)
    for axes, rank in zip(panel_axes, ranks, strict=True):
        places = Series(rank.ranks, rank.methods).sort_values(kind="stable")
        names = [f"{literal(method)}  {place:.2f}" for method, place in places.items()]
        for number, clique in enumerate(rank.cliques, start=1):
            ends = places.index.get_indexer([clique[0], clique[-1]])
            edge = places.max() + 0.1 * number
            axes.plot([edge, edge], ends, linewidth=4, color="grey")
        axes.plot(places, range(len(names)), "o", color="black")
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlabel("mean rank over settings")
        axes.grid(alpha=0.3, axis="x")
    return figure
