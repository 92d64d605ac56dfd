"""Memory that the processes of one machine share: what they exchange is written once, and read
where it lies.

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
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

_HEAD = 4096
"""Bytes before the data: a token, and where each rank's share begins; so at most 510 ranks share
memory."""
_TOKEN = 16


class SharedMemory:
    """Files of each rank, two for tensors and two for other things, written in turns. See `joined`.

    All ranks `meet` between writing and reading, and none reads what came in one exchange after its
    next one has begun. So a file is written to only after all have read it: its writer has passed
    another barrier in between.

    Args:
        rank: of this process.
        token: that this process's files begin with.
        meet: returns when all ranks have called it.
    """

    def __init__(self, rank: int, token: bytes, meet: Callable[[], None]) -> None:
        self.rank, self.meet = rank, meet
        self.files: list[list[int]] = []
        """File numbers by rank, open in this process."""
        self.own: list[int] = []
        self._mapped: dict[int, Tensor] = {}
        self._last = [1, 3]
        """The files of tensors and of other things that were written last."""
        if sys.platform == "linux" and hasattr(os, "memfd_create"):
            with contextlib.suppress(OSError):  # a sandbox may forbid it
                self.own = [os.memfd_create(f"fl_lightning_{rank}_{k}") for k in range(4)]
            for file in self.own:
                os.write(file, token.ljust(_HEAD, b"\0"))
        weakref.finalize(self, _close, self.own, self.files)

    def open(self, ranks: Sequence[tuple[int, Sequence[int], bytes]]) -> bool:
        """Open all ranks' files, by process, file numbers there, and token; whether these are the
        files.

        They are not where those numbers mean something else: on another machine, in another
        container.
        """
        try:
            for rank, (process, numbers, _) in enumerate(ranks):
                away = (
                    []
                    if rank == self.rank
                    else [f"/proc/{process}/fd/{number}" for number in numbers]
                )
                self.files.append([os.open(name, os.O_RDWR) for name in away] or self.own)
            tokens = [
                [self._map(file)[:_TOKEN].numpy().tobytes() for file in files]
                for files in self.files
            ]
        except (OSError, ValueError):
            return False
        return tokens == [[token] * 4 for *_, token in ranks]

    def gather_objects(self, item: Any) -> list[Any]:
        """As `Group.gather_objects`."""
        content = torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8)
        turn = self._write([content], [0] * len(self.files), 1)
        return [
            pickle.loads(self._read(rank, turn).numpy().data) for rank in range(len(self.files))
        ]

    def all_to_all(
        self, parts: list[Tensor], send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> list[Tensor]:
        """As `Group.all_to_all`."""
        turn, item = self._write(parts, [0, *accumulate(send_sizes)][:-1]), parts[0].itemsize
        return [
            self._read(r, turn, n * item).view(parts[0].dtype) for r, n in enumerate(receive_sizes)
        ]

    def gather_parts(self, parts: list[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """As `Group.gather_parts`."""
        turn, item = self._write(parts, [0] * len(sizes)), parts[0].itemsize
        return [self._read(r, turn, n * item).view(parts[0].dtype) for r, n in enumerate(sizes)]

    def _write(self, parts: list[Tensor], begins: Sequence[int], what: int = 0) -> int:
        """Write `parts`, in which each rank's share begins at its one of `begins`, and wait for the
        others.

        What the files are for is `what` (`_last`). Returns which of them was written.
        """
        kind, numbers = parts[0].dtype, sum(part.numel() for part in parts)
        turn = self._last[what] = self._last[what] ^ 1
        file, size = self.own[turn], _HEAD + numbers * kind.itemsize
        if os.fstat(file).st_size < size:
            os.ftruncate(file, size)
        memory = self._map(file)
        memory[_TOKEN : _TOKEN + 8 * len(begins)].view(torch.int64).copy_(
            torch.tensor(begins) * kind.itemsize
        )
        torch.cat(parts, out=memory[_HEAD:size].view(kind))
        self.meet()
        return turn

    def _read(self, rank: int, turn: int, size: int | None = None) -> Tensor:
        """What `rank` has written for this one, uint8: `size` bytes, or to the file's end; where it
        lies."""
        memory = self._map(self.files[rank][turn])
        begin = _HEAD + int(memory[_TOKEN + 8 * self.rank :][:8].view(torch.int64))
        return memory[begin:] if size is None else memory[begin : begin + size]

    def _map(self, file: int) -> Tensor:
        """The whole file, mapped anew where it has grown."""
        size = os.fstat(file).st_size
        if file not in self._mapped or len(self._mapped[file]) < size:
            self._mapped[file] = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
        return self._mapped[file]


def _close(own: list[int], files: list[list[int]]) -> None:
    for file in {*own, *(file for theirs in files for file in theirs)}:
        os.close(file)


def joined(
    rank: int, size: int, gather: Callable[[Any], list[Any]], meet: Callable[[], None]
) -> SharedMemory | None:
    """The memory that all ranks share; None, on every rank, where they cannot.

    Args:
        rank: of this process.
        size: number of ranks.
        gather: all ranks' items, in rank order.
        meet: returns when all ranks have called it.
    """
    token = secrets.token_bytes(_TOKEN)
    memory = SharedMemory(rank, token, meet)
    ranks = gather((os.getpid(), memory.own, token))
    fits = _TOKEN + 8 * size <= _HEAD and all(numbers for _, numbers, _ in ranks)
    return memory if all(gather(fits and memory.open(ranks))) else None
