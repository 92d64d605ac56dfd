"""Compares a table's columns between silos: findings as a DataFrame, for the screen and as a
page."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from fl_lightning import __version__
from fl_lightning.configuration.config import DataConfig, check
from fl_lightning.data import silos
from fl_lightning.foundation.extras import require
from fl_lightning.foundation.files import write_whole
from fl_lightning.results.opening import check_out

if TYPE_CHECKING:
    from pandas import DataFrame
    from rich.table import Table

MARKER = '<meta name="generator" content="fl-train check-data'


def check_data(data: DataConfig, out: str | None) -> DataFrame:
    """Compares the columns of a table between its silos.

    Args:
        data: names the table and its columns.
        out: HTML file to write; None: no file.

    Returns:
        A row for each `Finding`, the worst first.
    """
    require("report", "check-data", data.root)
    check(
        "data.source",
        data.source,
        silos.is_table(data),
        "its columns cannot be compared: name a table, --data.root FILE.csv",
    )
    page = (
        None
        if out is None
        else check_out(
            "out",
            out,
            ".html",
            MARKER,
            "page of check-data",
        )
    )
    findings, summaries = silos.check_table(data)
    import pandas as pd

    table = pd.DataFrame(findings, columns=list(silos.Finding._fields))
    if page is not None:
        from fl_lightning.lab.report.page import template

        first = next(iter(summaries))
        columns = {name: asdict(column) for name, column in summaries[first].items()}
        text = template("fl_lightning.lab.datacheck").render(
            mark=f"fl-train check-data {__version__}",
            root=Path(str(data.root)).name,
            table=table,
            summaries=summaries,
            first=first,
            sent=json.dumps(columns, indent=1, ensure_ascii=False),
            least=silos.LEAST,
        )
        write_whole(page, text)
    return table


def shown(findings: DataFrame) -> Table:
    """Returns the findings as a table for the terminal."""
    from rich.markup import escape
    from rich.table import Table

    columns = ["finding", "column", "silo", "numbers"]
    table = Table(*columns)
    for row in findings[columns].itertuples(index=False):
        table.add_row(*map(escape, row))
    return table
