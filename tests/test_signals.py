"""Blocks that answer signals in their own way, and leave all as it was."""

from __future__ import annotations

import signal
import threading

import pytest

from fl_lightning.signals import answered, undisturbed

BOTH = (signal.SIGINT, signal.SIGTERM)


def test_a_block_answers_and_all_is_as_it_was() -> None:
    before = [signal.getsignal(number) for number in BOTH]
    came: list[int] = []
    with answered(lambda number, frame: came.append(number), *BOTH):
        for number in BOTH:
            signal.raise_signal(number)
    assert came == list(BOTH)
    assert [signal.getsignal(number) for number in BOTH] == before


def test_an_undisturbed_block_is_carried_out_before_ctrl_c_is_heard() -> None:
    done = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job of a shell's background ignores it
    try:
        with pytest.raises(KeyboardInterrupt), undisturbed():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("all of it")
        assert done
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_beside_the_main_thread_nothing_changes() -> None:
    seen: list[object] = []

    def look() -> None:
        with undisturbed():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]
