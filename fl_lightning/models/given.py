"""A model that a script passes as an object: stored in one file, with its class, its structure and
its weights."""

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
    """Return the model in `file`; every client begins with its weights."""
    model: nn.Module = torch.load(file, weights_only=False)
    return model


def keep(model: Any, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Write `model` to a file in `folder`, named by a hash of its content; return the file's path,
    and the settings of a run that load the model from it.

    Raises:
        BadInput: `model` is no `nn.Module`, or cannot be pickled (such as a class that is defined
            within a function).
    """
    name = type(model).__name__
    buffer = io.BytesIO()
    requirement = "it must be a torch.nn.Module, or a class or name"
    check("model", name, isinstance(model, nn.Module), requirement)
    try:
        torch.save(model, buffer)
    except Exception as error:  # whatever pickle raises
        problem = f"it cannot be pickled, which a run needs to store it: {error}"
        raise BadInput("model", name, problem) from None
    digest = hashlib.sha256(repr(model).encode())
    for key, tensor in sorted(model.state_dict().items()):
        content = repr(tensor).encode()
        if tensor.ndim:
            content = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        digest.update(key.encode())
        digest.update(content)
    file = folder / f"{name.lower()}-{digest.hexdigest()[:16]}.pt"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, buffer.getvalue())
    return file, {
        "model": {"class_path": "fl_lightning.models.given.load", "init_args": {"file": str(file)}}
    }
