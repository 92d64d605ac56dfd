"""The command line `fl-train`: makes a command of each function in `fl_lightning.api`. Torch is not
imported before the input has been checked."""

from __future__ import annotations

import argparse
import inspect
import logging
import os
import re
import sys
import types
from argparse import Action
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args, get_origin

from fl_lightning import __version__
from fl_lightning.foundation import command
from fl_lightning.foundation.errors import BadInput, check
from fl_lightning.foundation.exits import guarded

EXAMPLES = {
    "fit": "fit --config kapc_digits.yaml",
    "test": "test --run runs/kapc_digits-001",
    "export": "export --run runs/kapc_digits-001 --client 3 --out m.safetensors",
    "report": "report runs/kapc_digits-001",
    "join": "join --run runs/fedora --data new.npz --out model.safetensors",
    "compare": "compare studies/digits --baseline local",
    "dashboard": "dashboard --project fl_lightning --json view.json",
    "plan": "plan --config kapc_resnet18",
    "submit": "submit --config kapc_resnet18 --gpus-per-node 4 --time 04:00:00",
    "deploy": "deploy --config kapc_digits.yaml --out app",
    "study": "study study.yaml --out studies/digits --workers 2",
    "reproduce": "reproduce kapc/table1 --data.root path/to/data",
    "tune": "tune study.yaml --out tuned/digits --trials 20",
    "archive": "archive studies/digits",
    "worth": "worth --config hospitals.yaml --out worth",
    "audit": "audit studies/digits --out audit",
    "status": "status runs",
    "list": "list methods",
    "check-data": "check-data --config hospitals.yaml --out columns.html",
    "check-method": "check-method my_methods.Mine",
}
COMMANDS = tuple(EXAMPLES)

# keys of where the data are; keys of a study's base; all keys but those that start a run
_PLACE = r"data\.(root|download|resident)"
_BASE = r".+\..+|method|model|callbacks|loggers"
_RUN = r"(?!(resume|accept_changed_code|name|out)$).*"
RUN_KEYS = {
    "fit": ".*",
    "submit": ".*",
    **dict.fromkeys(("plan", "check-data", "check-method", "deploy"), _RUN),
    **dict.fromkeys(("study", "reproduce", "tune"), _BASE),
    "worth": f"config|{_BASE}",
    "test": rf"{_PLACE}|(evaluation|fabric)\..*",
    "archive": _PLACE,
}
"""Patterns of the run's keys that each command takes besides its own."""

SWITCHES = {
    "fit": ("print_config", "Print the resolved config, as a file for --config, and stop."),
    "plan": ("json", "Print bytes and seconds as JSON."),
}
"""Keys that only the command line has, by command."""

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
"""Our commands by other tools' names, and by `relative`, an earlier command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (None: the process's); return the exit code of `guarded`."""
    # we report a lost rank ourselves
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    words = list(sys.argv[1:] if argv is None else argv)
    command.words[:] = words
    try:
        return guarded(lambda: _dispatch(words))
    finally:
        command.words.clear()


def _dispatch(argv: list[str]) -> None:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help(), end="")
        return
    if argv[0] == "--version":
        print(f"fl-train {__version__}")
        return
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # no message on its font cache
    name, *rest = argv
    if name not in COMMANDS:
        from fl_lightning.configuration.catalogue import did_you_mean

        near = f" (did you mean {MEANT[name]}?)" if name in MEANT else did_you_mean(name, COMMANDS)
        raise BadInput("command", name, f"no such command{near}; commands: {', '.join(COMMANDS)}")
    wants_help = bool({"-h", "--help"} & set(rest))
    if name == "list":
        list_names(rest, wants_help)
    elif wants_help:
        print(help_of(name), end="")
        if name == "fit":
            print(_method_help(rest), end="")
    else:
        _run(name, rest)


def _function(name: str) -> Callable[..., Any]:
    from fl_lightning import api

    function: Callable[..., Any] = getattr(api, name.replace("-", "_"))
    return function


def _help() -> str:
    lines = [
        "usage: fl-train COMMAND [--key value ...]\n",
        "Personalised federated learning on PyTorch Lightning.\n",
    ]
    for name in COMMANDS:
        function = list_names if name == "list" else _function(name)
        summary = str(function.__doc__).partition("\n")[0].rstrip(".")
        lines.append(f"  {name:13s} {summary}")
    return "\n".join([*lines, "\nAll keys of a command, and an example: fl-train COMMAND --help\n"])


# ---------------------------------------------------------------- one command


