"""`summary.json`: merging its parts, and reading it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fl_lightning.foundation.errors import RunFailed


@dataclass(frozen=True, eq=False)
class Summary(Mapping[str, Any]):
    """Content of `summary.json`, as attributes and, with every key, as a mapping; empty unless the
    run has ended."""

    method: str = ""
    rounds: int = 0
    clients: int = 0
    """Number of clients that took part, without held-out ones."""
    judge: str | None = None
    """Kind of model that `mean_accuracy` and the like score."""
    final_kinds: Mapping[str, int] = field(default_factory=dict)
    """Number of clients by the kind of their final model."""
    wall_seconds: float = math.nan
    """Seconds of the round loop, including those before a resume."""
    upload_bytes: int = 0
    download_bytes: int = 0
    world_size: int = 1
    """Number of processes."""
    made_up_data: bool = False
    version: str = ""
    """Version of fl_lightning."""
    content: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """All keys, including those that depend on the metric, such as `final_mean_accuracy`."""

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Summary:
        """Build the summary from the content of `summary.json`."""
        names = {field.name for field in dataclasses.fields(cls)} & content.keys()
        return cls(**{name: content[name] for name in names}, content=content)

    def __getitem__(self, key: str) -> Any:
        return self.content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)


def merged(parts: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Merge the parts of a summary, each named by its contributor.

    Raises:
        RunFailed: two contributors have the same key.
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
