"""Records a function of tensors as a list of torch's operations.

`torch.func` interprets every operation of a stacked step anew: on small models that takes longer
than the operations. They are the same in every step of one shape, so they are written down once and
run from there, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
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
        """Values that lines name beside their own tensors: operations, numbers, tensors from
        outside."""
        self.lines: list[tuple[list[str], str, list[str]]] = []
        """The names of a line's results, its operation, and its arguments."""
        self.writes: set[str] = set()
        """Operations that write to one of their arguments."""
        self.constants: dict[str, Tensor] = {}
        """Tensors that follow from a shape alone."""
        self._transposed: dict[tuple[str, Any], Tensor] = {}
        """The original of each transposed tensor, by name and dimensions."""
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
        if isinstance(argument, Tensor) and id(argument) in self._names:
            return self._names[id(argument)]
        if isinstance(argument, list | tuple) and any(
            isinstance(item, Tensor) for item in argument
        ):
            return f"[{', '.join(map(self.word, argument))}]"
        name = f"given_{len(self.known)}"
        self.known[name] = argument
        if isinstance(argument, Tensor):
            self._name(argument, name)
        return name

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one operation, and write it down."""
        kwargs = kwargs or {}
        words = [self.word(argument) for argument in args]
        words += [f"{key}={self.word(argument)}" for key, argument in kwargs.items()]
        result = func(*args, **kwargs)
        if _changes_nothing(func, args, result):
            self._name(result, words[0])
            return result
        number = len(self.lines)
        if func is aten.transpose.int:
            dims = frozenset(args[1:])
            original = self._transposed.get((words[0], dims))
            if original is not None:  # transposed back
                self._name(result, self.word(original))
                return result
            self._transposed[f"t{number}_0", dims] = args[0]
        several = isinstance(result, list | tuple)
        values = result if several else [result]
        names = [self._result(value, f"t{number}_{k}") for k, value in enumerate(values)]
        operation = f"operation_{number}"
        self.known[operation] = getattr(func, "_op", func)  # with less Python around it
        if func._schema.is_mutable:
            self.writes.add(operation)
        if func in _CONSTANT:
            self.constants[names[0]] = result
        self.lines.append(([*names, ""] if several else names, operation, words))
        return result

    def _result(self, value: Any, name: str) -> str:
        """The name of an operation's result: that of its tensor, where it writes in place."""
        if not isinstance(value, Tensor):
            return name
        return self._names[id(value)] if id(value) in self._names else self._name(value, name)


class Recordings:
    """Functions recorded once for each key, over the bound model of `module`."""

    def __init__(self, module: ClientModule) -> None:
        self.module = module
        self._functions: dict[Hashable, Function] = {}

    def run(
        self,
        key: Hashable,
        function: Function,
        inputs: Sequence[Tensor],
    ) -> list[Tensor]:
        """The results of `function`, whose operations are the same for all inputs of one `key`."""
        if key not in self._functions:
            self._functions[key] = recorded(function, inputs)
            self.module.forget_features()
        with torch.no_grad():
            return list(self._functions[key](*inputs))


def recorded(function: Function, inputs: Sequence[Tensor]) -> Function:
    """The operations of `function` on `inputs`, as a function of other tensors of the same shapes.

    The operations of `function` must not depend on the tensors' numbers, and draw no random number.
    It returns lists of tensors; intermediate tensors are freed after their last use.
    """
    writer = _Writer(inputs)
    with torch.no_grad(), writer:
        results = list(function(*inputs))
    ends = [writer.word(tensor) for tensor in results]
    arguments = [f"input_{k}" for k in range(len(inputs))]
    body: list[str] = []
    if not writer.writes:
        for name in writer.constants.keys() - set(ends):
            writer.known[name] = writer.constants[name]
    needed = {*ends, *arguments, *writer.known}
    for names, operation, words in reversed(writer.lines):
        unused = operation not in writer.writes and needed.isdisjoint(names)
        if unused or names[0] in writer.known:
            continue
        used = {name for word in words for name in _names_in(word)}
        last_used = {*names, *used} - {"", *needed}
        needed |= used
        if last_used:
            body.append(f"    del {', '.join(sorted(last_used))}")
        body.append(f"    {', '.join(names)} = {operation}({', '.join(words)})")
    lines = [f"def replay({', '.join(arguments)}):", *reversed(body)]
    source = "\n".join([*lines, f"    return [{', '.join(ends)}]"])
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


def _changes_nothing(
    func: Any,
    args: Sequence[Any],
    result: Any,
) -> bool:
    """Whether an operation returns its argument: a view of the same form, or 1 times it."""
    if func in _VIEWS:
        return bool(result.shape == args[0].shape and result.stride() == args[0].stride())
    return func is aten.mul.Scalar and args[1] == 1 and result.dtype == args[0].dtype


def _names_in(word: str) -> list[str]:
    return word.partition("=")[2 if "=" in word else 0].strip("[]").split(", ")
