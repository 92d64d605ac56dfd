"""Models: one file for each architecture, and any `nn.Module` that the user names by class path."""

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from fl_lightning.configuration.components import Network, Text
from fl_lightning.configuration.config import Component, check
from fl_lightning.foundation.device import rng_restored
from fl_lightning.foundation.errors import BadInput, first_line
from fl_lightning.models.base import inputs
from fl_lightning.models.head import TRACED, last_linear, trace
from fl_lightning.models.prepared import adapt, read_weights

_BUILT_FROM: WeakKeyDictionary[nn.Module, tuple[Component, tuple[int, ...], int, Text | None]] = (
    WeakKeyDictionary()
)
"""What each living model was built from: the arguments of `build`."""
_FROZEN_AT_FIRST: WeakKeyDictionary[nn.Module, list[nn.Parameter]] = WeakKeyDictionary()
"""Parameters of each model that were frozen when it was built."""


def build(
    component: Component,
    input_shape: Sequence[int],
    num_classes: int,
    text: Text | None = None,
) -> nn.Module:
    """Build the model and try it on two samples of zeros of `input_shape`; raise `BadInput` if it
    does not fit the data.

    Classes get the facts about the data that their signature asks for (`arguments_of`), unless
    `init_args` set these. A `Network` begins with the weights that it names, and gets its adapters.
    """
    input_shape = tuple(input_shape)
    try:
        arguments = arguments_of(component, input_shape, num_classes, text)
        model: nn.Module = component.load()(**arguments)
    except BadInput:
        raise
    except Exception as error:  # the class does not accept the user's arguments
        problem = f"building it failed: {first_line(error)}"
        raise BadInput("model", component.class_path, problem) from error
    is_module = isinstance(model, nn.Module)
    check("model", component.class_path, is_module, "it must make a torch.nn.Module")
    _try_out(model, component.class_path, input_shape, num_classes, text)
    if isinstance(component, Network):
        if component.weights is not None:
            read_weights(model, component.weights, head_of(model))
        if component.adapters is not None:
            adapt(model, component.adapters, head_of(model))
            _try_out(model, component.class_path, input_shape, num_classes, text)
    _BUILT_FROM[model] = component, input_shape, num_classes, text
    _FROZEN_AT_FIRST[model] = frozen_in(model)
    return model


