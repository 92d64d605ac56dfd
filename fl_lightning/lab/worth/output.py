"""Write the answer to `worth.json`, `worth.csv` and `worth.html`, and as a table for the
terminal."""

from __future__ import annotations

import json
from pathlib import Path

from fl_lightning.foundation.csvtable import as_csv
from fl_lightning.foundation.files import write_whole
from fl_lightning.lab.worth import page, words
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
"""Columns of `worth.csv`, and the keys of each silo in `worth.json` that scripts rely on."""
FURTHER = ("alone_kind", "linear", "margin", "conditional")
"""Further columns of `worth.csv`."""
ALIGN = (str.ljust, *[str.rjust] * 5, str.ljust, str.ljust)
"""Alignment of each column of the terminal's table."""


def write(out: Path, measured: Measured, sections: list[page.Section]) -> None:
    """Write all result files to the folder `out`; `sections`: further tables of the page."""
    content = as_json(measured)
    rows = [{name: row[name] for name in (*COLUMNS, *FURTHER)} for row in content["silos"]]
    texts = {
        "worth.html": page.render(measured, sections),
        "worth.csv": as_csv(rows),
        "worth.json": json.dumps(content, indent=1, ensure_ascii=False) + "\n",
    }
    for name, text in texts.items():
        write_whole(out / name, text, durable=False)


def table(measured: Measured) -> str:
    """Format the terminal's text: the overall answer, a line for each silo, and the sentences of
    silos that have no verdict or share samples with another silo."""
    metric = measured.metric
    lines = [
        ("silo", "samples", "alone", "linear", "federated", "gain", "95 % interval", "verdict")
    ]
    for answer in measured.answers:
        gain = interval = "-"
        if answer.estimate is not None:
            gain = words.signed(answer.estimate.gain, metric)
            interval = f"{words.signed(answer.low, metric)} to {words.signed(answer.high, metric)}"
        alone, linear, federated = (
            words.score(value, metric) for value in (answer.alone, answer.linear, answer.federated)
        )
        name, size = answer.silo.name, str(answer.silo.size)
        line = (name, size, alone, linear, federated, gain, interval, answer.verdict)
        lines.append(line)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = []
    for cells in lines:
        columns = zip(ALIGN, cells, widths, strict=True)
        texts.append("  ".join(align(cell, width) for align, cell, width in columns).rstrip())
    notes = [
        f"{answer.silo.name}: {answer.sentence}"
        for answer in measured.answers
        if answer.verdict == "cannot tell yet" or answer.silo.shared
    ]
    unit = "" if metric == "mae" else ", %"
    margin = f"margin {words.amount(measured.margin, metric)}{words.unit_of(metric)}"
    scope = f"({words.METRICS[metric]}{unit}; method {measured.method}, {margin})"
    sentence = measured.consortium["sentence"]
    return "\n".join([sentence, "", scope, *texts, "", *notes, words.best_alone(measured), ""])
