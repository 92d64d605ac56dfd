"""Work of a script or notebook in a process of its own, which may fork workers since it runs no
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
from fl_lightning.foundation.log import print_anything


def apart(work: Callable[..., Any], *args: Any, names_main: bool = False) -> Any:
    """Returns `work(*args)` of a new process, whose lines are printed here as they come; of
    `fl-train` itself, which has no threads, in this process.

    Args:
        work: a function of a module; it and what it takes and returns travel by pickle.
        args: what it takes.
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
    allowed = "a class of a notebook cannot be imported by another process: move it to a file"
    check("definition", "__main__", not names_main or script is not None, allowed)
    print_anything()
    context = multiprocessing.get_context("spawn")
    lines, their_lines = context.Pipe(duplex=False)
    answers, their_answers = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(their_lines, their_answers, work, args))
    with contextlib.nullcontext() if names_main else _hidden_script():
        process.start()
    their_lines.close()
    their_answers.close()
    try:
        with os.fdopen(os.dup(lines.fileno()), encoding="utf-8", errors="replace") as printed:
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
    """Keeps a process that starts within from importing the script."""
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
    """Does the work in the new process, and sends what it returns or raises."""
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
