"""Pretended streams, pinned memory and graphs, and what watches them: a detector of races, and an emulator.

Everything runs at once and in order here, so no number ever comes out wrong. What a GPU could do in another order is
found with vector clocks: each stream (and the host) counts its operations, and knows how far it has waited for the
others. Two accesses to the same bytes, at least one of which writes, must be ordered by what was waited for; and memory
that is given back must not be in use on another stream than the one it came from, which takes it again at once.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from pretended import PINNED, STATE, WAITS, Backend, is_here, name_of, waited
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST = 0
Clock = dict[int, int]


def _merge(into: Clock, other: Clock) -> None:
    for who, n in other.items():
        into[who] = max(into.get(who, 0), n)


@dataclass
class Access:
    """Of bytes `start` to `stop` of a piece of memory, by operation `n` of a stream."""

    start: int
    stop: int
    writes: bool
    who: int
    n: int
    what: str


@dataclass
class Memory:
    """A piece of memory that has been touched."""

    of: int
    """The stream that it was taken on; `HOST`: pinned memory of the host."""
    accesses: list[Access] = field(default_factory=list)


class Detector:
    """Follows accesses while it is entered; `found` says in words what is not ordered."""

    def __init__(self) -> None:
        self.clocks: dict[int, Clock] = defaultdict(dict)
        self.memory: dict[int, Memory] = {}
        self.found: list[str] = []

    def operation(self, who: int) -> None:
        """`who` begins its next operation, after all that the host has waited for."""
        _merge(self.clocks[who], self.clocks[HOST])
        self.clocks[who][who] = self.clocks[who].get(who, 0) + 1

    def wait(self, who: int, clock: Clock) -> None:
        """`who` goes on when what `clock` says is done."""
        _merge(self.clocks[who], clock)

    def now(self, who: int) -> Clock:
        """What is done when all is that `who` has been asked for."""
        _merge(self.clocks[who], self.clocks[HOST])
        return dict(self.clocks[who])

    def touch(self, tensor: Tensor, who: int, writes: bool, what: str) -> None:
        """An operation of `who` reads a tensor, or writes to it."""
        if not tensor.numel():
            return
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place not in self.memory:
            if not is_here(tensor) and place not in PINNED:
                return
            self.memory[place] = Memory(HOST if place in PINNED else who)
            weakref.finalize(storage, self._freed, place)
        size, start = tensor.element_size(), tensor.data_ptr()
        span = 1 + sum((n - 1) * abs(step) for n, step in zip(tensor.size(), tensor.stride(), strict=True))
        new = Access(start, start + span * size, writes, who, self.clocks[who].get(who, 0), what)
        kept = []
        for old in self.memory[place].accesses:
            apart = old.stop <= new.start or new.stop <= old.start
            if not apart and (writes or old.writes) and not self._before(old, who):
                self.found.append(f"{what} on {who} is not after {old.what} on {old.who}")
            if apart or not (writes and new.start <= old.start and old.stop <= new.stop):
                kept.append(old)
        self.memory[place].accesses = [*kept, new]

    def _before(self, access: Access, who: int) -> bool:
        return access.who == who or self.clocks[who].get(access.who, -1) >= access.n

    def _freed(self, place: int) -> None:
        piece = self.memory.pop(place, Memory(HOST))
        _merge(known := dict(self.clocks[piece.of]), self.clocks[HOST])
        for a in piece.accesses if piece.of != HOST else ():
            if a.who not in (HOST, piece.of) and known.get(a.who, -1) < a.n:
                self.found.append(f"memory of {piece.of} is given back while {a.what} on {a.who} may use it")

    def watch(self, op: Any, args: Any, kwargs: Any) -> None:
        """An operation of the device."""
        name, stream = name_of(op), _current.id
        self.operation(stream)
        if name == "_copy_from":
            source, into, *_ = args
            waits = any(not is_here(t) and t.untyped_storage().data_ptr() not in PINNED for t in (source, into))
            self.touch(source, stream, False, name)
            self.touch(into, stream, True, name)
            if waits or not args[2]:
                self.wait(HOST, self.now(stream))
            return
        given = [*args, *(kwargs.get(a.name) for a in op._schema.arguments[len(args) :])]
        for argument, value in zip(op._schema.arguments, given, strict=False):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in (t for t in tree_leaves(value) if is_here(t)):
                self.touch(tensor, stream, writes, name)
        if name in WAITS:
            self.wait(HOST, self.now(stream))


DETECTOR: list[Detector] = []
"""The one that is at work, if any."""


class Event:
    """A point in the work of a stream."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock


