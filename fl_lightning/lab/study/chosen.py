"""What `fl-train tune` chose for the rows of its study: for the table that compares them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fl_lightning.lab.study.folder import StudyFolder, reading, search_of

TUNED = "tuned.csv"
UNTUNED = "untuned"
"""Behind the label of a row with the settings that its tuned twin began from."""


def chosen(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Values by row of the study in `folder`, as `optimizer.lr=0.05, mu=0.1`, and the search's
    warnings.

    Both are empty unless it is the study of a search (`OUT/study`), or an unpacked archive of one.
    `BadInput` where `tuned.csv` is damaged.
    """
    search = folder if (folder / TUNED).is_file() else search_of(folder)
    if not StudyFolder(folder) or search is None or not (search / TUNED).is_file():
        return {}, []
    file = search / TUNED
    with reading("compare", str(folder), f"{file} is damaged"):
        rows = list(csv.DictReader(io.StringIO(file.read_text(encoding="utf-8"))))
        values = {}
        for row in rows:
            if row.get("start_values"):
                values[f"{row['method']} {UNTUNED}"] = words(json.loads(row["start_values"]))
            values[row["method"]] = words(json.loads(row["values"]))
    return values, [f"{row['method']}: {row['warnings']}" for row in rows if row.get("warnings")]


def words(values: Mapping[str, Any]) -> str:
    """Values of a trial, for readers."""
    return ", ".join(f"{key.removeprefix('method.')}={value}" for key, value in values.items())
