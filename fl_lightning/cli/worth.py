"""`fl-train worth`: what each silo gains from federating."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fl_lightning.cli.settings import CommandLine, read_line

if TYPE_CHECKING:
    from fl_lightning.lab.worth.silos import Measured


def worth(argv: list[str]) -> None:
    """Run what is missing in the folder `--out`, and write and print the answer."""
    from fl_lightning.lab.worth import output

    line = read_line(argv, "worth")
    measured = answer(line, ["fl-train", "worth", *argv])
    print(output.table(measured), end="")
    print(f"the page: {Path(line.values.out) / 'worth.html'}")


def answer(line: CommandLine, again: Sequence[str]) -> Measured:
    """`lab.worth.launch.worth` with the values of a line; `again` is the command that goes on."""
    from fl_lightning.lab.worth.launch import worth as launch

    values = line.values.as_dict()
    out, names = Path(values.pop("out")), values.pop("methods")
    methods = None if names is None else [word.strip() for word in names.split(",")]
    return launch(line.layers, out, methods=methods, again=shlex.join(again), **values)
