"""Results of `fl-train worth` for scripts and notebooks."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.extras import require

if TYPE_CHECKING:
    from pandas import DataFrame


class Worth:
    """Results that `fl-train worth` has written to a folder.

    Args:
        folder: the command's `--out`.
        text: text for `str`, as the command prints it; empty: folder and overall sentence.

    Raises:
        BadInput: the folder has no readable worth.json.
    """

    def __init__(self, folder: str | Path, text: str = "") -> None:
        self.folder, self._text = Path(folder), text
        try:
            self._content: dict[str, Any] = json.loads(
                (self.folder / "worth.json").read_text(encoding="utf-8")
            )
        except (OSError, ValueError) as error:
            raise BadInput(
                "worth",
                str(folder),
                f"no worth.json can be read in this folder ({error}); give the --out of a finished "
                "fl-train worth",
            ) from None

    def __repr__(self) -> str:
        return f"<Worth {self.folder}: {self.sentence}>"

    def __str__(self) -> str:
        return self._text or repr(self)

    def _repr_html_(self) -> str:
        html: str = self.silos[
            ["silo", "samples", "alone", "federated", "gain", "low", "high", "verdict"]
        ].to_html()
        return html

    @property
    def sentence(self) -> str:
        """The overall answer, for all silos together."""
        return str(self.consortium["sentence"])

    @property
    def consortium(self) -> dict[str, Any]:
        """The part of `worth.json` about all silos together."""
        return dict(self._content["consortium"])

    @property
    def page(self) -> Path:
        """Path of the HTML page."""
        return self.folder / "worth.html"

    @cached_property
    def silos(self) -> DataFrame:
        """Table with a row for each silo and columns of `worth.csv`; undefined values are NaN."""
        require("study", "worth", str(self.folder))
        from pandas import DataFrame

        from fl_lightning.lab.worth.output import COLUMNS

        table = DataFrame(
            [[row[name] for name in COLUMNS] for row in self._content["silos"]],
            columns=list(COLUMNS),
        )
        numbers = ["alone", "federated", "gain", "low", "high"]
        table[numbers] = table[numbers].astype(float)
        return table
