"""The answer as files and on the screen: `worth.json`, `worth.csv`, `worth.html`, a table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fl_lightning.foundation.csvtable import as_csv
from fl_lightning.foundation.files import write_whole
from fl_lightning.lab.worth import LINEAR, page, words
from fl_lightning.lab.worth.measure import as_json
from fl_lightning.lab.worth.silos import Measured

COLUMNS = (
    "silo",
    "samples",
    "method",
    "alone",
    "federated",
    "gain",
    "low",
    "high",
    "verdict",
    "sentence",
)
"""Of `worth.csv`, and the keys of each silo in `worth.json` that scripts rely on."""
FURTHER = ("alone_kind", "linear", "margin", "conditional")
"""Further columns of `worth.csv`."""


def write(out: Path, measured: Measured, sections: list[page.Section]) -> None:
    """Write all files of the answer into the folder `out`; `sections`: what the page has below its
    first screen."""
    content = as_json(measured)
    files = {
        "worth.html": page.render(measured, sections),
        "worth.csv": as_csv([_line(row) for row in content["silos"]]),
        "worth.json": json.dumps(content, indent=1, ensure_ascii=False) + "\n",
    }
    for name, made in files.items():
        write_whole(out / name, made, durable=False)


def table(measured: Measured) -> str:
    """What the terminal shows: the answer, a line for each silo, and what its sentence says beyond
    it."""
    metric = measured.metric
    head = ["silo", "samples", "alone", "linear", "federated", "gain", "95 % interval", "verdict"]
    lines = [head]
    for answer in measured.answers:
        known = answer.estimate is not None
        gain = words.signed(answer.estimate.gain, metric) if answer.estimate else "-"
        ends = (
            f"{words.signed(answer.low, metric)} to {words.signed(answer.high, metric)}"
            if known
            else "-"
        )
        linear = answer.methods.get(LINEAR, {}).get("score", math.nan)
        scores = [words.score(x, metric) for x in (answer.alone, linear, answer.federated)]
        lines.append([answer.silo.name, str(answer.silo.size), *scores, gain, ends, answer.verdict])
    widths = [max(len(line[k]) for line in lines) for k in range(len(head))]
    texts = ["  ".join(map(_aligned, line, widths, range(len(line)))).rstrip() for line in lines]
    notes = [
        f"{a.silo.name}: {a.sentence}"
        for a in measured.answers
        if a.verdict == "cannot tell yet" or a.silo.shared
    ]
    margin = f"margin {words.amount(measured.margin, metric)}{words.unit_of(metric)}"
    what = (
        f"{words.METRICS[metric]}{', %' if metric != 'mae' else ''}; method {measured.method}, "
        f"{margin}"
    )
    notes.append(words.alone(measured))
    parts = [
        measured.consortium["sentence"],
        "",
        f"({what})",
        *texts,
        *([""] if notes else []),
        *notes,
    ]
    return "\n".join(parts) + "\n"


def _line(row: Mapping[str, Any]) -> dict[str, Any]:
    """A silo's line of `worth.csv`."""
    return {name: row[name] for name in (*COLUMNS, *FURTHER) if name in row}


def _aligned(cell: str, width: int, column: int) -> str:
    return cell.rjust(width) if 0 < column < 6 else cell.ljust(width)
