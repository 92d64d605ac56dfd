"""What `fl-train tune` chose for the rows of its study: for the table that compares them."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fl_lightning.foundation.errors import BadInput
from fl_lightning.lab.study.folder import StudyFolder, search_of

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
    try:
        with (search / TUNED).open(newline="", encoding="utf-8") as opened:
            rows = list(csv.DictReader(opened))
        begun = [row for row in rows if row.get("start_values")]
        values = {
            f"{row['method']} {UNTUNED}": words(json.loads(row["start_values"])) for row in begun
        }
        values |= {row["method"]: words(json.loads(row["values"])) for row in rows}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, csv.Error) as error:
        raise BadInput(
            "compare", str(folder), f"{search / TUNED} is damaged ({type(error).__name__})"
        ) from None
    return values, [f"{row['method']}: {row['warnings']}" for row in rows if row.get("warnings")]


def words(values: Mapping[str, Any]) -> str:
    """Values of a trial, for readers."""
    return ", ".join(f"{key.removeprefix('method.')}={value}" for key, value in values.items())
