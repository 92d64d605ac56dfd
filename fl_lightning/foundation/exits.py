"""How a process of ours ends: exit codes, and one line on what is wrong."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable

from fl_lightning.foundation import signals
from fl_lightning.foundation.errors import BadInput, RunFailed, redact
from fl_lightning.foundation.extras import install_hint
from fl_lightning.foundation.log import outlive_readers, print_anything

BUG = 70  # neither a named failure (1) nor bad input (2)


def guarded(work: Callable[[], None]) -> int:
    """Does `work`; returns 0, 1 (the run failed), 2 (bad input), 70 (a bug, with its traceback),
    130 or 143 (interrupted). A closed output pipe counts as 0."""
    print_anything()
    outlive_readers()
    try:
        with signals.unwinding():
            work()
            sys.stdout.flush()
    except (BadInput, RunFailed) as error:
        print(
            "fl-train: error:",
            redact(" ".join(str(error).split())),
            file=sys.stderr,
        )
        return error.exit_code
    except ModuleNotFoundError as error:
        hint = install_hint(error.name)
        if not hint:
            return _bug()
        print("fl-train: error:", hint, file=sys.stderr)
        return BadInput.exit_code
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return exit_after(signal.SIGINT)
    except signals.Terminated:
        return exit_after(signal.SIGTERM)
    except Exception:
        number = signals.came()
        # a library may have made another error of a signal
        return _bug() if number is None else exit_after(number)
    return 0


def _bug() -> int:
    print(redact(traceback.format_exc()), end="", file=sys.stderr)
    return BUG


def exit_after(number: int) -> int:
    """Ends the ranks; returns 128 + `number`, the signal."""
    signals.stop_ranks()
    return 128 + number
