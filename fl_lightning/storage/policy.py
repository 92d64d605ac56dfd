"""Decides what is kept of clients and server from round to round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class StoragePolicy:
    """What is kept of clients and server between rounds."""

    keeps_clients: bool
    """A client's vectors, buffers and memory stay from round to round, to train on or to be mixed;
    else only the server's one model is kept."""
    keeps_received: bool
    """The server has its own copy of each kept client's last upload; else it uses the client's
    model."""
    keeps_optimizer: bool
    """A kept client has its optimiser's state with it."""
    starts_from_server: bool
    """A client begins each round with the server's model in every block, and keeps nothing of its
    own: the method `starts` from the server, has no slots, and shares all blocks."""
    overwritten: bool
    """The download replaces all of a client's vector, whose memory may hold any numbers before."""
    for_judge: bool
    """Clients are kept only for the judge `after`, who asks for their models at the end."""
    keeps_start: bool
    """With each client stays the model with which it began its last round, for the judge `before`
    at the end."""
    one_download: bool
    """All clients receive one global model; else the server composes a download for each."""
    exchanged: int
    """Number of exchanged slots beside the model."""

    @classmethod
    def of(
        cls,
        method: Any,
        relation: Any,
        callbacks: Iterable[Any],
        config: Any,
        masks: Sequence[np.ndarray],
    ) -> StoragePolicy:
        """The policy of a run, by the declarations of its parts.

        Args:
            method: its traits and slots.
            relation: the method's.
            callbacks: objects or classes, with declarations like a method's traits.
            config: whether optimiser state is kept, and the judge.
            masks: for each architecture, the blocks that travel to clients, bool [B].
        """
        parts = [getattr(part, "traits", part) for part in (method, *callbacks)]
        uploads = any(getattr(part, "changes_upload", False) for part in parts)
        downloads = any(getattr(part, "changes_download", False) for part in parts)
        memory = any(getattr(part, "client_memory", False) for part in parts)
        from_server = method.traits.starts == "server"
        slots = method.slots()
        starts_from_server = from_server and not slots and all(mask.all() for mask in masks)
        optimizer = config.optimizer.keep_state
        forgets = starts_from_server and relation.is_global and relation.sources == "cohort"
        keeps = not forgets or memory or uploads or optimizer
        judge = config.evaluation.judge
        if judge == "auto":
            judge = method.traits.judge
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
