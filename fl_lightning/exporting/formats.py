"""Files of an exported model: its tensors, or its graph."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fl_lightning.foundation.errors import BadInput, RunFailed
from fl_lightning.foundation.extras import require
from fl_lightning.foundation.files import atomic_write

Format = Literal["safetensors", "torch_export", "onnx"]
METADATA = "fl_lightning"
"""Key of a safetensors file's metadata: the description of the model's data, as JSON."""


def write(
    model: nn.Module, kind: Format, out: Path, example: Tensor, about: Mapping[str, Any]
) -> None:
    """Write `model` to `out`.

    Args:
        model: with its own tensors, on the CPU.
        kind: `safetensors`: tensors only; otherwise the graph that torch traces, for any number of
            rows.
        out: the file.
        example: two inputs.
        about: the description of its data (`exporting.about`).

    Raises:
        BadInput: torch cannot trace the model, or a package is missing.
    """
    if kind == "safetensors":
        from safetensors.torch import save_model

        with atomic_write(out) as aside:
            # tied tensors are written once
            save_model(model, str(aside), {METADATA: json.dumps(about)})
        return
    if kind == "onnx":
        require("onnx", "format", kind, "safetensors and torch_export need nothing")
    model.eval()
    logging.disable()  # torch's exporters log and print what they raise, too
    quiet = io.StringIO()
    try:
        with (
            contextlib.redirect_stderr(quiet),
            contextlib.redirect_stdout(quiet),
            warnings.catch_warnings(),
            atomic_write(out) as aside,
        ):
            warnings.simplefilter("ignore")  # torch's, about its own exporters
            sizes = ({0: torch.export.Dim("rows", min=1)},)
            graph = torch.export.export(model, (example,), dynamic_shapes=sizes)
            if kind == "torch_export":
                with aside.open("wb") as file:
                    torch.export.save(graph, file, extra_files={METADATA: json.dumps(about)})
            else:
                torch.onnx.export(
                    graph,
                    (),
                    str(aside),
                    input_names=["x"],
                    output_names=["scores"],
                    dynamo=True,
                    external_data=False,
                    verbose=False,
                )
    except RunFailed:  # the disk refuses the file
        raise
    except Exception as error:  # torch's exporters raise a dozen kinds
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        instead = "" if kind == "torch_export" else " or torch_export"
        requirement = f"torch cannot export this model ({line}); choose safetensors{instead}"
        raise BadInput("format", kind, requirement) from error
    finally:
        logging.disable(logging.NOTSET)
