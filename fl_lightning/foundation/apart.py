"""Runs work of a script or notebook in a process of its own, which may fork workers since it has no
threads."""

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
    """Return `work(*args)`, run in a new process, whose lines are printed here as they come;
    `fl-train` itself, which has no threads, runs it in this process.

    Args:
        work: a function of a module; it and what it takes and returns travel by pickle.
        args: its arguments.
        names_main: whether `args` name classes of the script itself. The process imports the
            script then, whose own lines must stand below ``if __name__ == "__main__":``.

    Raises:
        BadInput: `work` has raised it, or the classes are a notebook's, which no process can
            import.
        RunFailed: `work` has raised it, or the process died.
    """
    if command.words:
        return work(*args)
    script = getattr(sys.modules["__main__"], "__file__", None)
    requirement = "a class of a notebook cannot be imported by another process: move it to a file"
    check("definition", "__main__", not names_main or script is not None, requirement)
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
        answer = RunFailed(f"its process died (exit code {process.exitcode})")
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
    """Keep a process that starts within the block from importing the script."""
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
    """Do the work in the new process; send its result or its error."""
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
