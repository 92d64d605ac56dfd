"""Exchanges data between ranks on one machine by shared memory: each rank writes its part once, and
the others read it there.

The memory is files without a name (memfd, Linux), which other processes open by /proc. A process
that dies leaves nothing behind, and the limit of /dev/shm, 64 MB in many containers, does not
apply.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import secrets
import sys
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

_HEAD = 4096
"""Bytes before the data: a token, and for each rank the start of its share; enough for 510
ranks."""
_TOKEN = 16


TENSORS = (0, 1)
OBJECTS = (2, 3)
"""Indices of a rank's files. The files of a pair are written alternately."""


class SharedMemory:
    """The shared memory of all ranks; `open_shared_memory` makes it.

    Each rank owns four files, two for tensors and two for objects, and writes the two alternately.
    In an exchange every rank writes its file, waits at a barrier (`meet`) and reads the others'
    files. A rank has finished reading when it begins its next exchange, so after that one's barrier
    the former file can be written again.

    Args:
        rank: this process's rank.
        token: random bytes at the start of this process's files, by which they are recognised.
        meet: a barrier: returns when all ranks have called it.
    """

    def __init__(
        self,
        rank: int,
        token: bytes,
        meet: Callable[[], None],
    ) -> None:
        self.rank = rank
        self.meet = meet
        self.files: list[list[int]] = []
        """Descriptors of the open files by rank."""
        self.own_files: list[int] = []
        self._mapped: dict[int, Tensor] = {}
        self._next = {TENSORS: 0, OBJECTS: 0}
        """By pair: which of its files, 0 or 1, is written next."""
        if sys.platform == "linux" and hasattr(os, "memfd_create"):
            with contextlib.suppress(OSError):  # a sandbox may forbid it
                self.own_files = [os.memfd_create(f"fl_lightning_{rank}_{k}") for k in range(4)]
            for file in self.own_files:
                os.write(file, token.ljust(_HEAD, b"\0"))
        weakref.finalize(self, _close, self.own_files, self.files)

    def open(self, ranks: Sequence[tuple[int, Sequence[int], bytes]]) -> bool:
        """Open all ranks' files; return whether all have the right token.

        If a rank is on another machine or in another container, its process id and descriptors
        belong to other files here, or to none.

        Args:
            ranks: process id, file descriptors and token of each rank.
        """
        try:
            for rank, (process, numbers, _) in enumerate(ranks):
                files = self.own_files
                if rank != self.rank and numbers:
                    names = [f"/proc/{process}/fd/{number}" for number in numbers]
                    files = [os.open(name, os.O_RDWR) for name in names]
                self.files.append(files)
            for files, (_, _, token) in zip(self.files, ranks, strict=True):
                for file in files:
                    if self._map(file)[:_TOKEN].numpy().tobytes() != token:
                        return False
        except (OSError, ValueError):
            return False
        return all(len(files) == 4 for files in self.files)

    def gather_objects(self, item: Any) -> list[Any]:
        """See `RankGroup.gather_objects`."""
        content = torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8)
        ranks = range(len(self.files))
        place = self._write_and_meet([content], [0] * len(ranks), OBJECTS)
        return [pickle.loads(self._read(rank, place).numpy().data) for rank in ranks]

    def all_to_all(
        self, parts: list[Tensor], send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> list[Tensor]:
        """See `RankGroup.all_to_all`."""
        begins = [0, *accumulate(send_sizes)][:-1]
        return self._exchanged(parts, begins, receive_sizes)

    def gather_parts(
        self,
        parts: list[Tensor],
        sizes: Sequence[int],
    ) -> list[Tensor]:
        """See `RankGroup.gather_parts`."""
        return self._exchanged(parts, [0] * len(sizes), sizes)

    def _exchanged(
        self, parts: list[Tensor], begins: Sequence[int], sizes: Sequence[int]
    ) -> list[Tensor]:
        """Write `parts`, in which the share of each rank begins at the number `begins`; return the
        shares of this rank in all ranks' parts, which have `sizes` numbers."""
        place = self._write_and_meet(parts, begins, TENSORS)
        dtype = parts[0].dtype
        return [
            self._read(rank, place, size * dtype.itemsize).view(dtype)
            for rank, size in enumerate(sizes)
        ]

    def _write_and_meet(
        self, parts: list[Tensor], begins: Sequence[int], places: tuple[int, int]
    ) -> int:
        """Write `parts` to this rank's next file of the pair `places`, and wait at the barrier;
        return the file's index. `begins`: the number in `parts` at which each rank's share
        begins."""
        turn = self._next[places]
        self._next[places] = 1 - turn
        file = self.own_files[places[turn]]
        dtype = parts[0].dtype
        size = _HEAD + sum(part.numel() for part in parts) * dtype.itemsize
        if os.fstat(file).st_size < size:
            os.ftruncate(file, size)
        memory = self._map(file)
        starts = memory[_TOKEN : _TOKEN + 8 * len(begins)].view(torch.int64)
        starts.copy_(torch.tensor(begins) * dtype.itemsize)
        torch.cat(parts, out=memory[_HEAD:size].view(dtype))
        self.meet()
        return places[turn]

    def _read(self, rank: int, place: int, size: int | None = None) -> Tensor:
        """Return this rank's share in a file of `rank` as uint8, without a copy: `size` bytes, or
        all to the file's end."""
        memory = self._map(self.files[rank][place])
        start = memory[_TOKEN + 8 * self.rank :][:8].view(torch.int64)
        share = memory[_HEAD + int(start) :]
        return share if size is None else share[:size]

    def _map(self, file: int) -> Tensor:
        """Return the file's content as a uint8 tensor in shared memory; map it again if it has
        grown."""
        size = os.fstat(file).st_size
        if file not in self._mapped or len(self._mapped[file]) < size:
            self._mapped[file] = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
        return self._mapped[file]


def _close(own_files: list[int], files: list[list[int]]) -> None:
    for file in {*own_files, *chain(*files)}:
        os.close(file)


def open_shared_memory(
    rank: int, size: int, gather: Callable[[Any], list[Any]], meet: Callable[[], None]
) -> SharedMemory | None:
    """Return the memory that all ranks share; None, on every rank, if a rank cannot open it.

    Args:
        rank: this process's rank.
        size: number of ranks.
        gather: returns the items of all ranks, in rank order.
        meet: a barrier: returns when all ranks have called it.
    """
    token = secrets.token_bytes(_TOKEN)
    memory = SharedMemory(rank, token, meet)
    ranks = gather((os.getpid(), memory.own_files, token))
    fits = _TOKEN + 8 * size <= _HEAD and all(numbers for _, numbers, _ in ranks)
    return memory if all(gather(fits and memory.open(ranks))) else None
