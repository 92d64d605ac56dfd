"""Initial weights of a network, read from a file, and adapters that train in place of its
weights."""

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
"""Modules of torch that read the weights of their submodules without calling these, at least in
evaluation: an adapter there would have no effect."""


def read_weights(
    model: nn.Module,
    file: str,
    head: str,
) -> None:
    """Load a safetensors file, whose tensors have the model's names, as the initial weights of
    `model`.

    Tensors of its classifier `head` may be absent or of another shape: then its drawn weights stay.

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
    # some libraries do not save this buffer
    loose |= {name for name in state if name.endswith("num_batches_tracked")}

    def alike(name: str) -> bool:
        return name in state and name in tensors and state[name].shape == tensors[name].shape

    unknown = sorted({*tensors} - {*state} - loose)
    absent = sorted({*state} - {*tensors} - loose)
    unlike = sorted(name for name in {*state} & {*tensors} - loose if not alike(name))
    check("model.weights", file, not absent, f"it lacks {some(absent)}, which the model has")
    check("model.weights", file, not unknown, f"it holds {some(unknown)}, which the model lacks")
    shapes = [
        f"{name} of shape {tuple(tensors[name].shape)}, not {tuple(state[name].shape)}"
        for name in unlike
    ]
    check("model.weights", file, not unlike, f"its shapes are not the model's: {some(shapes)}")
    fitting = {name: tensor for name, tensor in tensors.items() if alike(name)}
    model.load_state_dict(fitting, strict=False)


def adapt(
    model: nn.Module,
    values: Mapping[str, Any],
    head: str,
) -> None:
    """Freeze `model` and put trainable adapters into it; with `values["head"]`, the classifier
    `head` trains too.

    Raises:
        BadInput: `peft` is not installed, or there is nothing to adapt.
    """
    require("adapters", "model.adapters", dict(values))
    from peft import LoraConfig, inject_adapter_in_model

    config = AdaptersConfig(**values)
    targets = targets_of(model, config.targets, head)
    named = config.targets if config.targets is not None else "null"
    requirement = "the model has no such module besides its classifier"
    check("model.adapters.targets", named, bool(targets), requirement)
    alpha = cast(int, config.alpha)  # peft declares an int, and takes any number
    lora = LoraConfig(
        r=config.rank, lora_alpha=alpha, lora_dropout=config.dropout, target_modules=targets
    )
    try:
        inject_adapter_in_model(lora, model)
    except ValueError as error:  # peft does not support a module's class
        raise BadInput("model.adapters.targets", named, first_line(error)) from None
    if config.head:
        model.get_submodule(head).requires_grad_(True)


def targets_of(
    model: nn.Module,
    ends: list[str] | None,
    head: str,
) -> list[str]:
    """Return the dotted names of the modules that get adapters.

    Args:
        model: the network.
        ends: last parts of the modules' names; None: the model's `adapter_targets` or, if it has
            none, every `nn.Linear`.
        head: name of the classifier, which gets no adapter.

    Raises:
        BadInput: a module that `ends` names is part of a torch module that reads its weights
            without calling it (`CLOSED`), so an adapter would have no effect.
    """
    if ends is None:
        ends = getattr(model, "adapter_targets", None)
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
            problem = f"torch's {kind} reads its weights without calling modules"
            requirement = f"{problem}, so an adapter has no effect; choose other targets"
            raise BadInput("model.adapters.targets", name, requirement)
    return names
