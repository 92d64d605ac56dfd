"""The parser of each command (jsonargparse), and the check that turns a wrong key or value into one
line."""

from __future__ import annotations

import argparse
import re
import types
from argparse import Action, ArgumentError
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, get_args, get_origin

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from fl_lightning.cli.schema import COMMANDS, REQUIRED
from fl_lightning.configuration import catalogue
from fl_lightning.configuration.config import GROUPS, DataConfig, check
from fl_lightning.configuration.describe import words
from fl_lightning.configuration.explain import as_text, bounded
from fl_lightning.configuration.ranges import Range, allowed, bare, limit
from fl_lightning.foundation.errors import BadInput

COMPONENTS = {
    "method": "Method by name or import path (default: selfkapc); its arguments: --method.ARG "
    "VALUE.",
    "model": "Model by name or import path (default: mlp); its arguments: --model.ARG VALUE. In "
    "YAML "
    "also a list of "
    "{name, count}, for several architectures.",
    "callbacks": "Callbacks by name, separated by commas (default: heatmaps,progress,checkpoint); "
    "arguments: "
    "--callbacks.NAME.ARG VALUE; remove one: --callbacks.NAME null.",
    "loggers": "Loggers by name, separated by commas (default: none); arguments and removal as for "
    "callbacks.",
}

PLACE = {"root", "download", "resident"}
"""Keys of `data` that say where the data are."""
_OF_A_START = {"print_config", "resume", "accept_changed_code"}
"""Keys that say how a run starts, or that none does."""

set_parsing_settings(docstring_parse_attribute_docstrings=True)


@cache
def parser_of(name: str) -> ArgumentParser:
    """The keys of a command, with those that it may change of a run's config."""
    command = COMMANDS[name]
    usage = " ".join(filter(None, ["fl-train", name, command.words, "[--key value ...]"]))
    parser = ArgumentParser(
        f"fl-train {name}",
        usage=usage,
        description=command.does,
        exit_on_error=False,
        allow_abbrev=False,
    )
    if name == "fit":
        parser.add_argument(
            "--config",
            metavar="FILE",
            help="YAML file, or the name of a shipped config (repeatable).",
        )
        for key, text in COMPONENTS.items():
            parser.add_argument(f"--{key}", metavar="NAME", help=text)
    for key, (kind, default, text) in command.keys.items():
        more: dict[str, Any] = {"required": True} if default is REQUIRED else {"default": default}
        if match := re.fullmatch(r"([A-Z]+(?:\.\w+)?): (.*)", text):
            more["metavar"], text = match[1], match[2][0].upper() + match[2][1:]
        parser.add_argument(f"--{key}", type=bare(kind), help=text, **more)
    if name in ("test", "archive"):
        parser.add_class_arguments(
            DataConfig, "data", skip=set(DataConfig.__dataclass_fields__.keys() - PLACE)
        )
    for group in {"fit": tuple(GROUPS), "test": ("evaluation", "fabric")}.get(name, ()):
        parser.add_class_arguments(GROUPS[group], group)
    return parser


def help_of(name: str) -> str:
    """The help of a command: each key with its values, bounds and default.

    Not jsonargparse's own, which writes types as Python does and lists keys that we do not take
    (`--data.columns+`).
    """
    parser, known = parser_of(name), keys(parser_of(name))
    bounds = {key: kind for key, (kind, *_) in COMMANDS[name].keys.items()}
    bounds |= {
        f"{group}.{key}": kind for group in GROUPS for key, kind in allowed(GROUPS[group]).items()
    }
    page = argparse.ArgumentParser(parser.prog, parser.usage, parser.description, add_help=False)
    for group in parser._action_groups:
        section = page.add_argument_group(group.title)
        for action in sorted(group._group_actions, key=_inherited):
            if action.dest in known:
                values, _ = limit(bounds.get(action.dest))
                facts = (
                    ["required"]
                    if action.required
                    else [bounded(values)]
                    if isinstance(values, Range)
                    else []
                )
                known_default = "(default:" in str(action.help) or (
                    action.default is None and "." not in action.dest
                )
                facts += (
                    []
                    if action.required or known_default
                    else [f"default: {as_text(action.default)}"]
                )
                text = f"{action.help} ({'; '.join(facts)})" if facts else str(action.help)
                stands_for = str(action.metavar or _stands_for(hint(action)))
                section.add_argument(
                    f"--{action.dest}", metavar=stands_for, help=text.replace("%", "%%")
                )
    return page.format_help()


def _inherited(action: Action) -> bool:
    """Whether it is a key of `data` for one source or way of splitting alone: these come behind the
    others."""
    group, _, key = action.dest.partition(".")
    return group == "data" and key not in DataConfig.__annotations__


def _stands_for(kind: Any) -> str:
    """What help writes in place of a value: `N`, `X`, `TEXT`, or the values that there are."""
    plain = {int: "N", float: "X", bool: "{true,false}", str: "TEXT"}
    if get_origin(kind) is Literal:
        return f"{{{','.join(get_args(kind))}}}"
    if get_origin(kind) is list:
        return f"[{_stands_for(get_args(kind)[0])},...]"
    parts = [_stands_for(part) for part in get_args(kind) if part is not types.NoneType]
    return "|".join(parts) or plain.get(kind, "VALUE")


@cache
def fit_keys() -> dict[str, Action]:
    """Every key of a run, with its parser action."""
    return keys(parser_of("fit"))


def passed_on(command: str) -> dict[str, Action]:
    """The keys of `fit` that a command accepts beside its own: all of them, or those that a study's
    base may set."""
    if command == "submit":
        return fit_keys()
    # which neither go on with a run nor stop before one
    if command in ("plan", "check-method", "deploy"):
        return {key: action for key, action in fit_keys().items() if key not in _OF_A_START}
    if command in ("study", "reproduce", "tune", "worth"):
        more = {"config"} if command == "worth" else set()
        return {
            key: action
            for key, action in fit_keys().items()
            if "." in key or key in {*COMPONENTS, *more}
        }
    return {}


def keys(parser: ArgumentParser) -> dict[str, Action]:
    """Every key that takes a value, with its parser action."""
    actions = {action.dest: action for action in parser._actions if action.dest != "help"}
    groups = {dest for dest in actions if any(other.startswith(f"{dest}.") for other in actions)}
    return {dest: action for dest, action in actions.items() if dest not in groups}


def hint(action: Action) -> Any:
    """The type that an action takes."""
    return getattr(action, "_typehint", action.type)


def typed(parser: ArgumentParser, values: dict[str, Any], prefix: str = "") -> Namespace:
    """`values` (nested) checked and converted, with every default; `BadInput` names the key, after
    `prefix`."""
    known = keys(parser)
    given = dict(leaves(values, known, prefix))
    for key, action in known.items():
        check(prefix + key, None, not action.required or key in given, "it must be given")
    for key, value in given.items():
        kind = hint(known[key])
        if (
            value is None
            and kind not in (None, Any, types.NoneType)
            and types.NoneType not in get_args(kind)
        ):
            raise BadInput(prefix + key, value, f"it must be {words(kind)}")
    try:
        return parser.parse_object(values)
    except ArgumentError as error:
        match = re.search(r'key "([^"]+)"', str(error))
        key = match[1] if match else ""
        if key not in known:
            raise BadInput(prefix.rstrip("."), values, str(error)) from None
        raise BadInput(
            prefix + key, given.get(key), f"it must be {words(hint(known[key]))}"
        ) from None


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
