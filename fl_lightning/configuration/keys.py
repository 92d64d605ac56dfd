"""The keys of a run with their types, and the check that turns a wrong key or value into one
line."""

from __future__ import annotations

import types
from argparse import Action, ArgumentError
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from typing import Any, get_args

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from fl_lightning.configuration import catalogue
from fl_lightning.configuration.config import GROUPS, Start, check
from fl_lightning.configuration.ranges import words
from fl_lightning.foundation.errors import BadInput

COMPONENTS = {
    "method": "Method by name or import path (default: crosskapc); its arguments: --method.ARG "
    "VALUE.",
    "model": "Model by name or import path (default: mlp); its arguments: --model.ARG VALUE. In "
    "YAML also a list of {name, count}, for several architectures.",
    "callbacks": "Callbacks by name, separated by commas (default: heatmaps,progress,checkpoint); "
    "arguments: --callbacks.NAME.ARG VALUE; remove one: --callbacks.NAME null.",
    "loggers": "Loggers by name, separated by commas (default: none); arguments and removal as for "
    "callbacks.",
}

set_parsing_settings(docstring_parse_attribute_docstrings=True)


@cache
def run_parser() -> ArgumentParser:
    """The keys of a run: its config files, its start, its components, and each group."""
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    text = "YAML file, or the name of a shipped config (repeatable)."
    parser.add_argument("--config", metavar="FILE", help=text)
    for key, text in COMPONENTS.items():
        parser.add_argument(f"--{key}", metavar="NAME", help=text)
    parser.add_class_arguments(Start, as_group=False)
    for name, group in GROUPS.items():
        parser.add_class_arguments(group, name)
    return parser


def run_values(settings: dict[str, Any]) -> Namespace:
    """Returns the plain `settings` of a run (nested) checked and converted, with every default.

    Raises:
        BadInput: as `typed`.
    """
    values = deepcopy(_run_defaults())
    values.update(typed(run_parser(), settings, defaults=False))
    return values


@cache
def _run_defaults() -> Namespace:
    """The default of every plain key; jsonargparse takes 20 ms to check them with each config."""
    return run_parser().get_defaults()


@cache
def run_keys() -> dict[str, Action]:
    """Every key of a run, with its parser action."""
    return keys(run_parser())


def keys(parser: ArgumentParser) -> dict[str, Action]:
    """Every key that takes a value, with its parser action."""
    actions = {action.dest: action for action in parser._actions if action.dest != "help"}
    groups = {dest for dest in actions if any(key.startswith(f"{dest}.") for key in actions)}
    return {dest: action for dest, action in actions.items() if dest not in groups}


def hint(action: Action) -> Any:
    """The type that an action takes."""
    return getattr(action, "_typehint", action.type)


def typed(
    parser: ArgumentParser,
    values: dict[str, Any],
    prefix: str = "",
    defaults: bool = True,
) -> Namespace:
    """Returns `values` (nested) checked and converted, with every default unless `defaults` is
    False.

    Raises:
        BadInput: a key that does not exist or is missing, or a value of another type; it names the
            key, after `prefix`.
    """
    actions = keys(parser)
    values_of_keys = dict(leaves(values, actions, prefix))
    for key, action in actions.items():
        present = key in values_of_keys or not action.required
        check(prefix + key, None, present, "it must be given")
    for key, value in values_of_keys.items():
        kind = hint(actions[key])
        nullable = kind in (None, Any, types.NoneType) or types.NoneType in get_args(kind)
        check(prefix + key, value, value is not None or nullable, f"it must be {words(kind)}")
    try:
        return parser.parse_object(values, defaults=defaults)
    except ArgumentError as error:
        # jsonargparse names the key in quotes
        key = str(error).partition('key "')[2].partition('"')[0]
        if key not in actions:
            raise BadInput(prefix.rstrip("."), values, str(error)) from None
        requirement = f"it must be {words(hint(actions[key]))}"
        raise BadInput(prefix + key, values_of_keys.get(key), requirement) from None


def leaves(
    values: dict[str, Any], actions: dict[str, Action], prefix: str = "", path: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yields dotted keys and values of a nested dict; `BadInput` for a key that does not exist."""
    for name, value in values.items():
        key = f"{path}{name}"
        inside = [action_key for action_key in actions if action_key.startswith(f"{key}.")]
        if key in actions:
            yield key, value
        elif not inside:
            raise unknown(prefix + key, value, [prefix + action_key for action_key in actions])
        elif isinstance(value, dict):
            yield from leaves(value, actions, prefix, f"{key}.")
        else:
            raise BadInput(prefix + key, value, f"it is a group of keys: {', '.join(inside)}")


def unknown(
    key: str,
    value: Any,
    names: list[str],
    command: str = "fit",
) -> BadInput:
    """Returns the error for a key that does not exist; few keys are listed, many are left to
    `--help`."""
    listed = (", ".join(names) or "none") if len(names) <= 20 else f"see fl-train {command} --help"
    return BadInput(key, value, f"no such key{catalogue.did_you_mean(key, names)}; keys: {listed}")
