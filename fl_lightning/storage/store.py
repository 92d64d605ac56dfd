"""Stores clients' vectors between visits, and copies them to the device for a visit.

With `memory`, vectors lie on the device that trains, and are trained in place. The `host` (main
memory of a machine with a GPU) and the `disk` have room for more vectors than the device: a visit's
vectors are copied to the device while the client before it trains, and copied back while the next
one does. (Between files and a GPU, copies block.)
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
"""The place of vectors: the device that trains, main memory, or files."""


class Copier:
    """Copies vectors between the store and the device synchronously: each call of `copy` returns
    when the copy has ended."""

    def copy(self, into: Tensor, source: Tensor) -> Callable[[], None]:
        """Start a copy; returns a function that waits for its end."""
        into.copy_(source)
        return lambda: None

    def synchronize(self) -> None:
        """Wait for the end of all copies."""


class StreamCopier(Copier):
    """Copies vectors on a separate stream, while the device computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module = module_of(device)
        self.stream = self.module.Stream(device)

    def copy(self, into: Tensor, source: Tensor) -> Callable[[], None]:
        """Start a copy that follows all earlier copies and computations; returns a function that
        makes later computations wait for its end."""
        compute = self.module.current_stream(self.device)
        self.stream.wait_stream(compute)
        with self.module.stream(self.stream):
            into.copy_(source, non_blocking=True)
            done = self.stream.record_event()
        return partial(compute.wait_event, done)

    def synchronize(self) -> None:
        """Wait for the end of all copies."""
        self.stream.synchronize()


class VectorStore:
    """Keeps clients' vectors between visits.

    `fetch` starts to copy the vectors of the next visit; `acquire` and `borrow` provide them to the
    visit; `release` writes them back; `synchronize` waits for the end of all copies. `adopt` stores
    the vectors of a client that moves to this rank.

    On disk, every vector is a memory-mapped file in `folder` that is already deleted: the system
    writes its pages when it needs memory, reads them on access, and frees the space when the
    process ends in any way.

    Args:
        place: the place of vectors between visits.
        folder: for files.
        device: the device on which clients train.
        copier: copies vectors between store and device; None: the one for the device.
    """

    def __init__(
        self,
        place: Place,
        folder: Path,
        device: torch.device,
        copier: Copier | None = None,
    ) -> None:
        self.place = place
        self.folder = folder
        self.device = device
        self.apart = place == "host" or (place == "disk" and device.type != "cpu")
        """Whether a visit works on copies of vectors."""
        if copier is None:
            copier = StreamCopier(device) if self.apart and has_streams(device) else Copier()
        self._copier = copier
        self._free: list[Tensor] = []
        """Vectors on the device for reuse."""
        self._ahead: dict[int, tuple[Tensor, Tensor, Callable[[], None]]] = {}
        """Fetched vectors by id: the vector, its copy, and a function that waits for the copy."""
        self._acquired: list[tuple[ClientState, _Copies]] = []
        self._borrowed: list[Tensor] = []

    def allocate(self, vector: Tensor) -> Tensor:
        """Copy `vector` (D,) to the store; returns the copy.

        Raises:
            RunFailed: the disk is full.
        """
        if self.place == "disk":
            return self._file(vector)
        if self.place == "memory":
            return vector.to(self.device, copy=True)
        return host_buffer(vector, self.device).copy_(vector)

    def adopt(self, state: ClientState) -> None:
        """Copy the vectors of a `state` from another rank to the store."""
        stored = {}
        for vector in _tensors(state):
            stored[id(vector)] = self.allocate(vector)
        _replace(state, stored)

    def stow(self, tensor: Tensor) -> Tensor:
        """Return the tensor to put into a client's memory, which is kept between visits. If clients
        train on an accelerator but vectors are kept in main memory or in files, this is a copy in
        main memory; else it is `tensor` itself."""
        if self.apart:
            return tensor.cpu()
        return tensor

    def fetch(self, vectors: Iterable[Tensor]) -> None:
        """Start to copy `vectors` to the device for a coming visit; they must not change until
        then."""
        if not self.apart:
            return
        for vector in vectors:
            if id(vector) not in self._ahead:
                copy = self._room(vector)
                wait = self._copier.copy(copy, vector)
                self._ahead[id(vector)] = (vector, copy, wait)

    def acquire(self, state: ClientState) -> None:
        """Replace the vectors of `state` by copies on the device until `release` is called."""
        if not self.apart:
            return
        copies: _Copies = {}
        try:
            for stored in _tensors(state):
                copy = self._fetched(stored)
                copies[id(copy)] = (copy, stored)
        except BaseException:
            self._free += [copy for copy, _ in copies.values()]
            raise
        self._acquired.append((state, copies))
        _replace(state, {id(stored): copy for copy, stored in copies.values()})

    def borrow(self, vector: Tensor) -> Tensor:
        """Return a copy of `vector` on the device. It may be read until `release` is called."""
        if not self.apart:
            return vector
        self._borrowed.append(self._fetched(vector))
        return self._borrowed[-1]

    def release(self) -> None:
        """Start to copy the acquired vectors back to the store, and make their states refer to the
        stored vectors again."""
        for state, copies in self._acquired:
            stored = {}
            for tensor in _tensors(state):
                key = id(tensor)
                if key in copies:
                    _, stored[key] = copies[key]
                    self._copier.copy(stored[key], tensor)
                else:  # a new tensor from a hook
                    stored[key] = self.allocate(tensor)
            _replace(state, stored)
            self._free += [copy for copy, _ in copies.values()]
        self._free += self._borrowed
        self._acquired = []
        self._borrowed = []

    def synchronize(self) -> None:
        """Wait for the end of all copies, and drop fetched vectors that no visit has used."""
        if self.apart:
            self._copier.synchronize()
            self._free += [copy for _, copy, _ in self._ahead.values()]
            self._ahead = {}

    def _fetched(self, vector: Tensor) -> Tensor:
        """Return the copy of `vector` on the device, fetched already or now."""
        self.fetch([vector])
        _, copy, wait = self._ahead.pop(id(vector))
        wait()
        return copy

    def _room(self, vector: Tensor) -> Tensor:
        """Return memory for `vector` on the device, reused if possible."""
        for k, free in enumerate(self._free):
            if free.shape == vector.shape and free.dtype == vector.dtype:
                return self._free.pop(k)
        return torch.empty_like(vector, device=self.device)

    def _file(self, vector: Tensor) -> Tensor:
        """Copy `vector` to a memory-mapped file without a name."""
        with writing(self.folder):
            handle, name = tempfile.mkstemp(dir=self.folder, prefix=".vector-")
            try:
                # reserve the space: a write to a full disk would kill the process
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(handle, 0, max(1, vector.nbytes))
                stored = torch.from_file(name, shared=True, size=vector.numel(), dtype=vector.dtype)
            finally:
                os.close(handle)
                os.unlink(name)
        return stored.copy_(vector)


_Copies = dict[int, tuple[Tensor, Tensor]]
"""By id of a copy on the device: the copy, and the vector in the store."""


def _tensors(state: ClientState) -> list[Tensor]:
    """Return the distinct vectors of a state: the last upload may be the client's own tensor."""
    tensors = [*state.vectors.values(), *state.received.values()]
    return list({id(tensor): tensor for tensor in tensors}.values())


def _replace(state: ClientState, new: dict[int, Tensor]) -> None:
    """Replace the tensors of a state by those in `new`, which has them by the old ones' ids."""
    state.vectors = {slot: new[id(v)] for slot, v in state.vectors.items()}
    state.received = {slot: new[id(v)] for slot, v in state.received.items()}
