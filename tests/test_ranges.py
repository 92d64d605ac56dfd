"""Arguments with bounds: what their types allow, and that every method holds its own to them."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Literal

import pytest
from refusals import refuses

from fl_lightning.configuration import catalogue
from fl_lightning.configuration.ranges import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Range,
    ShareBelow1,
    UnitInterval,
    bounded_fields,
    limit,
)
from fl_lightning.foundation.errors import BadInput
from fl_lightning.methods import Method

if TYPE_CHECKING:
    from decimal import Decimal


@dataclass(frozen=True)
class Bounded(Method):
    """One field of each kind."""

    a: NonNegativeFloat = 1.0
    b: PositiveFloat | None = 1.0
    c: UnitInterval = 0.5
    d: PositiveShare = 0.5
    e: ShareBelow1 = 0.5
    f: NonNegativeInt = 0
    g: PositiveInt | None = None
    h: Annotated[float, Range(-1, 1)] = 0.0
    i: Literal["this", "that"] = "this"
    j: float = -5.0


@pytest.mark.parametrize(
    "field, values, said",
    [
        ("a", (-1e-9, math.nan, None), "it must be 0 or more"),
        ("b", (0.0, -1.0, math.nan), "it must be above 0, or null"),
        ("c", (-0.1, 1.1, math.nan), "it must lie in [0, 1]"),
        ("d", (0.0, 1.1), "it must lie in (0, 1]"),
        ("e", (-0.1, 1.0), "it must lie in [0, 1)"),
        ("f", (-1,), "it must be 0 or more"),
        ("g", (0,), "it must be at least 1, or null"),
        ("h", (-1.1, 1.1), "it must lie in [-1, 1]"),
        ("i", ("other",), "it must be one of this, that"),
    ],
)
def test_what_a_type_does_not_allow_is_refused(field, values, said):
    for value in values:
        with pytest.raises(BadInput) as caught:
            Bounded(**{field: value})
        assert (caught.value.key, caught.value.requirement) == (f"method.{field}", said)


def test_the_ends_are_allowed_where_the_type_holds_them():
    assert Bounded(a=0.0, b=None, c=0.0, d=1.0, e=0.0, f=0, g=1, h=-1.0, i="that") != Bounded(
        c=1.0, h=1.0
    )


def test_a_type_that_only_checkers_know_hides_no_range_of_the_base():
    """As in a user's module that imports a field's type under `TYPE_CHECKING`."""

    @dataclass(frozen=True)
    class Mine(Bounded):
        own: Decimal | None = None
        beside: UnitInterval = 0.5

    for wrong in ({"a": -1.0}, {"beside": 2.0}):
        with pytest.raises(BadInput):
            Mine(**wrong)


METHODS = {
    name: entry.class_path.rpartition(".") for name, entry in catalogue.table("methods").items()
}
FREE = {("fedala", "threshold")}
"""Numbers that may be anything: a threshold that is never reached."""


def test_every_number_of_every_method_has_bounds_that_hold():
    """Also those that a subclass gives another default: there the bounds must be said again."""
    without = []
    for name, (module, _, cls) in METHODS.items():
        kind = getattr(importlib.import_module(module), cls)
        for field in fields(kind):
            values, _ = limit(bounded_fields(kind).get(field.name))
            if not isinstance(values, Range):
                number = str(field.type).split(" | ")[0] in ("int", "float")
                without += [(name, field.name)] if number and (name, field.name) not in FREE else []
                continue
            with refuses(rf"method\.{field.name}="):
                kind(**{field.name: math.nan})
    assert without == []
