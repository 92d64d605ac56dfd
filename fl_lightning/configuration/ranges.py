"""Types for numbers with bounds, as in `lam: NonNegativeFloat = 1.0`, and the check of values
against them.

The command line, and other code that does not look into `Annotated`, sees `int` and `float`.
"""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from fl_lightning.foundation.errors import check


@dataclass(frozen=True)
class Range:
    """Finite numbers from `low` to `high`; `above` excludes `low` itself, `below` excludes
    `high`."""

    low: float
    high: float = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        above_low = value > self.low if self.above else value >= self.low
        below_high = value < self.high if self.below else value <= self.high
        return abs(value) < math.inf and above_low and below_high

    def __str__(self) -> str:
        if self.high < math.inf:
            begin = "(" if self.above else "["
            end = ")" if self.below else "]"
            return f"it must lie in {begin}{self.low:g}, {self.high:g}{end}"
        if self.above:
            return f"it must be above {self.low:g}"
        return f"it must be at least {self.low:g}" if self.low else "it must be 0 or more"


NonNegativeFloat = Annotated[float, Range(0)]
PositiveFloat = Annotated[float, Range(0, above=True)]
UnitInterval = Annotated[float, Range(0, 1)]
PositiveShare = Annotated[float, Range(0, 1, above=True)]
ShareBelow1 = Annotated[float, Range(0, 1, below=True)]
AdamRate = Annotated[float, Range(0, 1000)]
PositiveAdamRate = Annotated[float, Range(0, 1000, above=True)]
"""Learning rates of Adam, and multiples of a batch size. Maximum 1,000 (our choice): greater ones
make no sense or do not fit into memory."""
NonNegativeInt = Annotated[int, Range(0)]
PositiveInt = Annotated[int, Range(1)]


@dataclass(frozen=True)
class Needs:
    """A rule on two arguments of a method: `argument` has an effect only if the argument `other`
    has one of `values`. With other values, `argument` must be left at its neutral value `free`."""

    argument: str
    free: Any
    """The value that is always allowed."""
    other: str
    values: tuple[Any, ...]
    says: str
    """The requirement in words, for the error."""

    def check(
        self,
        arguments: Mapping[str, Any],
        key: str,
    ) -> None:
        """Raise `BadInput` if a method's arguments break the rule.

        Args:
            arguments: the arguments' values by name.
            key: the method's key in the configuration, for the error.
        """
        value = arguments[self.argument]
        holds = value == self.free or arguments[self.other] in self.values
        check(f"{key}.{self.argument}", value, holds, self.says)


@dataclass(frozen=True)
class _Choice:
    """The values that a `Literal` allows."""

    values: tuple[Any, ...]

    def __contains__(self, value: Any) -> bool:
        return value in self.values

    def __str__(self) -> str:
        return f"it must be one of {', '.join(map(str, self.values))}"


def limit(hint: Any) -> tuple[Range | _Choice | None, bool]:
    """Return the range or the choices in a type annotation (None: it has neither), and whether it
    allows null. `hint`: the annotation, such as `PositiveFloat | None`."""
    parts = [hint] if get_origin(hint) in (Annotated, Literal) else list(get_args(hint))
    values: Range | _Choice | None = None
    for part in parts:
        if get_origin(part) is Literal and {type(None), part}.issuperset(parts):
            values = _Choice(get_args(part))
        elif get_origin(part) is Annotated:
            for extra in get_args(part)[1:]:
                values = extra if isinstance(extra, Range) else values
    return values, type(None) in parts


def words(kind: Any) -> str:
    """Return a type in words, such as `a whole number or null`."""
    plain = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        types.NoneType: "null",
    }
    if kind in plain:
        return plain[kind]
    origin = get_origin(kind) or kind
    arguments = get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (Union, types.UnionType):
        return " or ".join(map(words, arguments))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a mapping"
    if isinstance(origin, type) and issubclass(origin, Iterable):
        items = [words(part) for part in arguments if part is not ...]
        return f"a list: [{', '.join(items)}, ...]"
    return str(kind).replace("typing.", "")


def bare(hint: Any) -> Any:
    """Return a type without its bounds: `float` for `PositiveFloat`."""
    if get_origin(hint) is Annotated:
        return get_args(hint)[0]
    for part in get_args(hint):
        if get_origin(part) is Annotated:
            return get_args(part)[0] | None
    return hint


def check_limit(key: str, value: Any, hint: Any) -> None:
    """Raise `BadInput` for a value that its type does not allow."""
    values, optional = limit(hint)
    if values is None:
        return
    holds = optional if value is None else value in values
    check(key, value, holds, f"{values}, or null" if optional else str(values))


@cache
def bounded_fields(cls: type) -> dict[str, Any]:
    """Return the types of a class's fields that have bounds or choices, by name. Annotations whose
    names are imported for type checkers only are skipped."""
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        for name, annotation in vars(base).get("__annotations__", {}).items():
            fields = {"__annotations__": {name: annotation}, "__module__": base.__module__}
            with contextlib.suppress(NameError):
                hints |= get_type_hints(type("OneField", (), fields), include_extras=True)
    return {name: hint for name, hint in hints.items() if limit(hint)[0] is not None}


def check_ranges(thing: object, key: str) -> None:
    """Raise `BadInput` for the key `key`.FIELD of the first field of a dataclass whose value is
    beyond its bounds."""
    cls: Any = type(thing)
    for name, hint in bounded_fields(cls).items():
        check_limit(f"{key}.{name}", getattr(thing, name, None), hint)
