"""Where `fl-train tune` looks for the value of an argument: stated beside the argument, with the
reason.

    lam: float = searched(1.0, LogRange(0.1, 2), "the authors' grid: 0.1, 1 and 2")

Not searched is whatever changes how much a client trains (epochs, steps): all methods are tuned
with the same budget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fl_lightning.configuration.ranges import Range as Range

T = TypeVar("T")


@dataclass(frozen=True)
class LogRange:
    """Numbers from `low` to `high`, evenly over their logarithms."""

    low: float
    high: float


@dataclass(frozen=True)
class Whole:
    """Whole numbers from `low` to `high`, both among them."""

    low: int
    high: int


@dataclass(frozen=True)
class Choice:
    """One of some values."""

    values: tuple[Any, ...]


Space = LogRange | Range | Whole | Choice


def searched(default: T, space: Space, why: str) -> T:
    """A dataclass field with this default, searched in `space`; `why` says where that comes
    from."""
    made: T = field(default=default, metadata={"search": space, "why": why})
    return made


EDGE = 0.05
"""Share of a range, at each end, in which a choice says that a better one may lie outside. Ours: a
twentieth."""


def edge(space: Space, value: Any) -> Any:
    """Returns the end of `space` near `value` (of ranges, the outer `EDGE` share); of whole numbers
    and choices `value` itself, where it is the first or last of at least three numbers; else
    None."""
    if isinstance(space, Choice | Whole):
        values = space.values if isinstance(space, Choice) else range(space.low, space.high + 1)
        numbers = sorted(
            v for v in values if isinstance(v, int | float) and not isinstance(v, bool)
        )
        return value if len(numbers) > 2 and value in (numbers[0], numbers[-1]) else None
    scale = math.log if isinstance(space, LogRange) else float
    low, high = scale(space.low), scale(space.high)
    share = (scale(value) - low) / (high - low) if high > low else 0.5
    return space.low if share <= EDGE else space.high if share >= 1 - EDGE else None


def refusal(space: Any) -> str | None:
    """Returns what is wrong with a space; None if nothing."""
    if isinstance(space, Choice):
        fine = (
            isinstance(space.values, tuple | list)
            and space.values
            and all(map(_plain, space.values))
        )
        return (
            None if fine else "its values must be texts, numbers, true, false or null, at least one"
        )
    if not isinstance(space, LogRange | Range | Whole):
        return "it must be a LogRange, Range, Whole or Choice"
    kind = int if isinstance(space, Whole) else (int, float)
    ends = (space.low, space.high)
    if any(
        not isinstance(end, kind) or isinstance(end, bool) or not math.isfinite(end) for end in ends
    ):
        return f"its ends must be {'whole ' if kind is int else 'finite '}numbers"
    if isinstance(space, LogRange) and space.low <= 0:
        return "its low end must be above 0, for logarithms"
    return None if space.low <= space.high else "its low end must not be above its high end"


def _plain(value: Any) -> bool:
    """Whether Optuna's journal gives `value` back unchanged."""
    return value is None or (isinstance(value, str | int | float) and value == value)


def widened(space: Space, value: Any) -> Space | None:
    """`space`, widened to hold `value`; None where it cannot: a list, a word or null in a range, 0
    in one of logarithms."""
    if isinstance(space, Choice):
        wider = Choice((*space.values, value)) if _plain(value) else None
        return space if value in space.values else wider
    kinds = int if isinstance(space, Whole) else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool) or not math.isfinite(value):
        return None
    if isinstance(space, LogRange) and value <= 0:
        return None
    return type(space)(min(space.low, value), max(space.high, value))  # type: ignore[arg-type]
