"""Names of the version before that still work in this one, with one line of warning each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from fl_lightning import log

T = TypeVar("T")
ARGUMENTS = {"mixes": "sources"}
"""Arguments of methods, and what they are called now."""
VALUES = {"heard": "uploaded"}
"""Values of these arguments."""
_warned: set[str] = set()


def warn(old: str, new: str) -> None:
    """Say once in this process that `old` is called `new` now."""
    if old not in _warned:
        _warned.add(old)
        log.say(f"{old} is called {new} now: the old name works in this version for the last time")


def arguments(given: Mapping[str, Any], known: Collection[str], key: str | None = None) -> dict[str, Any]:
    """The arguments `given` to a method that has those of `known`, by today's names.

    `key`: what they belong to, for the warning; None: no warning, since they were written for another version.
    """
    named = dict(given)
    for old, new in ARGUMENTS.items():
        if old in named and old not in known and new in known:
            value = named.pop(old)
            named.setdefault(new, VALUES.get(value, value))
            if key is not None:
                warn(f"{key}.{old}", f"{key}.{new}{' uploaded' if value in VALUES else ''}")
    return named


def forwarded(old: str, new: str, source: str | None = None) -> Any:
    """An attribute `old` (CLASS.NAME) that reads and writes the attribute `source` (None: `new`) of its object."""
    name = source or new

    def read(thing: Any) -> Any:
        warn(old, new)
        value = getattr(thing, name)
        return VALUES.get(value, value) if isinstance(value, str) else value

    return property(read, lambda thing, value: setattr(thing, name, value))


def keyword(old: str, new: str) -> Callable[[type[T]], type[T]]:
    """A class whose argument and attribute `old` are called `new` now."""

    def decorated(cls: type[T]) -> type[T]:
        made, name = cls.__init__, f"{cls.__name__}.{old}"

        @functools.wraps(made)
        def init(self: T, *args: Any, **kwargs: Any) -> None:
            if old in kwargs:
                warn(name, new)
                kwargs[new] = kwargs.pop(old)
            made(self, *args, **kwargs)

        cls.__init__ = init  # type: ignore[assignment]
        setattr(cls, old, forwarded(name, new))
        return cls

    return decorated
