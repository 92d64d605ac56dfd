"""The answer of a folder of `fl-train worth`, for scripts and notebooks."""

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
    """What each silo gains from federating, as `fl-train worth` has written it.

    Args:
        folder: of `fl-train worth`.
        text: the answer as the command prints it.

    Raises:
        BadInput: it holds no answer.
    """

    def __init__(self, folder: str | Path, text: str = "") -> None:
        self.folder, self._text = Path(folder), text
        try:
            self._content: dict[str, Any] = json.loads(
                (self.folder / "worth.json").read_text(encoding="utf-8")
            )
        except (OSError, ValueError) as error:
            raise BadInput(
                "worth", str(folder), f"it holds no worth.json that can be read ({error})"
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
        """The answer for all silos."""
        return str(self.consortium["sentence"])

    @property
    def consortium(self) -> dict[str, Any]:
        """What `worth.json` says of all silos together."""
        return dict(self._content["consortium"])

    @property
    def page(self) -> Path:
        """The HTML page."""
        return self.folder / "worth.html"

    @cached_property
    def silos(self) -> DataFrame:
        """A row for each silo: the columns of `worth.csv`; NaN where a value is not defined."""
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
