"""Models: one file for each backbone, and whatever `nn.Module` the user names by class path."""

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

_MADE: WeakKeyDictionary[nn.Module, tuple[Component, tuple[int, ...], int, Text | None]] = (
    WeakKeyDictionary()
)
"""What each model that is alive was built of."""
_FROZEN: WeakKeyDictionary[nn.Module, list[nn.Parameter]] = WeakKeyDictionary()
"""Its parameters that did not train then."""


def build(
    component: Component,
    input_shape: Sequence[int],
    num_classes: int,
    text: Text | None = None,
) -> nn.Module:
    """Build the model and try it on two zeros of `input_shape`; raise `BadInput` if it does not fit
    the data.

    What the data say (`arguments_of`) is passed to classes that take it, unless `init_args` set it.
    A `Network` begins with the weights that it names, and gets its adapters.
    """
    input_shape = tuple(input_shape)
    try:
        arguments = arguments_of(component, input_shape, num_classes, text)
        model: nn.Module = component.load()(**arguments)
    except BadInput:
        raise
    # Whatever a class raises for its arguments is about what the user gave.
    except Exception as error:
        problem = f"building it failed: {first_line(error)}"
        raise BadInput("model", component.class_path, problem) from error
    is_module = isinstance(model, nn.Module)
    check("model", component.class_path, is_module, "it must make a torch.nn.Module")
    _try_out(model, component.class_path, input_shape, num_classes, text)
    if isinstance(component, Network) and component.weights is not None:
        read_weights(model, component.weights, head_of(model))
    if isinstance(component, Network) and component.adapters is not None:
        adapt(model, component.adapters, head_of(model))
        _try_out(model, component.class_path, input_shape, num_classes, text)
    _MADE[model] = component, input_shape, num_classes, text
    _FROZEN[model] = frozen_in(model)
    return model


def frozen_in(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that do not train (`requires_grad_(False)`)."""
    return [p for p in model.parameters() if not p.requires_grad]


def frozen_when_built(net: nn.Module) -> list[nn.Parameter]:
    """Those of the networks in `net` that did not train when they were built: several, where a
    method has drawn more.

    What a method itself freezes afterwards is none of them: it is every client's.
    """
    return [p for module in net.modules() for p in _FROZEN.get(module, [])]


def freshly_drawn(model: nn.Module) -> nn.Module:
    """Returns a network like `model` (on the CPU) with first weights of its own, drawn from torch's
    generator.

    It is built again, as `build` has built `model`. What was made elsewhere is copied, and all its
    modules are reset.

    Raises:
        BadInput: its weights are the same again, or a module with weights cannot be reset.
    """
    name = type(model).__name__.lower()
    if model in _MADE:
        twin = build(*_MADE[model])
    else:
        twin = copy.deepcopy(model).cpu()
        for module in twin.modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
                continue
            has_weights = next(module.parameters(recurse=False), None) is not None
            kind = type(module).__name__
            problem = "the method draws several first models, and a"
            check("model", name, not has_weights, f"{problem} {kind} has no reset_parameters()")
    firsts = list(model.parameters())
    if any(isinstance(first, FakeTensor) for first in firsts):
        return twin
    pairs = zip(twin.parameters(), firsts, strict=True)
    is_same = all(torch.equal(tensor.to(first.dtype), first.cpu()) for tensor, first in pairs)
    problem = "the method draws several first models, and this one always begins the same"
    check("model", name, not is_same, f"{problem}: draw its weights in its __init__")
    return twin


def arguments_of(
    component: Component,
    input_shape: Sequence[int],
    num_classes: int,
    text: Text | None = None,
) -> dict[str, Any]:
    """What the class of `component` is called with: its `init_args`, and what the data say where it
    takes that.

    A function that passes on whatever it is given, as those of torchvision and timm do, gets
    `num_classes`.
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
    """Whether the model is a LightningModule with a `training_step` of its own."""
    step = getattr(type(model), "training_step", None)
    return step not in (None, LightningModule.training_step)


def head_of(model: nn.Module) -> str:
    """Dotted name of the classifier: the string `model.head` if there is one, else what the scores
    come from.

    That is known of a model that `build` has made. Of others, and where scores come from several
    modules, it is the last `nn.Linear` in the order of definition (`why_head_is_doubtful`).

    Raises:
        BadInput: there is no such module, or the last `nn.Linear` is none of those that the scores
            come from.
    """
    name = type(model).__name__
    named = getattr(model, "head", None)
    modules = dict(model.named_modules())
    if isinstance(named, str):
        problem = f"its `head` names {named!r}, which is not one of its modules"
        check("model", name, named in modules, problem)
        return named
    sources = _sources_of(model)
    if len(sources) == 1:
        return sources[0]
    last = last_linear(model)
    listed = ", ".join(sources)
    requirement = (
        f"its scores come from {listed}: name one of them as its classifier, in an attribute `head`"
    )
    check("model", name, not sources or last in sources, requirement)
    if last is None:
        problem = "it has no nn.Linear for a head; name its classifier in an attribute `head`"
        raise BadInput("model", name, problem)
    return last


def why_head_is_doubtful(model: nn.Module) -> str | None:
    """Returns a line where `head_of` has chosen one of several modules that the scores come from;
    None: there is no doubt."""
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
    """The modules, but the model itself, that its scores were traced to, by name, or whose weights
    are used for it."""
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
    """Raise `BadInput` unless two zeros give two rows of at least `num_classes` logits (of tokens
    with next ones as targets: for each position). They must in training mode, too, unless a
    `training_step` takes what the model gives there. Leaves no trace but what the scores come from.
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
    # A model that does not fit can fail in any way.
    except Exception as error:
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
    # two zeros may not be enough to train on; where samples fail, the client is named
    except Exception:
        return
    if (other := _misfit(output, shape)) is not None:
        requirement = (
            " (torchvision: aux_logits false), or make it a LightningModule whose training_step "
            "takes the rest"
        )
        raise BadInput("model", class_path, f"while it trains it gives {other}{requirement}")


def _misfit(output: Any, shape: tuple[int, ...]) -> str | None:
    """What a model has given in place of class scores of this `shape`; None: it has given those."""
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
    """What a model has returned that is no tensor: its class, and the names or number of its
    parts."""
    name = type(output).__name__
    parts = list(output) if isinstance(output, Mapping) else getattr(output, "_fields", ())
    if parts:
        return f"{name} ({', '.join(map(str, parts))})"
    return f"{name} of {len(output)}" if isinstance(output, tuple | list) else name


def _traced_forward(model: nn.Module, x: Tensor) -> Any:
    """Returns what the model makes of `x`, by `trace`; of a model that cannot be differentiated,
    without."""
    if any(map(is_lazy, [*model.parameters(), *model.buffers()])):
        with torch.no_grad():
            model(x)  # now they know their shapes
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        return trace(model, lambda: model(x.clone().requires_grad_(x.is_floating_point()).clone()))
    # Whatever a forward pass does that autograd cannot: it is tried again without.
    except Exception:
        for name, buffer in model.named_buffers():
            if name in state:
                buffer.detach().copy_(state[name])
        with torch.no_grad():
            return model(x)
