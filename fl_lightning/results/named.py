"""Clients by their names, as the tables of a run have them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property

from fl_lightning.csvtable import Row


class Named(ABC):
    """Tables whose clients may have names."""

    @abstractmethod
    def rows(self, table: str) -> list[Row]:
        """The whole rows of a table."""

    @cached_property
    def client_names(self) -> dict[int, str]:
        """Each client's name by its number; empty where clients have numbers alone."""
        rows = [*self.rows("split"), *self.rows("newcomers")]
        return {int(row["client"]): str(row["name"]) for row in rows if "name" in row}

    def called(self, client: int) -> str:
        """A client's name, or its number."""
        return self.client_names.get(client, str(client))
