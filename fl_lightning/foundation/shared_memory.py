"""Memory that the processes of one machine share: each writes its part once, and the others read it
in place.

Files in memory without a name (memfd, Linux): a process that dies leaves nothing behind, and the
limit of /dev/shm, 64 MB in many containers, does not count. The others open them by process and
file number (/proc).
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
"""Bytes before the data: a token, and where each rank's share begins; so at most 510 ranks share
memory."""
_TOKEN = 16


TENSORS = (0, 1)
OBJECTS = (2, 3)
"""Places of a rank's files, each pair written in turns."""


class SharedMemory:
    """Files of each rank, two for tensors and two for objects, written in turns (see `joined`).

    All ranks `meet` between writing and reading, and none reads the parts of one exchange after its
    next one has begun. So a file is written to only after all have read it: its writer has passed
    another barrier in between.

    Args:
        rank: of this process.
        token: the first bytes of this process's files.
        meet: returns when all ranks have called it.
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
        """File numbers by rank, open in this process."""
        self.own_files: list[int] = []
        self._mapped: dict[int, Tensor] = {}
        self._next = {TENSORS: 0, OBJECTS: 0}
        """The file of each pair that is written next."""
        if sys.platform == "linux" and hasattr(os, "memfd_create"):
            with contextlib.suppress(OSError):  # a sandbox may forbid it
                self.own_files = [os.memfd_create(f"fl_lightning_{rank}_{k}") for k in range(4)]
            for file in self.own_files:
                os.write(file, token.ljust(_HEAD, b"\0"))
        weakref.finalize(self, _close, self.own_files, self.files)

    def open(self, ranks: Sequence[tuple[int, Sequence[int], bytes]]) -> bool:
        """Open all ranks' files; return whether they are the right ones, by their tokens.

        On another machine or in another container the same numbers are other files, or none.

        Args:
            ranks: process, file numbers there, and token of each.
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
        """As `Group.gather_objects`."""
        content = torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8)
        ranks = range(len(self.files))
        place = self._write_and_meet([content], [0] * len(ranks), OBJECTS)
        return [pickle.loads(self._read(rank, place).numpy().data) for rank in ranks]

    def all_to_all(
        self, parts: list[Tensor], send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> list[Tensor]:
        """As `Group.all_to_all`."""
        begins = [0, *accumulate(send_sizes)][:-1]
        return self._exchanged(parts, begins, receive_sizes)

    def gather_parts(
        self,
        parts: list[Tensor],
        sizes: Sequence[int],
    ) -> list[Tensor]:
        """As `Group.gather_parts`."""
        return self._exchanged(parts, [0] * len(sizes), sizes)

    def _exchanged(
        self, parts: list[Tensor], begins: Sequence[int], sizes: Sequence[int]
    ) -> list[Tensor]:
        """Write `parts`; return from each rank its `sizes` numbers for this one."""
        place = self._write_and_meet(parts, begins, TENSORS)
        dtype = parts[0].dtype
        return [
            self._read(rank, place, size * dtype.itemsize).view(dtype)
            for rank, size in enumerate(sizes)
        ]

    def _write_and_meet(
        self, parts: list[Tensor], begins: Sequence[int], places: tuple[int, int]
    ) -> int:
        """Write `parts` to this rank's next file of `places`, and wait for the others; return the
        file's place. Each rank's share begins at its number of `begins`."""
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
        """Return the share of `rank`'s file for this rank, uint8, in place: `size` bytes, or to the
        file's end."""
        memory = self._map(self.files[rank][place])
        start = memory[_TOKEN + 8 * self.rank :][:8].view(torch.int64)
        share = memory[_HEAD + int(start) :]
        return share if size is None else share[:size]

    def _map(self, file: int) -> Tensor:
        """Return the whole file, mapped again where it has grown."""
        size = os.fstat(file).st_size
        if file not in self._mapped or len(self._mapped[file]) < size:
            self._mapped[file] = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
        return self._mapped[file]


def _close(own_files: list[int], files: list[list[int]]) -> None:
    for file in {*own_files, *chain(*files)}:
        os.close(file)


def joined(
    rank: int, size: int, gather: Callable[[Any], list[Any]], meet: Callable[[], None]
) -> SharedMemory | None:
    """Open the memory that all ranks share; return None, on every rank, where they cannot.

    Args:
        rank: of this process.
        size: number of ranks.
        gather: returns all ranks' items, in rank order.
        meet: returns when all ranks have called it.
    """
    token = secrets.token_bytes(_TOKEN)
    memory = SharedMemory(rank, token, meet)
    ranks = gather((os.getpid(), memory.own_files, token))
    fits = _TOKEN + 8 * size <= _HEAD and all(numbers for _, numbers, _ in ranks)
    return memory if all(gather(fits and memory.open(ranks))) else None
