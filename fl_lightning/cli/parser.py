"""The parser of each command (jsonargparse), and the check that turns a wrong key or value into one line."""

from __future__ import annotations

import re
import types
from argparse import SUPPRESS, Action, ArgumentError
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from fl_lightning import catalogue
from fl_lightning.cli.schema import COMMANDS, REQUIRED
from fl_lightning.config import GROUPS, DataConfig, check
from fl_lightning.configuration.describe import words
from fl_lightning.errors import BadInput
from fl_lightning.ranges import bare

COMPONENTS = {
    "method": "Method by name or import path (default: selfkapc); its arguments: --method.ARG VALUE.",
    "model": "Model by name or import path; its arguments: --model.ARG VALUE. In YAML also a list of {name, count}.",
    "callbacks": "Callbacks by name, separated by commas; arguments: --callbacks.NAME.ARG VALUE; remove one: "
    "--callbacks.NAME null.",
    "loggers": "Loggers by name, separated by commas; arguments and null as for callbacks.",
}

PLACE = {"root", "download", "resident"}
"""Keys of `data` that say where the data are."""

set_parsing_settings(docstring_parse_attribute_docstrings=True)


@cache
def parser_of(name: str) -> ArgumentParser:
    """The keys of a command, with those that it may change of a run's config."""
    command = COMMANDS[name]
    usage = " ".join(filter(None, ["fl-train", name, command.words, "[--key value ...]"]))
    parser = ArgumentParser(
        f"fl-train {name}", usage=usage, description=command.does, exit_on_error=False, allow_abbrev=False
    )
    if name == "fit":
        parser.add_argument("--config", metavar="FILE", help="YAML file, or the name of a shipped config (repeatable).")
        for key, text in COMPONENTS.items():
            parser.add_argument(f"--{key}", metavar="NAME", help=text)
    for key, (kind, default, text) in command.keys.items():
        more: dict[str, Any] = {"required": True} if default is REQUIRED else {"default": default}
        if match := re.fullmatch(r"([A-Z]+(?:\.\w+)?): (.*)", text):
            more["metavar"], text = match[1], match[2][0].upper() + match[2][1:]
        parser.add_argument(f"--{key}", type=bare(kind), help=text, **more)
    if name in ("test", "archive"):
        parser.add_class_arguments(DataConfig, "data", skip=set(DataConfig.__dataclass_fields__.keys() - PLACE))
    for group in {"fit": tuple(GROUPS), "test": ("evaluation", "fabric")}.get(name, ()):
        parser.add_class_arguments(GROUPS[group], group)
    for action in parser._actions:
        if action.dest in GROUPS and action.dest not in command.keys:
            action.help = SUPPRESS  # jsonargparse's own way of reading a group from a file
    return parser


def fit_parser() -> ArgumentParser:
    """All keys of a run."""
    return parser_of("fit")


@cache
def fit_keys() -> dict[str, Action]:
    """Every key of a run, with its parser action."""
    return keys(fit_parser())


def passed_on(command: str) -> dict[str, Action]:
    """The keys of `fit` that a command accepts beside its own: all of them, or those that a study's base may set."""
    if command in ("submit", "plan", "check-method", "deploy"):
        return fit_keys()
    if command in ("study", "reproduce", "tune", "worth"):
        more = {"config"} if command == "worth" else set()
        return {key: action for key, action in fit_keys().items() if "." in key or key in {*COMPONENTS, *more}}
    return {}


def keys(parser: ArgumentParser) -> dict[str, Action]:
    """Every key that takes a value, with its parser action."""
    names = [action.dest for action in parser._actions]
    groups = {name for name in GROUPS if any(other.startswith(f"{name}.") for other in names)}
    return {action.dest: action for action in parser._actions if action.dest not in groups | {"help"}}


def hint(action: Action) -> Any:
    """The type that an action takes."""
    return getattr(action, "_typehint", action.type)


def typed(parser: ArgumentParser, values: dict[str, Any], prefix: str = "") -> Namespace:
    """`values` (nested) checked and converted, with every default; `BadInput` names the key, after `prefix`."""
    known = keys(parser)
    given = dict(leaves(values, known, prefix))
    for key, action in known.items():
        check(prefix + key, None, not action.required or key in given, "it must be given")
    for key, value in given.items():
        kind = hint(known[key])
        if value is None and kind not in (None, Any, types.NoneType) and types.NoneType not in get_args(kind):
            raise BadInput(prefix + key, value, f"it must be {words(kind)}")
    try:
        return parser.parse_object(values)
    except ArgumentError as error:
        match = re.search(r'key "([^"]+)"', str(error))
        key = match[1] if match else ""
        if key not in known:
            raise BadInput(prefix.rstrip("."), values, str(error)) from None
        raise BadInput(prefix + key, given.get(key), f"it must be {words(hint(known[key]))}") from None


def leaves(
    values: dict[str, Any], known: dict[str, Action], prefix: str = "", path: str = ""
) -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of a nested dict; `BadInput` for a key that does not exist."""
    for name, value in values.items():
        key = f"{path}{name}"
        inside = [other for other in known if other.startswith(f"{key}.")]
        if key in known:
            yield key, value
        elif inside and isinstance(value, dict):
            yield from leaves(value, known, prefix, f"{key}.")
        elif inside:
            raise BadInput(prefix + key, value, f"it is a group of keys: {', '.join(inside)}")
        else:
            raise unknown(prefix + key, value, [prefix + other for other in known])


def unknown(key: str, value: Any, known: list[str], command: str = "fit") -> BadInput:
    """The error for a key that does not exist; few keys are listed, many are left to `--help`."""
    listed = (", ".join(known) or "none") if len(known) <= 20 else f"see fl-train {command} --help"
    return BadInput(key, value, f"no such key{catalogue.did_you_mean(key, known)}; keys: {listed}")
