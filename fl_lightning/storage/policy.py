"""Decides which state of clients and server is kept between rounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class StoragePolicy:
    """The state of clients and server that is kept between rounds."""

    keeps_clients: bool
    """Whether clients' vectors, buffers and memory are kept, to train or to mix them in later
    rounds; else only the server's global model is."""
    keeps_received: bool
    """Whether the server has a copy of each client's last upload; else it uses the client's model
    in its place."""
    keeps_optimizer: bool
    """Whether clients keep their optimiser's state."""
    starts_from_server: bool
    """Whether clients begin each round with the server's model in every block: the method `starts`
    from the server, has no slots, and shares all blocks."""
    overwritten: bool
    """Whether the download overwrites the client's whole vector, which may hold any values
    before."""
    for_judge: bool
    """Whether clients are kept only because the judge `after` scores their models at the end."""
    keeps_start: bool
    """Whether each client keeps the model with which it began its last round, which the judge
    `before` may score at the end."""
    one_download: bool
    """Whether all clients receive one global model; else the server composes one for each."""
    exchanged: int
    """Number of exchanged slots other than the model."""

    @classmethod
    def for_run(
        cls,
        method: Any,
        relation: Any,
        callbacks: Iterable[Any],
        config: Any,
        masks: Sequence[np.ndarray],
    ) -> StoragePolicy:
        """Derive the policy of a run from the declarations of method, relation and callbacks.

        Args:
            relation: the relation of `method`.
            callbacks: callbacks or their classes. Their attributes `changes_upload`,
                `changes_download` and `client_memory` declare the same as a method's traits.
            config: the run's `Config`; the policy depends on `optimizer.keep_state` and
                `evaluation.judge`.
            masks: mask of the downloaded blocks of each architecture, bool [B].
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
