"""Runs a function that a script or notebook calls in a new process, which has no threads and so may
fork workers."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from fl_lightning.foundation import command, signals
from fl_lightning.foundation.errors import BadInput, RunFailed, check
from fl_lightning.foundation.log import escape_unprintable


def apart(work: Callable[..., Any], *args: Any, names_main: bool = False) -> Any:
    """Return `work(*args)`, called in a new process; print here what that process prints.

    `fl-train` itself has no threads: there `work` is called in this process.

    Args:
        work: a function of a module. It, its arguments and its result must be picklable.
        args: its arguments.
        names_main: whether `args` name classes that the script itself defines. The new process then
            imports the script, whose calls must be below ``if __name__ == "__main__":``.

    Raises:
        BadInput: `work` has raised it, or the classes are defined in a notebook.
        RunFailed: `work` has raised it, or the process died.
    """
    if command.words:
        return work(*args)
    script = getattr(sys.modules["__main__"], "__file__", None)
    requirement = "another process cannot import a class of a notebook: move it to a .py file"
    check("definition", ..., not names_main or script is not None, requirement)
    escape_unprintable()
    context = multiprocessing.get_context("spawn")
    lines, line_sender = context.Pipe(duplex=False)
    answers, answer_sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(line_sender, answer_sender, work, args))
    with contextlib.nullcontext() if names_main else _hidden_script():
        process.start()
    line_sender.close()
    answer_sender.close()
    try:
        with os.fdopen(
            os.dup(lines.fileno()),
            encoding="utf-8",
            errors="replace",
        ) as printed:
            for line in printed:
                print(line, end="", flush=True)
        answer = answers.recv()
    except EOFError:
        process.join()
        answer = RunFailed(
            f"the process that ran this call died (exit code {process.exitcode}; -9: killed, often "
            f"for lack of memory)"
        )
    except BaseException:
        process.terminate()
        process.join()
        raise
    process.join()
    if isinstance(answer, Exception):
        raise answer
    return answer[0]


@contextlib.contextmanager
def _hidden_script() -> Iterator[None]:
    """Prevent a process that is started within the block from importing the script."""
    main = sys.modules["__main__"]
    names = ("__file__", "__spec__")
    hidden: dict[str, Any] = {name: vars(main).pop(name) for name in names if name in vars(main)}
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update(hidden)


def _work(
    lines: Connection, answers: Connection, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Call `work` in the new process; send its prints to `lines`, and its result or error to
    `answers`."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(lines.fileno(), number)
        stream = os.fdopen(number, "w", buffering=1, encoding="utf-8", closefd=False)
        setattr(sys, name, stream)
    lines.close()
    try:
        with signals.unwinding():
            answers.send((work(*args),))
    except (BadInput, RunFailed) as error:
        answers.send(error)
    finally:
        sys.stdout.flush()
