"""The state that is kept between rounds: a client's, on its home rank only, and the server's."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

MODEL = "model"
"""Name of the vector that every client has."""


@dataclass
class ClientState:
    """The state of one client between its rounds, which only the client's home rank has."""

    client: int
    vectors: dict[str, Tensor]
    """The client's vectors by slot, (D,) each. During a visit they lie on the device, else in the
    store."""
    buffers: list[Tensor]
    """Buffers that are in no vector (counters, masks); they are never sent."""
    received: dict[str, Tensor]
    """The server's copy of the client's last upload by slot: the model and the exchanged slots. The
    model is the tensor in `vectors`, unless the policy has `keeps_received`."""
    rounds: int = 0
    """Number of rounds in which the client took part."""
    memory: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of the method, of callbacks (on the CPU) and of the optimiser, by name."""


@dataclass
class ServerState:
    """The server's state other than its vectors, equal on every rank."""

    round: int = 0
    """Number of finished rounds."""
    uploaded: set[int] = field(default_factory=set)
    """Clients that have uploaded at least once."""
    memory: dict[str, Tensor] = field(default_factory=dict)
    """Named tensors of the method and its relation, such as the relation cube."""


def privacy_spent(state: ClientState | None) -> dict[str, Tensor]:
    """Return copies of the tensors in which callbacks account for a client's spent privacy; empty
    without a state."""
    spent: dict[str, Tensor] = {}
    if state is None:
        return spent
    for name, tensor in state.memory.items():
        if name.startswith("privacy."):
            spent[name] = tensor.clone()
    return spent
