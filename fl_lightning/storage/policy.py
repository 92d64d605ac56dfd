"""What is kept of a client and of the server from round to round: decided in this one place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class StoragePolicy:
    """What is kept."""

    keeps_clients: bool
    """A client's vectors, buffers and memory stay from round to round, to train on or to be mixed;
    else only the server's one model is kept."""
    keeps_received: bool
    """Of each kept client the server has a last-received copy of its own; else that is the client's
    own model."""
    keeps_optimizer: bool
    """A kept client has its optimiser's state with it."""
    starts_from_server: bool
    """Whatever a client has when a round begins comes from the server: it has nothing of its
    own."""
    overwritten: bool
    """So what its memory held before is of no matter, and need not be copied."""
    for_judge: bool
    """Clients are kept for the sake of the judge alone, who asks for their own models at the
    end."""
    keeps_start: bool
    """With each client stays the model that it began its last round with: the judge asks for it at
    the end."""
    one_download: bool
    """The server keeps one global model for all beside the initial one; else it composes a download
    for each client."""
    exchanged: int
    """Vectors beside the model of which the server keeps what it last received."""

    @classmethod
    def of(
        cls,
        method: Any,
        relation: Any,
        callbacks: Iterable[Any],
        config: Any,
        masks: Sequence[np.ndarray],
    ) -> StoragePolicy:
        """Of a run, by what its parts declare.

        Args:
            method: what clients begin a round from, and the vectors they own.
            relation: the method's.
            callbacks: objects or classes; one that may change what a client sends or receives, or
                keeps tensors of its own with every client, says so.
            config: whether optimiser state is kept, and the judge.
            masks: for each architecture, the blocks that travel to clients, bool [B].
        """
        uploads, downloads, memory = (
            any(
                getattr(getattr(part, "traits", part), name, False) for part in (method, *callbacks)
            )
            for name in ("changes_upload", "changes_download", "client_memory")
        )
        from_server = method.traits.starts == "server"
        slots = method.slots()
        starts_from_server = from_server and not slots and all(mask.all() for mask in masks)
        optimizer = config.optimizer.keep_state
        forgets = starts_from_server and relation.is_global and relation.sources == "cohort"
        keeps = not forgets or memory or uploads or optimizer
        judge = (
            method.traits.judge if config.evaluation.judge == "auto" else config.evaluation.judge
        )
        mixed = from_server and not relation.is_global and any(mask.any() for mask in masks)
        return cls(
            keeps_clients=keeps or judge == "after",
            keeps_received=uploads,
            keeps_optimizer=optimizer,
            starts_from_server=starts_from_server,
            overwritten=starts_from_server and not downloads,
            for_judge=judge == "after" and not keeps,
            keeps_start=judge == "before" and (mixed or method.traits.starts == "both"),
            one_download=relation.is_global,
            exchanged=sum(slot.exchanged for slot in slots.values()),
        )
