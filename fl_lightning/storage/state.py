"""Everything that survives a round, in two explicit objects. A client's state lives on its home
rank only."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

MODEL = "model"
"""The slot that every client has."""


@dataclass
class ClientState:
    """What is kept of one client between its rounds (home rank)."""

    client: int
    vectors: dict[str, Tensor]
    """Its own vectors by slot, each of shape (D,). In a visit they lie on the device, else in the
    store."""
    buffers: list[Tensor]
    """Its buffers that are no block of a vector (counters, masks); they never travel."""
    received: dict[str, Tensor]
    """The server's copy of the client's last upload, by slot: the model and the exchanged slots.
    The model is the tensor in `vectors`, unless the policy `keeps_received`."""
    rounds: int = 0
    """Rounds it has taken part in."""
    memory: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of the method, callbacks (on the CPU) and the optimiser, by name."""


@dataclass
class ServerState:
    """The server's state beside its vectors: small, and equal on every rank."""

    round: int = 0
    """Rounds finished."""
    uploaded: set[int] = field(default_factory=set)
    """Clients that have uploaded at least once."""
    memory: dict[str, Tensor] = field(default_factory=dict)
    """Named tensors of the method and of its relation: the relation cube is one of them."""


def spent_by(state: ClientState | None) -> dict[str, Tensor]:
    """Copies of the tensors in which callbacks account for a client's spent privacy."""
    spent: dict[str, Tensor] = {}
    if state is None:
        return spent
    for name, tensor in state.memory.items():
        if name.startswith("privacy."):
            spent[name] = tensor.clone()
    return spent
