"""Weights that a network begins with, read from a file, and adapters that train in their place."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import nn

from fl_lightning.configuration.components import AdaptersConfig
from fl_lightning.configuration.config import check
from fl_lightning.foundation.errors import BadInput, first_line
from fl_lightning.foundation.extras import require
from fl_lightning.foundation.named import some

CLOSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Of torch's modules, those that read the weights of the ones in them without calling them, at
least in evaluation: an adapter there would go unused."""


def read_weights(
    model: nn.Module,
    file: str,
    head: str,
) -> None:
    """Begin `model` with the tensors of a safetensors file, which are named as the model's own.

    Those of its classifier `head` may be absent or of another shape: then the ones that were drawn
    stay.

    Raises:
        BadInput: it cannot be read, or its tensors are not the model's.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(file).expanduser()
    check("model.weights", file, path.is_file(), "there is no such file")
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        problem = f"it is no file of tensors ({first_line(error)})"
        raise BadInput("model.weights", file, problem) from None
    state = model.state_dict()
    loose = {name for name in {*state, *tensors} if name == head or name.startswith(f"{head}.")}
    # some libraries do not write it
    loose |= {name for name in state if name.endswith("num_batches_tracked")}

    def alike(name: str) -> bool:
        return name in state and name in tensors and state[name].shape == tensors[name].shape

    unknown = sorted({*tensors} - {*state} - loose)
    absent = sorted({*state} - {*tensors} - loose)
    unlike = sorted(name for name in {*state} & {*tensors} - loose if not alike(name))
    check("model.weights", file, not absent, f"it lacks {some(absent)}, which the model has")
    check("model.weights", file, not unknown, f"it holds {some(unknown)}, which the model has not")
    shapes = [
        f"{name} of shape {tuple(tensors[name].shape)}, not {tuple(state[name].shape)}"
        for name in unlike
    ]
    check("model.weights", file, not unlike, f"it holds {some(shapes)}")
    fitting = {name: tensor for name, tensor in tensors.items() if alike(name)}
    model.load_state_dict(fitting, strict=False)


def adapt(
    model: nn.Module,
    values: Mapping[str, Any],
    head: str,
) -> None:
    """Freeze `model` but for adapters that are put into it, and its classifier `head` where they
    say so.

    Raises:
        BadInput: `peft` is not installed, or there is nothing to adapt.
    """
    require("adapters", "model.adapters", dict(values))
    from peft import LoraConfig, inject_adapter_in_model

    config = AdaptersConfig(**values)
    targets = targets_of(model, config.targets, head)
    named = config.targets if config.targets is not None else "null"
    check(
        "model.adapters.targets",
        named,
        bool(targets),
        "the model has no such module beside its classifier",
    )
    alpha = cast(int, config.alpha)  # a scale, whatever its type says
    lora = LoraConfig(
        r=config.rank, lora_alpha=alpha, lora_dropout=config.dropout, target_modules=targets
    )
    try:
        inject_adapter_in_model(lora, model)
    except ValueError as error:  # of a module of a kind that it does not know
        raise BadInput("model.adapters.targets", named, first_line(error)) from None
    if config.head:
        model.get_submodule(head).requires_grad_(True)


def targets_of(
    model: nn.Module,
    named: list[str] | None,
    head: str,
) -> list[str]:
    """Dotted names of the modules that get adapters (`AdaptersConfig.targets`).

    Raises:
        BadInput: one that is named lies in a module of torch's that looks past it.
    """
    ends = named if named is not None else getattr(model, "adapter_targets", None)
    closed = [name for name, module in model.named_modules() if isinstance(module, CLOSED)]
    names = []
    for name, module in model.named_modules():
        if not name or name == head or name.startswith(f"{head}."):
            continue
        is_target = isinstance(module, nn.Linear)
        if ends is not None:
            is_target = any(f".{name}".endswith(f".{end}") for end in ends)
        if not is_target:
            continue
        # the model itself, which has no name, may be such a module
        around = [path for path in closed if not path or f"{name}.".startswith(f"{path}.")]
        if not around:
            names.append(name)
        elif ends is not None:
            kind = type(model.get_submodule(around[0])).__name__
            problem = f"torch's {kind} uses weights past their modules"
            raise BadInput("model.adapters.targets", name, problem)
    return names
