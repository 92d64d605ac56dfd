"""The command line `fl-train`. Nothing here or below imports torch before the input has been
checked."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from multiprocessing.process import BaseProcess

from fl_lightning import __version__
from fl_lightning.foundation import signals
from fl_lightning.foundation.errors import BadInput, RunFailed, redact
from fl_lightning.foundation.extras import needs
from fl_lightning.foundation.log import outlive_readers, print_anything

HELP = """usage: fl-train COMMAND [--key value ...]

Personalised federated learning on PyTorch Lightning.

  fit           run federated training       fl-train fit --config kapc_digits.yaml
  test          evaluate a finished run      fl-train test --run runs/kapc_digits-001
  export        write one client's model     fl-train export --run runs/kapc_digits-001 --client 3 --out m.safetensors
  report        write an HTML report         fl-train report runs/kapc_digits-001
  join          give a new client a model    fl-train join --run runs/fedora --data new.npz --out model.safetensors
  compare       compare methods over seeds   fl-train compare studies/digits --baseline local
  dashboard     build a W&B workspace        fl-train dashboard --project fl_lightning --json view.json
  plan          rehearse a round             fl-train plan --config kapc_resnet18
  submit        submit a run to SLURM        fl-train submit --config kapc_resnet18 --gpus-per-node 4 --time 04:00:00
  deploy        write a Flower app           fl-train deploy --config kapc_digits.yaml --out app
  study         run a grid of experiments    fl-train study study.yaml --out studies/digits --workers 2
  reproduce     rerun a paper's table        fl-train reproduce kapc/table1 --data.root path/to/data
  tune          tune methods, then compare   fl-train tune study.yaml --out tuned/digits --trials 20
  archive       pack a study into one file   fl-train archive studies/digits
  worth         estimate each silo's gain    fl-train worth --config hospitals.yaml --out worth
  audit         measure privacy leakage      fl-train audit studies/digits --out audit
  status        show progress of runs        fl-train status runs
  list          list names to choose from    fl-train list methods
  check-method  test your own method         fl-train check-method my_methods.Mine

All keys of a command: fl-train COMMAND --help
"""  # noqa: E501

COMMANDS = (
    "fit",
    "test",
    "export",
    "report",
    "join",
    "compare",
    "dashboard",
    "plan",
    "submit",
    "deploy",
    "study",
    "reproduce",
    "tune",
    "archive",
    "worth",
    "audit",
    "status",
    "list",
    "check-method",
)
"""Their keys: `cli.schema`. Each is a function of its name in a module of its name, but for those
in `ELSEWHERE`."""
ELSEWHERE = dict.fromkeys(("fit", "test", "export", "report", "join", "list"), "commands")
ELSEWHERE |= {"plan": "planning", "check-method": "checking"}

MEANT = {
    **dict.fromkeys(("train", "run", "start"), "fit"),
    **dict.fromkeys(("evaluate", "eval", "score"), "test"),
    **dict.fromkeys(("sweep", "grid", "experiment"), "study"),
    **dict.fromkeys(("search", "optimize"), "tune"),
    "resume": "fit --resume",
    "sbatch": "submit",
    "methods": "list methods",
    "ls": "list",
    "relative": "compare",
}
"""Other tools' names of our commands, and one that is gone."""

BUG = 70  # neither a named failure (1) nor bad input (2)
PATIENCE = 10.0  # seconds that interrupted ranks have to close what is open


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 (the run failed), 2 (bad input), 130 and 143
    (interrupted)."""
    # we report a lost rank ourselves, in one line
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return guarded(lambda: _dispatch(list(sys.argv[1:] if argv is None else argv)))


def guarded(work: Callable[[], None]) -> int:
    """Do `work`; the exit code of `main`, with one line on what is wrong."""
    print_anything()
    outlive_readers()
    try:
        with signals.unwinding():
            work()
            sys.stdout.flush()
    except (BadInput, RunFailed) as error:
        print("fl-train: error:", redact(" ".join(str(error).split())), file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        if not (line := needs(error.name)):
            print(redact(traceback.format_exc()), end="", file=sys.stderr)
            return BUG
        print("fl-train: error:", line, file=sys.stderr)
        return BadInput.exit_code
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return _stopped(signal.SIGINT)
    except signals.Terminated:
        return _stopped(signal.SIGTERM)
    except Exception:
        if (number := signals.came()) is not None:  # what a library has made of it
            return _stopped(number)
        print(redact(traceback.format_exc()), end="", file=sys.stderr)
        return BUG
    return 0


def _stopped(number: int) -> int:
    """End the ranks; returns the exit code of a process that signal `number` has stopped."""
    stop_ranks()
    return 128 + number


def _dispatch(argv: list[str]) -> None:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return
    if argv[0] == "--version":
        print(f"fl-train {__version__}")
        return
    from fl_lightning.cli import parser, schema
    from fl_lightning.configuration.catalogue import did_you_mean

    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # no message on its font cache
    name, *rest = argv
    if name not in COMMANDS:
        near = f" (did you mean {MEANT[name]}?)" if name in MEANT else did_you_mean(name, COMMANDS)
        raise BadInput("command", name, f"no such command{near}; commands: {', '.join(COMMANDS)}")
    if name in schema.COMMANDS and {"-h", "--help"} & set(rest):
        print(parser.help_of(name), end="")
        if name == "fit":
            print(importlib.import_module("fl_lightning.cli.commands").fit_help(rest), end="")
        return
    module = importlib.import_module(f"fl_lightning.cli.{ELSEWHERE.get(name, name)}")
    getattr(module, "list_names" if name == "list" else name.replace("-", "_"))(rest)


def stop_ranks(but: Collection[BaseProcess] = ()) -> None:
    """End the processes that the run has started, `but` those of others; at exit they would be
    waited for."""
    ranks = [child for child in multiprocessing.active_children() if child not in but]
    deadline = time.monotonic() + PATIENCE
    for rank in ranks:
        rank.terminate()
    for rank in ranks:
        rank.join(max(0.0, deadline - time.monotonic()))
        rank.kill()
