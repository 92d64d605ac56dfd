"""Search spaces of `fl-train tune`, declared with a method's argument and the reason for its range.

    lam: float = searched(1.0, LogRange(0.1, 2), "the authors' grid: 0.1, 1 and 2")

Arguments that change how much a client trains (epochs, steps) are not searched: all methods are
tuned with the same budget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fl_lightning.configuration.ranges import Range as Range

T = TypeVar("T")


@dataclass(frozen=True)
class LogRange:
    """Numbers from `low` to `high`, drawn uniformly in their logarithm."""

    low: float
    high: float


@dataclass(frozen=True)
class Whole:
    """Whole numbers from `low` to `high`, both included."""

    low: int
    high: int


@dataclass(frozen=True)
class Choice:
    """A list of values, one of which is drawn."""

    values: tuple[Any, ...]


Space = LogRange | Range | Whole | Choice


def searched(default: T, space: Space, why: str) -> T:
    """Return a dataclass field with this default that `fl-train tune` searches in `space`. `why`:
    where the range comes from, for the user."""
    argument: T = field(default=default, metadata={"search": space, "why": why})
    return argument


EDGE = 0.05
"""Share of a range at each end: a tuned value there suggests that a better one lies outside. A
twentieth: our choice."""


def edge(space: Space, value: Any) -> Any:
    """Return the end of a search space, its lowest or highest value, near which a tuned `value`
    lies; None: it lies near neither. Better values may then lie beyond that end.

    In a range, a value is near an end if it lies in the outer twentieth (`EDGE`) on that side; a
    `LogRange` is divided by logarithms. In `Whole` and `Choice`, only the least and the greatest
    number are ends, and only if the space has at least three numbers.
    """
    if isinstance(space, Choice | Whole):
        values = space.values if isinstance(space, Choice) else range(space.low, space.high + 1)
        numbers = sorted(v for v in values if isinstance(v, int | float) and type(v) is not bool)
        at_end = len(numbers) > 2 and value in (numbers[0], numbers[-1])
        return value if at_end else None
    scale = math.log if isinstance(space, LogRange) else float
    low = scale(space.low)
    high = scale(space.high)
    share = (scale(value) - low) / (high - low) if high > low else 0.5
    if share <= EDGE:
        return space.low
    return space.high if share >= 1 - EDGE else None


def space_problem(space: Any) -> str | None:
    """Return why a search space cannot be used; None: it can."""
    if isinstance(space, Choice):
        values = space.values
        usable = isinstance(values, tuple | list) and values and all(map(_survives, values))
        requirement = "its values must be texts, numbers, true, false or null, at least one"
        return None if usable else requirement
    if not isinstance(space, LogRange | Range | Whole):
        return "it must be a LogRange, Range, Whole or Choice"
    kind = "whole" if isinstance(space, Whole) else "finite"
    if not all(_is_number(end, kind == "whole") for end in (space.low, space.high)):
        return f"its ends must be {kind} numbers"
    if isinstance(space, LogRange) and space.low <= 0:
        return "its low end must be above 0, for logarithms"
    return None if space.low <= space.high else "its low end must not be above its high end"


def _is_number(value: Any, is_whole: bool) -> bool:
    """Return whether `value` is a finite number, and an integer if `is_whole`."""
    kinds = int if is_whole else (int, float)
    return isinstance(value, kinds) and type(value) is not bool and math.isfinite(value)


def _survives(value: Any) -> bool:
    """Return whether Optuna's journal, which is JSON, returns `value` unchanged."""
    return value is None or (isinstance(value, str | int | float) and value == value)


def widened(space: Space, value: Any) -> Space | None:
    """Return `space`, extended to include `value`; None if that is impossible: a range cannot
    include a list, a word or null, nor a `LogRange` 0."""
    if isinstance(space, Choice):
        if value in space.values:
            return space
        return Choice((*space.values, value)) if _survives(value) else None
    if not _is_number(value, isinstance(space, Whole)):
        return None
    if isinstance(space, LogRange) and value <= 0:
        return None
    return type(space)(min(space.low, value), max(space.high, value))
