"""A function of tensors as the list of torch's operations that it came to, without what chose them.

`torch.func` interprets every operation of a stacked step anew: on small models that takes longer
than the operations. They are the same in every step of one shape, so they are written down once and
run from there, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fl_lightning.training.module import ClientModule

aten = torch.ops.aten
Function = Callable[..., Sequence[Tensor]]


class _Writer(TorchDispatchMode):
    """Writes operations down as lines of Python, in which every tensor has a name."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.known: dict[str, Any] = {}
        """What lines name that is no tensor of theirs: operations, numbers, tensors from
        outside."""
        self.lines: list[tuple[list[str], str, list[str]]] = []
        """The names that a line gives, its operation, and its arguments."""
        self.writes: set[str] = set()
        """Operations that write to one of their arguments."""
        self.constants: dict[str, Tensor] = {}
        """Tensors that are made of nothing but a shape."""
        self._turned: dict[tuple[str, Any], Tensor] = {}
        """By a transposed tensor and the dimensions, what it was made of."""
        self._kept: list[Tensor] = []  # an id is a tensor's own as long as the tensor is there
        self._names: dict[int, str] = {}
        for tensor in inputs:
            self._name(tensor, f"input_{len(self._kept)}")

    def _name(self, tensor: Tensor, name: str) -> str:
        self._kept.append(tensor)
        self._names[id(tensor)] = name
        return name

    def word(self, argument: Any) -> str:
        """How a line names an argument."""
        if isinstance(argument, Tensor):
            if id(argument) not in self._names:
                self.known[self._name(argument, name := f"given_{len(self.known)}")] = argument
                return name
            return self._names[id(argument)]
        if isinstance(argument, list | tuple) and any(isinstance(one, Tensor) for one in argument):
            return f"[{', '.join(map(self.word, argument))}]"
        self.known[name := f"given_{len(self.known)}"] = argument
        return name

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation, and write it down."""
        words = [self.word(a) for a in args] + [
            f"{k}={self.word(v)}" for k, v in (kwargs or {}).items()
        ]
        result = func(*args, **(kwargs or {}))
        if _changes_nothing(func, args, result):
            self._name(result, words[0])
            return result
        if func is aten.transpose.int:
            dims = frozenset(args[1:])
            if (before := self._turned.get((words[0], dims))) is not None:  # turned back
                self._name(result, self.word(before))
                return result
            self._turned[f"t{len(self.lines)}_0", dims] = args[0]
        several = isinstance(result, list | tuple)
        values = result if several else [result]
        names = [self._given(value, f"t{len(self.lines)}_{k}") for k, value in enumerate(values)]
        # less Python around it
        self.known[operation := f"operation_{len(self.lines)}"] = getattr(func, "_op", func)
        if func._schema.is_mutable:
            self.writes.add(operation)
        if func in _CONSTANT:
            self.constants[names[0]] = result
        self.lines.append(([*names, ""] if several else names, operation, words))
        return result

    def _given(self, value: Any, name: str) -> str:
        """The name of what an operation gives: where it writes in place, the one that its tensor
        has."""
        if not isinstance(value, Tensor):
            return name
        return self._names[id(value)] if id(value) in self._names else self._name(value, name)


class Recordings:
    """Functions recorded once for each key, over the bound model of `module`."""

    def __init__(self, module: ClientModule) -> None:
        self.module = module
        self._functions: dict[Hashable, Function] = {}

    def run(self, key: Hashable, function: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
        """What `function` does to `inputs`: the same for all inputs of one `key`."""
        if key not in self._functions:
            self._functions[key] = recorded(function, inputs)
            self.module.forget_features()
        with torch.no_grad():
            return list(self._functions[key](*inputs))


def recorded(function: Function, inputs: Sequence[Tensor]) -> Function:
    """What `function` does to tensors like `inputs`, operation by operation, for other tensors of
    the same shapes.

    It must do the same whatever the tensors hold, and draw no random number. Its results are lists
    of tensors; what it makes on the way is let go of where it is last used.
    """
    writer = _Writer(inputs)
    with torch.no_grad(), writer:
        results = list(function(*inputs))
    ends = [writer.word(tensor) for tensor in results]
    arguments = [f"input_{k}" for k in range(len(inputs))]
    body: list[str] = []
    if not writer.writes:
        writer.known |= {
            name: tensor for name, tensor in writer.constants.items() if name not in ends
        }
    needed = {*ends, *arguments, *writer.known}
    for names, operation, words in reversed(writer.lines):
        unused = operation not in writer.writes and needed.isdisjoint(names)
        if unused or names[0] in writer.known:
            continue
        used = {name for word in words for name in _names_in(word)}
        last = [
            name
            for name in dict.fromkeys(chain(names, sorted(used)))
            if name and name not in needed
        ]
        needed |= used
        body += [f"    del {', '.join(last)}"] if last else []
        body.append(f"    {', '.join(names)} = {operation}({', '.join(words)})")
    source = (
        f"def replay({', '.join(arguments)}):\n"
        + "\n".join(body[::-1])
        + f"\n    return [{', '.join(ends)}]\n"
    )
    namespace = dict(writer.known)
    exec(source, namespace)  # its words are our own names
    replay: Function = namespace["replay"]
    return replay


_CONSTANT = (aten.scalar_tensor.default, aten.ones_like.default, aten.zeros_like.default)
_VIEWS = (
    aten.view.default,
    aten.expand.default,
    aten._unsafe_view.default,
    aten.alias.default,
    aten.detach.default,
)


def _changes_nothing(func: Any, args: Sequence[Any], result: Any) -> bool:
    """Whether an operation gives the tensor that it was given: a view of the same form, or 1 times
    it."""
    if func in _VIEWS:
        return bool(result.shape == args[0].shape and result.stride() == args[0].stride())
    return func is aten.mul.Scalar and args[1] == 1 and result.dtype == args[0].dtype


def _names_in(word: str) -> list[str]:
    return word.partition("=")[2 if "=" in word else 0].strip("[]").split(", ")
