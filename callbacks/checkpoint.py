"""What survives a round, on disk: rows of clients that changed, the server, and a manifest that names them.

Row files are never written over; the manifest is replaced in one step (write aside, fsync, rename). So a run that dies
at any moment still has the whole of its last finished round. Everything is safetensors and JSON: loading runs no code.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from fl_lightning.callbacks.base import Callback, RoundRecord
from fl_lightning.config import check
from fl_lightning.errors import BadInput
from fl_lightning.files import whole
from fl_lightning.state import ClientState

if TYPE_CHECKING:
    from fl_lightning.federation import Federation

MANIFEST = "manifest.json"


@dataclass
class Checkpoint(Callback):
    """Saves the run after every round, so that it can be resumed.

    Args:
        every: rounds between checkpoints (the last round is always saved). 1: at most the round in flight is lost.
    """

    every: int = 1

    def __post_init__(self) -> None:
        check("callbacks.checkpoint.every", self.every, self.every >= 1, "it must be at least 1")

    def on_round_end(self, fed: Federation, record: RoundRecord) -> None:
        """Save when it is time."""
        if record.round % self.every == 0 or record.round == fed.rounds:
            save(fed, fed.folder / "checkpoints")


def save(fed: Federation, folder: Path) -> None:
    """Write all that changed since the last checkpoint in `folder`, on every rank, then replace the manifest."""
    t = fed.server.round
    before = _read_manifest(folder) if (folder / MANIFEST).exists() else {"clients": {}}
    mine: dict[str, dict[str, Any]] = {}
    for client, state in sorted(fed.states.items()):
        old = before["clients"].get(str(client))
        if old is not None and old["turns"] == state.turns:
            mine[str(client)] = old
            continue
        tensors = {"row": state.row, **_numbered(state.buffers)}
        tensors |= {f"fields.{name}": value for name, value in state.fields.items()}
        if state.received is not state.row:
            tensors["received"] = state.received
        name = f"rows/client-{client:05d}-round-{t:05d}.safetensors"
        _write_tensors(folder / name, tensors)
        mine[str(client)] = {"file": name, "turns": state.turns}
    clients = {c: entry for part in fed.group.gather_objects(mine) for c, entry in part.items()}  # all rows are on disk
    if fed.is_main:
        server = fed.server
        if not (folder / "initial.safetensors").exists():
            _write_tensors(folder / "initial.safetensors", {"row": server.initial, **_numbered(server.initial_buffers)})
        name = f"server-round-{t:05d}.safetensors"
        fields = {f"fields.{k}": v for k, v in server.fields.items()}
        shared = {} if server.shared is server.initial else {"shared": server.shared}
        _write_tensors(folder / name, fields | shared)
        manifest = {
            "round": t,
            "server": name,
            "heard": sorted(server.heard),
            "blocks": [[b.name, list(b.shape)] for b in fed.layout.blocks],
            "dtype": str(fed.dtype),
            "clients": clients,
        }
        with whole(folder / MANIFEST) as aside:
            aside.write_text(json.dumps(manifest))
        kept = {name, *(entry["file"] for entry in clients.values())}
        for path in [*folder.glob("server-round-*"), *folder.glob("rows/*")]:
            if path.relative_to(folder).as_posix() not in kept:
                path.unlink()
    fed.group.barrier()


def restore(fed: Federation, folder: Path) -> int:
    """Load the checkpoint in `folder` into `fed`: this rank's clients and the server. Returns its round.

    Raises:
        BadInput: there is no checkpoint, or it belongs to another model.
    """
    if not (folder / MANIFEST).exists():
        raise BadInput("run", str(folder.parent), "it holds no checkpoint yet")
    manifest = _read_manifest(folder)
    blocks = [[b.name, list(b.shape)] for b in fed.layout.blocks]
    if manifest["blocks"] != blocks or manifest["dtype"] != str(fed.dtype):
        raise BadInput("run", str(folder.parent), "its checkpoint was saved with another model or precision")
    device = str(fed.fabric.device)
    server = fed.server
    first = _read_tensors(folder / "initial.safetensors", device)
    server.initial, server.initial_buffers = first["row"], _buffers(first)
    saved = _read_tensors(folder / manifest["server"], "cpu")
    server.shared = saved["shared"].to(device) if "shared" in saved else server.initial
    server.fields |= {k.removeprefix("fields."): v for k, v in saved.items() if k.startswith("fields.")}
    server.round, server.heard = manifest["round"], set(manifest["heard"])
    fed.states.clear()
    for client in fed.at_home(int(c) for c in manifest["clients"]):
        entry = manifest["clients"][str(client)]
        saved = _read_tensors(folder / entry["file"], device)
        # Fields live on the CPU, but for the optimiser's tensors of the size of parameters.
        fields = {
            k.removeprefix("fields."): v if k.startswith("fields.optimizer.") and v.ndim else v.cpu()
            for k, v in saved.items()
            if k.startswith("fields.")
        }
        received = saved.get("received", saved["row"])
        fed.states[client] = ClientState(client, saved["row"], _buffers(saved), received, entry["turns"], fields)
    fed.resumed_from = server.round
    return server.round


def _numbered(buffers: list[Tensor]) -> dict[str, Tensor]:
    return {f"buffers.{k}": buffer for k, buffer in enumerate(buffers)}


def _buffers(saved: dict[str, Tensor]) -> list[Tensor]:
    return [saved[f"buffers.{k}"] for k in range(sum(name.startswith("buffers.") for name in saved))]


def _read_manifest(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    return manifest


def _read_tensors(path: Path, device: str) -> dict[str, Tensor]:
    """Copied into memory that torch has aligned: matrix products round differently on unaligned memory."""
    return {name: tensor.clone() for name, tensor in load_file(path, device=device).items()}


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    with whole(path) as aside:
        save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, aside)