def command_keys(name: str) -> tuple[dict[str, Action], dict[str, Action]]:
    """Return the keys of a command with their parser actions: its own, and the keys of a run that
    it also takes."""
    from fl_lightning.configuration.keys import keys, run_keys
    from fl_lightning.configuration.signatures import parser_of

    parser = parser_of(_function(name))
    if name in SWITCHES:
        switch, text = SWITCHES[name]
        parser.add_argument(f"--{switch}", type=bool, default=False, help=text)
    of_command = keys(parser)
    pattern = RUN_KEYS.get(name, "(?!)")  # matches no key
    of_run = {key: action for key, action in run_keys().items() if re.fullmatch(pattern, key)}
    return of_command, {key: action for key, action in of_run.items() if key not in of_command}


def _words_of(name: str) -> tuple[str, str]:
    """Return the parameter that a command takes as positional words, and its usage; both are empty
    if there is none."""
    from fl_lightning.configuration.signatures import WORDS

    parameters = inspect.signature(_function(name)).parameters
    return next(((p, WORDS[p]) for p in parameters if p in WORDS), ("", ""))


def _run(name: str, argv: list[str]) -> None:
    """Call a command's function with the arguments on the command line, and print its result."""
    from fl_lightning.configuration.flags import read_flags

    function = _function(name)
    parameter, usage = _words_of(name)
    of_command, of_run = command_keys(name)
    words, flags = read_flags(argv, of_command | of_run, name, bool(parameter))
    arguments: dict[str, Any] = {}
    if parameter:
        many = "..." in usage
        is_optional = usage.startswith("[")
        fits = bool(words) if many else len(words) <= 1 and bool(words or is_optional)
        once = "" if many else " once"
        requirement = f"it must be given{once}: fl-train {name} {usage}"
        check(name, " ".join(words) or None, fits, requirement)
        arguments |= {parameter: words if many else words[0]} if words else {}
    switch, _ = SWITCHES.get(name, ("", ""))  # no flag has the key ""
    is_on = any(flag.key == switch and flag.text.lower() == "true" for flag in flags)
    config: list[str] = []
    for flag in flags:
        if flag.key not in of_command:
            config += flag.words
        elif flag.key != switch:
            arguments[flag.key] = flag.text
    if "config" in inspect.signature(function).parameters:
        arguments["config"] = config
    if name == "fit":
        _fit(config, is_on)
    else:
        _print(name, function(**arguments), is_on)


def _fit(flags: list[str], prints_config: bool) -> None:
    """Train like `api.fit`, but without making a `Run`: ranks above 0 may have no tables yet."""
    from fl_lightning import api
    from fl_lightning.lab.fitting import train
    from fl_lightning.lab.given import layers_of

    if prints_config:
        print(api.resolved(flags), end="")
    else:
        train(*layers_of(flags, {}))


def _print(name: str, value: Any, as_json: bool) -> None:
    """Print a command's result."""
    if name == "test":
        from fl_lightning.foundation import launcher

        if launcher.rank() > 0:
            return
        for key, score in value.items():
            if not isinstance(score, list):  # lists have a number for each client
                print(f"{key:28s} {score}")
    elif name in ("status", "check-data"):
        from rich.console import Console

        if name == "check-data":
            from fl_lightning.lab.datacheck.checking import shown

            value = shown(value)
        console = Console()
        # lines to a file or a pipe may be long
        (console if console.is_terminal else Console(width=200)).print(value)
    elif as_json:
        print(value.as_json())
    elif name != "tune":  # which has printed its table
        text = str(value or "")
        if text:
            print(text)


# ---------------------------------------------------------------- help


def help_of(name: str) -> str:
    """Return the help of a command: each key with its values, bounds and default.

    jsonargparse's own help would show Python's types and keys that we do not accept
    (`--data.columns+`).
    """
    from fl_lightning.configuration.config import GROUPS
    from fl_lightning.configuration.keys import hint
    from fl_lightning.configuration.ranges import bounded_fields

    function = _function(name)
    bounds = {key: p.annotation for key, p in inspect.signature(function).parameters.items()}
    for group, kind in GROUPS.items():
        bounds |= {f"{group}.{key}": annotation for key, annotation in bounded_fields(kind).items()}
    usage = " ".join(filter(None, ["fl-train", name, _words_of(name)[1], "[--key value ...]"]))
    documented = inspect.getdoc(function) or ""
    paragraphs = documented.partition("\n\nArgs:")[0].split("\n\n")
    about = " ".join(" ".join(paragraphs[:2]).split())
    example = f"example: fl-train {EXAMPLES[name]}"
    page = argparse.ArgumentParser(f"fl-train {name}", usage, about, example, add_help=False)
    sections: dict[str, Any] = {"": page.add_argument_group("options")}
    of_command, of_run = command_keys(name)
    for key, action in sorted((of_command | of_run).items(), key=_order):
        group = key.rpartition(".")[0]
        if group not in sections:
            title = str(GROUPS[group.partition(".")[0]].__doc__).partition("\n\n")[0]
            sections[group] = page.add_argument_group(title)
        text = _described(action, bounds.get(key))
        metavar = str(action.metavar or _stands_for(hint(action)))
        sections[group].add_argument(f"--{key}", metavar=metavar, help=text.replace("%", "%%"))
    return page.format_help()


