"""The page itself: template, style, script and plotly.js put into one file that needs no
network."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Any

from fl_lightning import __version__
from fl_lightning.lab.report import clients, figures, newcomers, pictures, tables
from fl_lightning.results.result import TABLES, RunResult

if TYPE_CHECKING:
    from jinja2 import Template

MARKER = '<meta name="generator" content="fl-train report'
"""Near the top of every page: a file that has it may be overwritten."""


def render(runs: list[RunResult]) -> str:
    """The HTML of the page on `runs`."""
    from jinja2.utils import htmlsafe_json_dumps
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    for run in runs:
        for table in TABLES:  # so that the notes tell what cannot be read
            run.rows(table)
    drawn = (
        figures.training(runs) | figures.fairness(runs) | figures.ledger(runs) | figures.costs(runs)
    )
    drawn |= newcomers.curve(runs)
    relation, splits = pictures.relations(runs), clients.splits(runs)
    for run in relation["runs"]:
        run["layers"] = figures.labels(run["layers"])
    data = {
        "names": figures.run_labels(runs),
        "colours": figures.colours(runs),
        "curves": figures.curves(runs),
        "figures": drawn,
        "relation": relation,
        "shares": figures.shares(runs),
        "splits": splits,
    }
    source = files("fl_lightning.lab.report")
    return template("fl_lightning.lab.report").render(
        version=__version__,
        marker=Markup(MARKER),
        style=Markup(source.joinpath("page.css").read_text(encoding="utf-8")),
        script=Markup(source.joinpath("page.js").read_text(encoding="utf-8")),
        plotly=Markup(get_plotlyjs()),
        data=htmlsafe_json_dumps(data, separators=(",", ":"), allow_nan=False),
        runs=runs,
        metric=runs[0].metric,
        colours=data["colours"],
        tables=tables,
        figures=drawn,
        newcomers=newcomers,
        curves=data["curves"],
        relation=relation,
        clients=_clients(relation),
        shares=data["shares"],
        splits=[(clients.split_words(split, runs), clients.split_table(split)) for split in splits],
        by_client=clients.table(runs),
        own_worth=clients.own_worth(runs),
        notes=lambda section: [
            f"{run.name}: {note}" for run in runs for note in run.notes.get(section, [])
        ],
    )


def template(package: str, file: str = "page.html.j2") -> Template:
    """The page of a package, in which every name must be given."""
    from jinja2 import Environment, StrictUndefined

    page = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return page.from_string(files(package).joinpath(file).read_text(encoding="utf-8"))


def _clients(relation: dict[str, Any]) -> dict[int, str]:
    """Of the clients that are shown one by one, the name (of one number several, if runs differ) or
    number."""
    rounds = [picture for run in relation["runs"] for picture in run["pictures"].values()]
    shown = sorted({client for picture in rounds for client in picture["clients"]})
    return {
        c: " / ".join(
            dict.fromkeys(run.get("names", {}).get(c, str(c)) for run in relation["runs"])
        )
        for c in shown
    }
