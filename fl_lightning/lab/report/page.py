"""Render the page on runs: one HTML file with style, script and charts that opens offline."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Any

from fl_lightning import __version__
from fl_lightning.lab.report import clients, figures, newcomers, pictures, tables, vector
from fl_lightning.results.result import AXES, TABLES
from fl_lightning.results.runs import Runs, seed_groups

if TYPE_CHECKING:
    from jinja2 import Template

MARKER = '<meta name="generator" content="fl-train report'
"""Text near the top of every page; a file that contains it may be overwritten."""


def render(runs: Runs) -> str:
    """Render the page as HTML."""
    from jinja2.utils import htmlsafe_json_dumps
    from markupsafe import Markup

    for run in runs:
        for table in TABLES:  # adds notes on unreadable files, which the page shows
            run.rows(table)
    drawn = figures.draw(runs)
    relation = pictures.relations(runs)
    metric, ledgers = runs[0].metric, [(run.name, run.ledger) for run in runs]
    splits = clients.splits(runs)
    return template("fl_lightning.lab.report").render(
        mark=f"fl-train report {__version__}",
        runs=runs,
        metric=metric,
        colours=figures.colours(runs),
        figures={name: Markup(vector.svg(name, figure)) for name, figure in drawn.items()},
        axes=AXES,
        constant={
            name: figures.words_if_constant(ledger.share) for name, ledger in ledgers if ledger
        },
        unmeasured=figures.unmeasured(runs),
        banded=bool(seed_groups(runs)),
        channel=any(run.axis("channel") for run in runs),
        tables=tables,
        newcomers=newcomers,
        relation=relation,
        data=htmlsafe_json_dumps(
            relation,
            separators=(",", ":"),
            allow_nan=False,
        ),
        clients=_clients(relation),
        splits=[(clients.split_words(s, runs), clients.split_table(s)) for s in splits],
        by_client=clients.table(runs),
        own_data_value=clients.own_data_value(runs),
        notes=lambda section: [
            f"{run.name}: {note}" for run in runs for note in run.notes.get(section, [])
        ],
    )


def template(package: str, file: str = "page.html.j2") -> Template:
    """Load a template of a package. It may extend base.html.j2; rendering it with an undefined
    variable raises."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folders = [str(files(name)) for name in (package, "fl_lightning.lab.report")]
    environment = Environment(
        loader=FileSystemLoader(folders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(file)


def _clients(relation: dict[str, Any]) -> dict[int, str]:
    """Names of the clients with pictures of their own, by number; different names in different runs
    are joined."""
    rounds = [picture for run in relation["runs"] for picture in run["pictures"].values()]
    shown = sorted({client for picture in rounds for client in picture["clients"]})
    names = [run.get("names", {}) for run in relation["runs"]]
    joined = {}
    for client in shown:
        own_names = [of_run.get(client, str(client)) for of_run in names]
        joined[client] = " / ".join(dict.fromkeys(own_names))
    return joined
