"""The hyperparameters that `fl-train tune` chose for the rows of a study."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fl_lightning.lab.study.folder import StudyFolder, explaining_damage, search_of

TUNED = "tuned.csv"
UNTUNED = "untuned"
"""Suffix of the label of a row that has the first trial's hyperparameters."""


def chosen_values(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Read the hyperparameters that `fl-train tune` chose for the rows of a study.

    Args:
        folder: the study's folder: of a tuned study `OUT/study` in the search's folder `OUT`, or
            its unpacked archive.

    Returns:
        The values by row label, each as text (`optimizer.lr=0.05, mu=0.1`), and the search's
        warnings; both are empty if the study was not tuned.

    Raises:
        BadInput: `tuned.csv` is damaged.
    """
    file, search = folder / TUNED, search_of(folder)
    if not file.is_file() and search is not None:
        file = search / TUNED
    if not StudyFolder(folder) or not file.is_file():
        return {}, []
    with explaining_damage("compare", str(folder), f"{file} is damaged"):
        rows = list(csv.DictReader(io.StringIO(file.read_text(encoding="utf-8"))))
        values = {}
        for row in rows:
            if row.get("start_values"):
                values[f"{row['method']} {UNTUNED}"] = values_text(json.loads(row["start_values"]))
            values[row["method"]] = values_text(json.loads(row["values"]))
    return values, [f"{row['method']}: {row['warnings']}" for row in rows if row.get("warnings")]


def values_text(values: Mapping[str, Any]) -> str:
    """The values of a trial as text: `optimizer.lr=0.05, mu=0.1`."""
    return ", ".join(f"{key.removeprefix('method.')}={value}" for key, value in values.items())