def _order(pair: tuple[str, Action]) -> tuple[bool, bool]:
    """Return a sort key: a command's own keys come first; in `data`, keys that only some sources or
    partitions use (inherited by `DataConfig`) come last."""
    from fl_lightning.configuration.config import DataConfig

    group, dot, key = pair[0].rpartition(".")
    return bool(dot), group == "data" and key not in DataConfig.__annotations__


def _described(action: Action, annotation: Any) -> str:
    """Return a key's help with its bounds and its default, unless the help states a default."""
    from fl_lightning.configuration.explain import as_text, bounded
    from fl_lightning.configuration.ranges import Range, limit

    values, _ = limit(annotation)
    facts = ["required"] if action.required else []
    if not action.required and isinstance(values, Range):
        facts.append(bounded(values))
    says_default = "(default:" in str(action.help)
    is_own_without = action.default is None and "." not in action.dest
    if not (action.required or says_default or is_own_without):
        facts.append(f"default: {as_text(action.default)}")
    return f"{action.help} ({'; '.join(facts)})" if facts else str(action.help)


def _stands_for(kind: Any) -> str:
    """Return a type's placeholder in help: `N`, `X`, `TEXT`, or the list of its values."""
    plain = {int: "N", float: "X", bool: "{true,false}", str: "TEXT"}
    if get_origin(kind) is Literal:
        return f"{{{','.join(get_args(kind))}}}"
    if get_origin(kind) is list:
        return f"[{_stands_for(get_args(kind)[0])},...]"
    parts = [_stands_for(part) for part in get_args(kind) if part is not types.NoneType]
    return "|".join(parts) or plain.get(kind, "VALUE")


def _method_help(argv: list[str]) -> str:
    """Return the description and the arguments of the method that a command line names."""
    from fl_lightning.configuration.flags import layers_of_flags, read_flags
    from fl_lightning.configuration.merging import Settings

    words = [word for word in argv if word not in ("-h", "--help")]
    if not {word.partition("=")[0] for word in words} & {"--method", "--config"}:
        return "\nArguments of a method: fl-train fit --method NAME --help\n"
    layers, _ = layers_of_flags(read_flags(words)[1])
    return "\n" + _of_method(Settings.merged(layers).method.class_path)


def _of_method(class_path: str) -> str:
    from fl_lightning.configuration import catalogue
    from fl_lightning.configuration.explain import explained
    from fl_lightning.configuration.resolve import method_entry

    entry = catalogue.lookup("methods", class_path)
    return explained(entry.name if entry else class_path, method_entry(class_path))


def list_names(argv: list[str], wants_help: bool) -> None:
    """Print the names that a configuration can choose from, or the arguments of methods.

    Args:
        argv: kinds of names, such as `models` (none: all kinds); or `methods` and names of methods,
            whose arguments are printed.
        wants_help: whether to print the usage instead.
    """
    from fl_lightning.configuration import catalogue

    if wants_help:
        print(f"usage: fl-train list [{'|'.join(catalogue.KINDS)}]")
        print("       fl-train list methods NAME [NAME ...]")
        return
    # `list methods NAME ...`; `list methods models` lists two kinds
    if argv[1:] and argv[0] == "methods" and not set(argv) <= set(catalogue.KINDS):
        classes = [catalogue.find("methods", "list", word).class_path for word in argv[1:]]
        print("\n".join(map(_of_method, classes)), end="")
        return
    for word in argv:
        near = catalogue.did_you_mean(word, catalogue.KINDS)
        missing = f"no such kind{near}; kinds: {', '.join(catalogue.KINDS)}"
        check("list", word, word in catalogue.KINDS, missing)
    for kind in argv or catalogue.KINDS:
        if len(argv) != 1:
            print(kind)
        indent = "" if len(argv) == 1 else "  "
        width = max(map(len, catalogue.table(kind)))
        for family, entries in catalogue.families(kind).items():
            if family:
                print(f"{indent}{family}:")
            for entry in entries:
                print(f"{indent}{'  ' if family else ''}{entry.name:{width}s}  {entry.summary}")