class Stream:
    """What the device does in order."""

    _numbers = count(1)

    def __init__(self, device: Any = None) -> None:
        self.id = next(self._numbers)

    def record_event(self) -> Event:
        return Event(DETECTOR[-1].now(self.id) if DETECTOR else {})

    def wait_event(self, event: Event) -> None:
        for detector in DETECTOR:
            detector.wait(self.id, event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        waited("stream")
        for detector in DETECTOR:
            detector.wait(HOST, detector.now(self.id))


_current = Stream()


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """What the emulator itself does to memory within is no access of the host's."""
    held = DETECTOR[:]
    DETECTOR.clear()
    try:
        yield
    finally:
        DETECTOR[:] = held


class PretendedGraph:
    """Operations, to be done again in the same memory."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._saved: list[tuple[Tensor, Tensor]] = []

    def keep(self, op: Any, args: Any, kwargs: Any) -> None:
        """What an operation is about to write over. A device only records: it is put back afterwards."""
        given = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
        for argument in op._schema.arguments:
            value = given.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                with unwatched():
                    self._saved += [(t, t.clone()) for t in tree_leaves(value) if isinstance(t, Tensor)]

    def add(self, op: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operation that was done while recording."""
        results = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        theirs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        new = [t for t in results if t.numel() and t.untyped_storage()._cdata not in theirs]
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments)
        if new or writes:  # nothing is done for a view
            self.operations.append((op, args, kwargs, new))

    def replay(self) -> None:
        """All of it once more. No Python of the model runs, and what a step leaves in its own memory is lost."""
        with torch.no_grad(), unwatched():
            for op, args, kwargs, new in self.operations:
                again = [t for t in tree_leaves(op(*args, **kwargs)) if isinstance(t, Tensor)]
                for place, value in zip(new, again if new else [], strict=True):
                    place.copy_(value)
        self.spoil()

    def end(self) -> None:
        """It is recorded."""
        with unwatched():
            for place, value in reversed(self._saved):
                place.copy_(value)
        self._saved = []
        self.spoil()

    def spoil(self) -> None:
        """Another graph may have used this memory."""
        with unwatched():
            for place in (place for *_, new in self.operations for place in new):
                if place.is_floating_point():
                    place.fill_(float("nan"))


class StreamBackend(Backend):
    """With streams and graphs, as `torch.cuda` has them."""

    Stream, Event = Stream, Event
    PRETENDEDGraph = PretendedGraph
    graph_pool_handle = staticmethod(lambda: (0, 1))
    current_stream = staticmethod(lambda device=None: _current)

    @staticmethod
    @contextlib.contextmanager
    def stream(stream: Stream) -> Iterator[None]:
        global _current
        before, _current = _current, stream
        try:
            yield
        finally:
            _current = before

    @staticmethod
    @contextlib.contextmanager
    def graph(graph: PretendedGraph, pool: Any = None) -> Iterator[None]:
        STATE.recorder = graph
        try:
            yield
        finally:
            STATE.recorder = None
        graph.end()

    @staticmethod
    def synchronize(device: Any = None) -> None:
        Backend.synchronize()
        for detector in DETECTOR:
            for who in list(detector.clocks):
                detector.wait(HOST, detector.clocks[who])


class Watch(TorchDispatchMode):
    """What the host does: takes pinned memory, and reads and writes it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        pins = bool(kwargs.pop("pin_memory", False))
        out = func(*args, **kwargs)
        if pins:
            storage = out.untyped_storage()
            PINNED[storage.data_ptr()] = storage.nbytes()
            weakref.finalize(storage, PINNED.pop, storage.data_ptr(), None)
        if DETECTOR and not pins and not any(map(is_here, tree_leaves((args, kwargs, out)))):
            detector = DETECTOR[-1]
            detector.operation(HOST)
            views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
            for argument, value in zip(func._schema.arguments, () if views else args, strict=False):
                writes = argument.alias_info is not None and argument.alias_info.is_write
                for tensor in tree_leaves(value):
                    if isinstance(tensor, Tensor):
                        detector.touch(tensor, HOST, writes, name_of(func))
        return out


@contextlib.contextmanager
def present(**state: Any) -> Iterator[Detector]:
    """Within, torch sees the device; gives the detector of races that follows it."""
    assert not STATE.present
    detector = Detector()
    for name, value in {"present": True, "dead": False, "count": 1, "index": 0, "limit": float("inf"), **state}.items():
        setattr(STATE, name, value)
    STATE.waits.clear()
    STATE.before.append(detector.watch)
    DETECTOR.append(detector)
    try:
        with Watch():
            yield detector
    finally:
        STATE.before.remove(detector.watch)
        DETECTOR.remove(detector)
        STATE.present = STATE.dead = False
