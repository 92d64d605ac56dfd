"""Numbers with bounds as types, `lam: NonNegativeFloat = 1.0`, and the check of an object's fields
against them.

To a command line, and to code that reads annotations as Python does by default, they are plain
`int` and `float`.
"""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from fl_lightning.foundation.errors import BadInput


@dataclass(frozen=True)
class Range:
    """Finite numbers from `low` to `high`; `above` excludes `low` itself, `below` excludes
    `high`."""

    low: float
    high: float = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        return abs(value) < math.inf and (
            (value > self.low if self.above else value >= self.low)
            and (value < self.high if self.below else value <= self.high)
        )

    def __str__(self) -> str:
        if self.high < math.inf:
            return f"it must lie in {'[('[self.above]}{self.low:g}, {self.high:g}{'])'[self.below]}"
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
"""Learning rates of Adam, and multiples of a batch: those beyond 1,000 (ours) make no sense, nor
fit into memory."""
NonNegativeInt = Annotated[int, Range(0)]
PositiveInt = Annotated[int, Range(1)]


@dataclass(frozen=True)
class Needs:
    """A rule between two arguments: `argument` may differ from `free` only where `other` is one of
    `values`."""

    argument: str
    free: Any
    other: str
    values: tuple[Any, ...]
    says: str
    """What is allowed, in words."""

    def check(self, given: Mapping[str, Any], key: str) -> None:
        """Raise `BadInput`, for `key`.NAME, where the arguments `given` break the rule."""
        value = given[self.argument]
        if value != self.free and given[self.other] not in self.values:
            raise BadInput(f"{key}.{self.argument}", value, self.says)


@dataclass(frozen=True)
class _Choice:
    """The values of a `Literal`."""

    values: tuple[Any, ...]

    def __contains__(self, value: Any) -> bool:
        return value in self.values

    def __str__(self) -> str:
        return f"it must be one of {', '.join(map(str, self.values))}"


def limit(hint: Any) -> tuple[Range | _Choice | None, bool]:
    """What a type allows, as far as it says it, and whether None is allowed, too."""
    parts = [hint] if get_origin(hint) in (Annotated, Literal) else list(get_args(hint))
    values: Range | _Choice | None = None
    for part in parts:
        if get_origin(part) is Literal and {type(None), part}.issuperset(parts):
            values = _Choice(get_args(part))
        elif get_origin(part) is Annotated:
            values = next(
                (extra for extra in get_args(part)[1:] if isinstance(extra, Range)), values
            )
    return values, type(None) in parts


def words(kind: Any) -> str:
    """Returns a type in words."""
    plain = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        types.NoneType: "null",
    }
    if kind in plain:
        return plain[kind]
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(words(part) for part in get_args(kind))
    origin = get_origin(kind) or kind
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a mapping"
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return (
            f"a list: [{', '.join(words(part) for part in get_args(kind) if part is not ...)}, ...]"
        )
    return str(kind).replace("typing.", "")


def bare(hint: Any) -> Any:
    """A type without its bounds: as a command line shows it."""
    if get_origin(hint) is Annotated:
        return get_args(hint)[0]
    inside = [part for part in get_args(hint) if get_origin(part) is Annotated]
    return get_args(inside[0])[0] | None if inside else hint


def check_limit(key: str, value: Any, hint: Any) -> None:
    """Raise `BadInput` for a value that its type does not allow."""
    values, optional = limit(hint)
    if values is not None and not (value in values if value is not None else optional):
        raise BadInput(key, value, f"{values}, or null" if optional else str(values))


@cache
def allowed(kind: type) -> dict[str, Any]:
    """Returns the bounded types among a class's fields, by name; annotations that exist for type
    checkers alone are left out."""
    hints: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        for name, annotation in vars(base).get("__annotations__", {}).items():
            one = type(
                "One", (), {"__annotations__": {name: annotation}, "__module__": base.__module__}
            )
            with contextlib.suppress(NameError):
                hints |= get_type_hints(one, include_extras=True)
    return {name: hint for name, hint in hints.items() if limit(hint)[0] is not None}


def check_ranges(thing: object, key: str) -> None:
    """Raise `BadInput` for the first field of a dataclass, as `key`.NAME, that holds what its type
    does not allow."""
    kind: Any = type(thing)
    for name, hint in allowed(kind).items():
        check_limit(f"{key}.{name}", getattr(thing, name, None), hint)
