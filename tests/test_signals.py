"""Blocks that answer signals in their own way, and leave all as it was."""

import contextlib
import signal
import subprocess
import sys
import threading

import pytest

from fl_lightning.foundation import signals
from fl_lightning.foundation.signals import answered, undisturbed

BOTH = (signal.SIGINT, signal.SIGTERM)


def test_a_block_answers_and_all_is_as_it_was():
    before = [signal.getsignal(number) for number in BOTH]
    came = []
    with answered(lambda number, frame: came.append(number), *BOTH):
        for number in BOTH:
            signal.raise_signal(number)
    assert came == list(BOTH)
    assert [signal.getsignal(number) for number in BOTH] == before


def test_an_undisturbed_block_is_carried_out_before_ctrl_c_is_heard():
    done = []
    # a job of a shell's background ignores it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), undisturbed():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("all of it")
        assert done
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_beside_the_main_thread_nothing_changes():
    seen = []

    def look():
        with undisturbed():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


@pytest.mark.parametrize(
    "number, error", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, signals.Terminated)]
)
def test_what_a_library_swallows_is_raised_again(number, error):
    """As torch and its like do around optional imports."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with signals.unwinding():
            signals.raise_swallowed()  # nothing has come
            with contextlib.suppress(BaseException):
                signal.raise_signal(number)
            with pytest.raises(error):
                signals.raise_swallowed()
        assert signals.received_signal() == number
        signals.raise_swallowed()  # outside, it is others' business
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", BOTH)
def test_a_process_that_imports_is_left_at_once_with_its_line(number):
    script = f"""
import signal
from fl_lightning.foundation import signals

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
with signals.unwinding(), signals.exit_at_signal(lambda: "stopped: nothing is lost"):
    try:
        signal.raise_signal({number})
    except BaseException:
        pass
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr, done.stdout) == (
        128 + number,
        "stopped: nothing is lost\n",
        "",
    )