def frozen_in(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that do not train (`requires_grad_(False)`)."""
    return [p for p in model.parameters() if not p.requires_grad]


def frozen_when_built(net: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that were frozen when `net`, or a network that it contains, was built
    by `build`.

    Parameters that a method has frozen afterwards are left out: each client has its own values of
    them.

    Args:
        net: a model, or a method's module that contains several.
    """
    return [p for module in net.modules() for p in _FROZEN_AT_FIRST.get(module, [])]


def freshly_drawn(model: nn.Module) -> nn.Module:
    """Return a network like `model`, on the CPU, with new first weights drawn from torch's
    generator.

    A model of `build` is built again; any other model is copied, and all its modules are reset.

    Raises:
        BadInput: its weights are the same again, or a module with weights cannot be reset.
    """
    name = type(model).__name__.lower()
    if model in _BUILT_FROM:
        twin = build(*_BUILT_FROM[model])
    else:
        twin = copy.deepcopy(model).cpu()
        for module in twin.modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
                continue
            has_weights = next(module.parameters(recurse=False), None) is not None
            kind = type(module).__name__
            problem = "the method draws several first models"
            requirement = f"{problem}, and its {kind} has no reset_parameters(); add it"
            check(
                "model",
                name,
                not has_weights,
                requirement,
            )
    firsts = list(model.parameters())
    if any(isinstance(first, FakeTensor) for first in firsts):
        return twin
    pairs = zip(twin.parameters(), firsts, strict=True)
    is_same = all(torch.equal(tensor.to(first.dtype), first.cpu()) for tensor, first in pairs)
    problem = "the method draws several first models, and this one always has the same weights"
    check(
        "model",
        name,
        not is_same,
        f"{problem}; draw them in its __init__",
    )
    return twin


def arguments_of(
    component: Component,
    input_shape: Sequence[int],
    num_classes: int,
    text: Text | None = None,
) -> dict[str, Any]:
    """Return the arguments for the class of `component`: its `init_args`, and those facts about the
    data (`input_shape`, `num_classes` and, for text, `vocabulary` and `per_position`) that are in
    its signature.

    A function that passes on any keyword, as those of torchvision and timm do, gets `num_classes`.
    """
    makes = component.load()
    parameters = inspect.signature(makes).parameters
    offered: dict[str, Any] = {"input_shape": tuple(input_shape), "num_classes": num_classes}
    if text is not None:
        offered |= {"vocabulary": text.vocabulary, "per_position": text.per_position}
    names = set(parameters)
    kinds = [parameter.kind for parameter in parameters.values()]
    if inspect.isfunction(makes) and inspect.Parameter.VAR_KEYWORD in kinds:
        names.add("num_classes")
    arguments = {key: value for key, value in offered.items() if key in names}
    return arguments | component.init_args


def has_own_step(model: nn.Module) -> bool:
    """Return whether the model is a LightningModule that defines a `training_step`."""
    step = getattr(type(model), "training_step", None)
    return step not in (None, LightningModule.training_step)


def head_of(model: nn.Module) -> str:
    """Return the dotted name of the classifier, by the first of these rules that applies:

    1. the string `model.head`;
    2. the module that the scores come from, if `build` has traced the model and found a single one;
    3. the last `nn.Linear` in the order of definition (`why_head_is_doubtful` warns if scores come
       from several modules).

    Raises:
        BadInput: `model.head` names no module; or rule 3 applies, and there is no `nn.Linear`, or
            scores come from several modules and the last `nn.Linear` is not among them.
    """
    name = type(model).__name__
    named = getattr(model, "head", None)
    modules = dict(model.named_modules())
    if isinstance(named, str):
        requirement = f"its `head` names {named!r}, which is not one of its modules; correct it"
        check(
            "model",
            name,
            named in modules,
            requirement,
        )
        return named
    sources = _sources_of(model)
    if len(sources) == 1:
        return sources[0]
    last = last_linear(model)
    requirement = (
        f"its scores come from {', '.join(sources)}; name one of them as its classifier, in an "
        "attribute `head`"
    )
    check(
        "model",
        name,
        not sources or last in sources,
        requirement,
    )
    if last is None:
        problem = "it has no nn.Linear for a head; name its classifier in an attribute `head`"
        raise BadInput("model", name, problem)
    return last


def why_head_is_doubtful(model: nn.Module) -> str | None:
    """Return a line that warns if `head_of` has chosen one of several modules that the scores come
    from; None: there is no doubt."""
    traced = getattr(model, TRACED, [])
    is_named = isinstance(getattr(model, "head", None), str)
    sources = _sources_of(model)
    is_only = len(sources) == 1 and sources == traced
    if is_named or is_only or not traced:
        return None
    return (
        f"its scores come from {', '.join(traced)}; {head_of(model)} is taken for its classifier "
        f"(an attribute `head` names it)"
    )


def _sources_of(model: nn.Module) -> list[str]:
    """Return the names of the submodules from which the scores were traced to come, or whose
    weights are used for them."""
    modules = dict(model.named_modules())
    traced = getattr(model, TRACED, [])
    owners = [name if name in modules else name.rpartition(".")[0] for name in traced]
    return [name for name in dict.fromkeys(owners) if name and name in modules]


def _try_out(
    model: nn.Module,
    class_path: str,
    input_shape: tuple[int, ...],
    num_classes: int,
    text: Text | None,
) -> None:
    """Raise `BadInput` unless two samples of zeros give two rows of at least `num_classes` logits
    (if targets are next tokens: for each position).

    The same must hold in training mode, unless a `training_step` handles the output. The model is
    left unchanged, except that the modules that its scores come from are stored.
    """
    data = f"the data have samples of shape {input_shape} and {num_classes} classes"
    rows = (2, *input_shape) if text is not None and text.per_position else (2,)
    shape = (*rows, num_classes)
    samples = inputs(2, input_shape, text)
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with rng_restored(torch.device("cpu")):
            output = _traced_forward(model, samples)
    except Exception as error:  # a model that does not fit can fail in any way
        problem = f"{data}, on which its forward fails: {first_line(error)}"
        raise BadInput("model", class_path, problem) from error
    finally:
        for module, mode in modes:
            module.training = mode
    if (other := _misfit(output, shape)) is not None:
        raise BadInput("model", class_path, f"{data}, but for two samples it gives {other}")
    if has_own_step(model):
        return
    try:
        with torch.no_grad(), rng_restored(torch.device("cpu")):
            output = copy.deepcopy(model).train()(samples)
    except Exception:  # two zeros may not suffice to train; if a client's samples fail, it is named
        return
    if (other := _misfit(output, shape)) is not None:
        requirement = (
            " (torchvision: aux_logits false), or make it a LightningModule whose training_step "
            "takes the rest"
        )
        raise BadInput("model", class_path, f"in training mode it gives {other}{requirement}")


def _misfit(output: Any, shape: tuple[int, ...]) -> str | None:
    """Return a description of a model's output that is not class scores of this `shape`; None: the
    output is class scores of this shape."""
    if not isinstance(output, Tensor):
        return (
            f"{_described(output)} instead of {shape}; have its forward return class scores alone"
        )
    if output.shape[:-1] != shape[:-1] or output.shape[-1] < shape[-1]:
        return f"{tuple(output.shape)} instead of {shape}"
    if output.is_floating_point():
        return None
    return f"numbers of {output.dtype} instead of class scores"


def _described(output: Any) -> str:
    """Return the class of a model's output that is no tensor, with the names or number of its
    parts, in words."""
    name = type(output).__name__
    parts = list(output) if isinstance(output, Mapping) else getattr(output, "_fields", ())
    if parts:
        return f"{name} ({', '.join(map(str, parts))})"
    return f"{name} of {len(output)}" if isinstance(output, tuple | list) else name


def _traced_forward(model: nn.Module, x: Tensor) -> Any:
    """Return the output of `model` on `x`, traced by `trace`; without tracing if it cannot be
    differentiated."""
    if any(map(is_lazy, [*model.parameters(), *model.buffers()])):
        with torch.no_grad():
            model(x)  # this sets their shapes
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        return trace(model, lambda: model(x.clone().requires_grad_(x.is_floating_point()).clone()))
    except Exception:  # autograd cannot follow it: try again without
        for name, buffer in model.named_buffers():
            if name in state:
                buffer.detach().copy_(state[name])
        with torch.no_grad():
            return model(x)
