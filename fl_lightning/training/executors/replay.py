"""Records the torch operations of a function of tensors, and runs them again.

`torch.func` interprets every operation of a stacked step anew, which takes longer than the
operations of small models. As these are the same in all steps of the same shape, they are recorded
once and then replayed, with bit-identical results.
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
    """Records operations as lines of Python, in which every tensor has a name."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.values: dict[str, Any] = {}
        """Values that lines use but no line computes: operations, numbers, tensors from
        outside."""
        self.lines: list[tuple[list[str], str, list[str]]] = []
        """Each line's names of results, operation and arguments."""
        self.writes: set[str] = set()
        """Operations that write to one of their arguments."""
        self.constants: dict[str, Tensor] = {}
        """Tensors whose values follow from their shape."""
        self._transposed: dict[tuple[str, Any], Tensor] = {}
        """The original of each transposed tensor, by name and dimensions."""
        self._kept: list[Tensor] = []  # keeps tensors alive, so that their ids stay unique
        self._names: dict[int, str] = {}
        for tensor in inputs:
            self._name(tensor, f"input_{len(self._kept)}")

    def _name(self, tensor: Tensor, name: str) -> str:
        self._kept.append(tensor)
        self._names[id(tensor)] = name
        return name

    def word(self, argument: Any) -> str:
        """Return the text by which a line refers to an argument; a value that no line has used
        before is stored in `values`."""
        if isinstance(argument, Tensor) and id(argument) in self._names:
            return self._names[id(argument)]
        if isinstance(argument, list | tuple) and any(
            isinstance(item, Tensor) for item in argument
        ):
            return f"[{', '.join(map(self.word, argument))}]"
        name = f"given_{len(self.values)}"
        self.values[name] = argument
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
        """Run one operation, and record it."""
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
        self.values[operation] = getattr(func, "_op", func)  # with less overhead in Python
        if func._schema.is_mutable:
            self.writes.add(operation)
        if func in _CONSTANT:
            self.constants[names[0]] = result
        self.lines.append(([*names, ""] if several else names, operation, words))
        return result

    def _result(self, value: Any, name: str) -> str:
        """Return the name of an operation's result; if it writes in place, that of its argument."""
        if not isinstance(value, Tensor):
            return name
        if id(value) in self._names:
            return self._names[id(value)]
        return self._name(value, name)


class Recordings:
    """Records functions that use the bound model of `module`, once for each key."""

    def __init__(self, module: ClientModule) -> None:
        self.module = module
        self._functions: dict[Hashable, Function] = {}

    def run(
        self,
        key: Hashable,
        function: Function,
        inputs: Sequence[Tensor],
    ) -> list[Tensor]:
        """Return the results of `function`, recorded or replayed. Its operations must be the same
        for all inputs with the same `key`."""
        if key not in self._functions:
            self._functions[key] = record(function, inputs)
            self.module.forget_features()
        with torch.no_grad():
            return list(self._functions[key](*inputs))


def record(function: Function, inputs: Sequence[Tensor]) -> Function:
    """Record the operations of `function` on `inputs`; returns a function that runs them on other
    tensors of the same shapes.

    The operations must not depend on the tensors' values, and must not draw random numbers. The
    recorded function frees intermediate tensors after their last use.
    """
    writer = _Writer(inputs)
    with torch.no_grad(), writer:
        results = list(function(*inputs))
    ends = [writer.word(tensor) for tensor in results]
    arguments = [f"input_{k}" for k in range(len(inputs))]
    body = []
    if not writer.writes:
        for name in writer.constants.keys() - set(ends):
            writer.values[name] = writer.constants[name]
    needed = {*ends, *arguments, *writer.values}
    for names, operation, words in reversed(writer.lines):
        unused = operation not in writer.writes and needed.isdisjoint(names)
        if unused or names[0] in writer.values:
            continue
        used = {name for word in words for name in _names_in(word)}
        last_used = {*names, *used} - {"", *needed}
        needed |= used
        if last_used:
            body.append(f"    del {', '.join(sorted(last_used))}")
        body.append(f"    {', '.join(names)} = {operation}({', '.join(words)})")
    lines = [f"def replay({', '.join(arguments)}):", *reversed(body)]
    source = "\n".join([*lines, f"    return [{', '.join(ends)}]"])
    namespace = dict(writer.values)
    exec(source, namespace)  # the source contains only names made above
    replay: Function = namespace["replay"]
    return replay


_CONSTANT = (
    aten.scalar_tensor.default,
    aten.ones_like.default,
    aten.zeros_like.default,
)
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
    """Whether an operation returns its argument unchanged: as a view of the same shape and strides,
    or multiplied by 1."""
    if func in _VIEWS:
        original = args[0]
        return bool(result.shape == original.shape and result.stride() == original.stride())
    return func is aten.mul.Scalar and args[1] == 1 and result.dtype == args[0].dtype


def _names_in(word: str) -> list[str]:
    argument = word.rpartition("=")[2]
    return argument.strip("[]").split(", ")
