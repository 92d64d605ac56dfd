"""`summary.json`: its parts, merged in one place, and the whole of it as a reader has it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fl_lightning.foundation.errors import RunFailed


@dataclass(frozen=True, eq=False)
class Summary(Mapping[str, Any]):
    """The whole of a run. As a mapping it has every key of `summary.json`; empty unless the run has
    ended."""

    method: str = ""
    rounds: int = 0
    clients: int = 0
    """That took part; held-out clients are not among them."""
    judge: str | None = None
    """The kind of model that `mean_accuracy` and its like are of."""
    final_kinds: Mapping[str, int] = field(default_factory=dict)
    """Number of clients by the kind of their final model."""
    wall_seconds: float = math.nan
    """With those before a resume."""
    upload_bytes: int = 0
    download_bytes: int = 0
    world_size: int = 1
    """Processes."""
    made_up_data: bool = False
    version: str = ""
    """Of fl_lightning."""
    content: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Every key, with those that depend on the metric, such as `final_mean_accuracy`."""

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Summary:
        """The summary that `summary.json` holds."""
        names = {field.name for field in dataclasses.fields(cls)} & content.keys()
        return cls(**{name: content[name] for name in names}, content=content)

    def __getitem__(self, key: str) -> Any:
        return self.content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)


def merged(parts: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """One mapping of all `parts`, each with the name of who contributes it.

    Raises:
        RunFailed: two contribute the same key.
    """
    summary: dict[str, Any] = {}
    owners: dict[str, str] = {}
    for owner, part in parts:
        for key in part:
            if key in owners:
                both = f"{owner} and {owners[key]} both contribute {key!r}"
                raise RunFailed(f"summary.json: {both}; rename one of them")
            owners[key] = owner
        summary |= part
    return summary
