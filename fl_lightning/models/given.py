"""A model that a script hands over: kept in one file, with its class, its structure and its
weights."""

import hashlib
import io
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fl_lightning.configuration.config import check
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.files import write_whole


def load(file: str) -> nn.Module:
    """The model in `file`: every client begins with its weights."""
    model: nn.Module = torch.load(file, weights_only=False)
    return model


def keep(model: Any, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Write `model` to a file in `folder` that is named by its content; returns it, and the
    settings that name it.

    Raises:
        BadInput: it is no `nn.Module`, or cannot be written (a class that is defined within a
            function).
    """
    name = type(model).__name__
    buffer = io.BytesIO()
    check(
        "model",
        name,
        isinstance(model, nn.Module),
        "it must be a torch.nn.Module, or a class or name",
    )
    try:
        torch.save(model, buffer)
    except Exception as error:  # whatever pickle raises
        raise BadInput("model", name, f"it cannot be kept in a file: {error}") from None
    digest = hashlib.sha256(repr(model).encode())
    for key, tensor in sorted(model.state_dict().items()):
        numbers = (
            tensor.detach().cpu().contiguous().view(torch.uint8).numpy() if tensor.ndim else None
        )
        digest.update(key.encode())
        digest.update(repr(tensor).encode() if numbers is None else numbers.tobytes())
    file = folder / f"{name.lower()}-{digest.hexdigest()[:16]}.pt"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, buffer.getvalue())
    return file, {
        "model": {"class_path": "fl_lightning.models.given.load", "init_args": {"file": str(file)}}
    }
