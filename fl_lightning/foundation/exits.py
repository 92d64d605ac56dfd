"""Turns errors and signals into exit codes and one line for the user."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable

from fl_lightning.foundation import signals
from fl_lightning.foundation.errors import BadInput, RunFailed, redact
from fl_lightning.foundation.extras import install_hint
from fl_lightning.foundation.log import escape_unprintable, ignore_closed_pipe

BUG = 70  # neither a named failure (1) nor bad input (2)


def guarded(work: Callable[[], None]) -> int:
    """Call `work` and print its error; return the exit code: 0, 1 (the run failed), 2 (bad input),
    70 (a bug; its traceback is printed), 130 or 143 (interrupted). A closed output pipe counts as
    0."""
    escape_unprintable()
    ignore_closed_pipe()
    try:
        with signals.unwinding():
            work()
            sys.stdout.flush()
    except (BadInput, RunFailed) as error:
        print("fl-train: error:", redact(" ".join(str(error).split())), file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        hint = install_hint(error.name)
        if not hint:
            return _bug()
        print("fl-train: error:", hint, file=sys.stderr)
        return BadInput.exit_code
    except BrokenPipeError:  # as in `fl-train ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return exit_after(signal.SIGINT)
    except signals.Terminated:
        return exit_after(signal.SIGTERM)
    except Exception:
        number = signals.received_signal()
        # a library may have turned a signal's exception into another error
        return _bug() if number is None else exit_after(number)
    return 0


def _bug() -> int:
    print(redact(traceback.format_exc()), end="", file=sys.stderr)
    return BUG


def exit_after(number: int) -> int:
    """End the ranks; return the exit code for the signal `number`: 128 + `number`."""
    signals.stop_ranks()
    return 128 + number
