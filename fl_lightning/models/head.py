"""The classifier of a network, found by tracing in a forward pass which modules the scores come
from."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

TRACED = "_traced"
"""The attribute in which a network keeps the traced names; copies of the network have it, too."""


def is_part_of_adapter(path: str, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether the module at `path` is a part of an adapter, or the layer that an adapter
    wraps. `modules`: all modules of the network by path."""
    parents = [path[:k] for k, letter in enumerate(path) if letter == "."]
    return any(hasattr(modules.get(parent), "base_layer") for parent in parents)


def trace(model: nn.Module, forward: Callable[[], Any]) -> Any:
    """Run a forward pass of `model` and return its output; store the names of the modules that the
    scores come from in the model's attribute `TRACED`.

    These are the last modules with weights on the way to the scores: only functions, normalisations
    and scales follow them. For a weight that is used without a call of its module (such as a tied
    weight), the weight's own name is stored. To follow the graph through frozen parameters, they
    require gradients during the pass.

    Args:
        model: the network.
        forward: runs the forward pass and returns its output.
    """
    producers: dict[Any, str] = {}
    hooks = []
    for name, module in _weighted(model).items():

        def note(
            _: nn.Module,
            inputs: Any,
            outputs: Any,
            name: str = name,
        ) -> None:
            for tensor in tree_leaves(outputs):
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                    producers.setdefault(tensor.grad_fn, name)

        hooks.append(module.register_forward_hook(note))
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        with torch.enable_grad():
            scores = forward()
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in frozen:
            parameter.requires_grad_(False)
    sources = _sources(scores, producers, model) if isinstance(scores, Tensor) else []
    setattr(model, TRACED, sources)
    return scores.detach() if isinstance(scores, Tensor) else scores


def _weighted(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with weight matrices, by name; an adapter, or a parametrisation that
    computes weights, counts as the module that it belongs to."""
    modules = dict(model.named_modules())
    weighted = {}
    for name, module in modules.items():
        if not name or isinstance(module, nn.LayerNorm | nn.RMSNorm):
            continue
        if is_part_of_adapter(name, modules) or ".parametrizations." in f".{name}.":
            continue
        is_adapted = hasattr(module, "base_layer") or hasattr(module, "parametrizations")
        if is_adapted or any(p.ndim > 1 for p in module.parameters(recurse=False)):
            weighted[name] = module
    return weighted


def _sources(
    scores: Tensor,
    module_of_node: dict[Any, str],
    model: nn.Module,
) -> list[str]:
    """Return the names of the last modules and weights on the way to `scores`, found by walking
    back through autograd's graph.

    Args:
        scores: the model's output.
        module_of_node: the module that made each node of the graph.
        model: the network.
    """
    weights = {id(p): name for name, p in model.named_parameters()}
    sources: dict[str, None] = {}
    visited = set()
    nodes = [scores.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in visited or hasattr(node, "variable"):
            continue
        visited.add(node)
        if node in module_of_node:  # the last module on this way
            sources[module_of_node[node]] = None
            continue
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        factors = [_weights_alone(parent, module_of_node, weights) for parent in parents]
        is_sum = node.name().startswith(("AddBackward", "SubBackward"))
        if len(parents) < 2 or is_sum or not any(factors):
            nodes += parents
            continue
        for names in factors:  # a product with weights that no module is called for, as tied ones
            sources |= dict.fromkeys(names)
    return list(sources)


def _weights_alone(
    node: Any,
    module_of_node: dict[Any, str],
    weights: dict[int, str],
) -> list[str]:
    """Return the names of the matrices that `node` is computed from; empty if anything but weights
    is in it."""
    names = []
    nodes = [node]
    while nodes:
        node = nodes.pop()
        weight = getattr(node, "variable", None)
        if node in module_of_node or (weight is not None and id(weight) not in weights):
            return []
        if weight is not None and weight.ndim > 1:
            names.append(weights[id(weight)])
        nodes += [parent for parent, _ in node.next_functions if parent is not None]
    return names


def last_linear(model: nn.Module) -> str | None:
    """Return the name of the `nn.Linear` that is defined last; None: there is none."""
    modules = dict(model.named_modules())
    last = None
    for name, module in modules.items():
        if isinstance(module, nn.Linear) and not is_part_of_adapter(name, modules):
            last = name
    return last
