"""What processes of one machine exchange through memory that they share; here threads, with files
of their own."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from fl_lightning.foundation.shared_memory import open_shared_memory


def on_ranks(size, job, told=None):
    """`job(rank, memory)` on every pretended rank; `told`: what a rank says of its files, in place
    of what is so."""
    gate, table = threading.Barrier(size), {}

    def run(rank):
        def gather(item):
            table[rank] = told[rank] if told and rank in told and isinstance(item, tuple) else item
            gate.wait(20)
            items = [table[r] for r in range(size)]
            gate.wait(20)
            return items

        return job(rank, open_shared_memory(rank, size, gather, lambda: gate.wait(20) and None))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def test_what_came_stays_while_others_write_their_next():
    """A rank may be at its next exchange before another has read what came in the last."""
    written = threading.Event()

    def job(rank, memory):
        [_, came] = memory.gather_parts([torch.full((9,), 1.0 + rank)], [9, 9])
        if rank == 1:
            memory.meet = written.set  # it has written, and waits
            memory.gather_parts([torch.full((9,), 7.0)], [9, 9])
        return written.wait(20) and torch.equal(came, torch.full((9,), 2.0))

    assert on_ranks(2, job) == [True, True]


def test_ranks_that_see_other_files_by_those_numbers_share_nothing(tmp_path):
    """As on several machines, or in containers: the process may be there, the number, or a file;
    not the token."""
    (tmp_path / "other").write_bytes(bytes(1 << 14))
    with (tmp_path / "other").open("r+b") as other:
        for numbers in ([other.fileno()] * 4, [10**6] * 4, []):
            told = {1: (os.getpid(), numbers, b"a token of 16 by")}
            assert on_ranks(2, lambda _, memory: memory is None, told) == [True, True]
    assert on_ranks(2, lambda _, memory: memory is not None) == [True, True]


def test_files_are_closed_with_what_held_them():
    before = len(os.listdir("/proc/self/fd"))
    on_ranks(2, lambda _, memory: None)
    assert len(os.listdir("/proc/self/fd")) == before
