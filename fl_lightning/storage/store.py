"""Stores clients' vectors between visits, and brings them to the device for a visit.

In `memory` they lie where clients train, and are trained in place. On the `host` (main memory
beside a GPU) or on `disk` there is room for more vectors than the device holds: a visit's vectors
are copied to the device while the client before it trains, and copied back while the next one
does. (Beside a GPU, copies from and to files are waited for.)
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.foundation.device import has_streams, host_buffer, module_of
from fl_lightning.foundation.files import writing
from fl_lightning.storage.state import ClientState

Place = Literal["memory", "host", "disk"]
"""Where vectors lie: on the device that trains, in main memory, or in files."""


class Lane:
    """Copies between the store and the device: here one after the other, with all the rest."""

    def copy(self, into: Tensor, source: Tensor) -> Callable[[], None]:
        """Begin to copy after all earlier copies; returns a function to call before the copy is
        read."""
        into.copy_(source)
        return lambda: None

    def synchronize(self) -> None:
        """Wait until all copies are made."""


class StreamLane(Lane):
    """Copies on a stream of their own, beside what the device computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module = module_of(device)
        self.stream = self.module.Stream(device)

    def copy(self, into: Tensor, source: Tensor) -> Callable[[], None]:
        """Begin to copy after all earlier copies and computations; returns a function to call
        before the copy is read."""
        compute = self.module.current_stream(self.device)
        self.stream.wait_stream(compute)
        with self.module.stream(self.stream):
            into.copy_(source, non_blocking=True)
            done = self.stream.record_event()
        return partial(compute.wait_event, done)

    def synchronize(self) -> None:
        """Wait until all copies are made."""
        self.stream.synchronize()


class VectorStore:
    """Keeps vectors from visit to visit.

    `fetch` copies the vectors of a coming visit ahead; `acquire` and `borrow` give them to the
    visit; `release` writes them back; `synchronize` waits for the end of all copies. `adopt` takes
    in a client that moves here.

    On disk every vector is a file of `folder` that has no name any more: the system writes its
    pages out when it needs the memory, reads them back when they are touched, and frees the space
    with the process, however that ends.

    Clients train on `device`; vectors are copied there by `lane` (None: the device's).
    """

    def __init__(
        self,
        place: Place,
        folder: Path,
        device: torch.device,
        lane: Lane | None = None,
    ) -> None:
        self.place = place
        self.folder = folder
        self.device = device
        self.apart = place == "host" or (place == "disk" and device.type != "cpu")
        """Whether a visit works on copies of vectors."""
        if lane is None:
            lane = StreamLane(device) if self.apart and has_streams(device) else Lane()
        self._lane = lane
        self._free: list[Tensor] = []  # vectors on the device, used again and again
        # by id: vector, its copy, how to wait
        self._ahead: dict[int, tuple[Tensor, Tensor, Callable[[], None]]] = {}
        self._acquired: list[tuple[ClientState, _Copies]] = []
        self._borrowed: list[Tensor] = []

    def allocate(self, vector: Tensor) -> Tensor:
        """A copy of `vector` (D,) in the store.

        Raises:
            RunFailed: the disk is full.
        """
        if self.place == "disk":
            return self._file(vector)
        if self.place == "memory":
            return vector.to(self.device, copy=True)
        return host_buffer(vector, self.device).copy_(vector)

    def adopt(self, state: ClientState) -> None:
        """Put the vectors of a `state` from another rank into the store."""
        stored = {}
        for vector in _tensors(state):
            stored[id(vector)] = self.allocate(vector)
        _replace(state, stored)

    def stow(self, tensor: Tensor) -> Tensor:
        """`tensor` as a client's memory keeps it between visits: copied to main memory if vectors
        lie off the device, too, else the tensor itself."""
        if self.apart:
            return tensor.cpu()
        return tensor

    def fetch(self, vectors: Iterable[Tensor]) -> None:
        """Begin to copy `vectors` to the device: a visit will soon ask for them, and they do not
        change until then."""
        if not self.apart:
            return
        for vector in vectors:
            if id(vector) not in self._ahead:
                copy = self._room(vector)
                wait = self._lane.copy(copy, vector)
                self._ahead[id(vector)] = (vector, copy, wait)

    def acquire(self, state: ClientState) -> None:
        """Replace the vectors of `state` by copies on the device, until `release`."""
        if not self.apart:
            return
        copies: _Copies = {}
        try:
            for stored in _tensors(state):
                copy = self._at_hand(stored)
                copies[id(copy)] = (copy, stored)
        except BaseException:
            self._free += [copy for copy, _ in copies.values()]
            raise
        self._acquired.append((state, copies))
        _replace(state, {id(stored): copy for copy, stored in copies.values()})

    def borrow(self, vector: Tensor) -> Tensor:
        """`vector` on the device, to be read until `release`."""
        if not self.apart:
            return vector
        self._borrowed.append(self._at_hand(vector))
        return self._borrowed[-1]

    def release(self) -> None:
        """Begin to write back the acquired vectors: their states have the vectors of the store
        again."""
        for state, copies in self._acquired:
            stored = {}
            for tensor in _tensors(state):
                key = id(tensor)
                if key in copies:
                    _, stored[key] = copies[key]
                    self._lane.copy(stored[key], tensor)
                else:  # a new tensor from a hook
                    stored[key] = self.allocate(tensor)
            _replace(state, stored)
            self._free += [copy for copy, _ in copies.values()]
        self._free += self._borrowed
        self._acquired = []
        self._borrowed = []

    def synchronize(self) -> None:
        """Wait until all is written back, and drop copies that were fetched and not asked for."""
        if self.apart:
            self._lane.synchronize()
            self._free += [copy for _, copy, _ in self._ahead.values()]
            self._ahead = {}

    def _at_hand(self, vector: Tensor) -> Tensor:
        self.fetch([vector])
        _, copy, wait = self._ahead.pop(id(vector))
        wait()
        return copy

    def _room(self, vector: Tensor) -> Tensor:
        for k, free in enumerate(self._free):
            if free.shape == vector.shape and free.dtype == vector.dtype:
                return self._free.pop(k)
        return torch.empty_like(vector, device=self.device)

    def _file(self, vector: Tensor) -> Tensor:
        with writing(self.folder):
            handle, name = tempfile.mkstemp(dir=self.folder, prefix=".vector-")
            try:
                # else a full disk kills the process when it writes
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(handle, 0, max(1, vector.nbytes))
                stored = torch.from_file(name, shared=True, size=vector.numel(), dtype=vector.dtype)
            finally:
                os.close(handle)
                os.unlink(name)
        return stored.copy_(vector)


_Copies = dict[int, tuple[Tensor, Tensor]]
"""By id of the copy on the device: that copy, and the vector in the store."""


def _tensors(state: ClientState) -> list[Tensor]:
    """The vectors of a state, each once: the last upload may be the client's own tensor."""
    tensors = [*state.vectors.values(), *state.received.values()]
    return list({id(tensor): tensor for tensor in tensors}.values())


def _replace(state: ClientState, by: dict[int, Tensor]) -> None:
    """Replace the tensors of a state, by their ids."""
    state.vectors = {slot: by[id(v)] for slot, v in state.vectors.items()}
    state.received = {slot: by[id(v)] for slot, v in state.received.items()}
