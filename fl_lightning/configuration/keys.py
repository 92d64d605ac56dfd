"""The keys of a run with their types, and the check that refuses a wrong key or value in one
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
    """Return the parser of a run's keys: config files, `Start`, components and all groups."""
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
    """Return a run's plain `settings` (nested) checked and converted, with all defaults.

    Raises:
        BadInput: as for `typed`.
    """
    values = deepcopy(_run_defaults())
    values.update(typed(run_parser(), settings, defaults=False))
    return values


@cache
def _run_defaults() -> Namespace:
    """Return the defaults of a run's plain keys; cached, since jsonargparse takes 20 ms to check
    them."""
    return run_parser().get_defaults()


@cache
def run_keys() -> dict[str, Action]:
    """Return the parser actions of a run by key."""
    return keys(run_parser())


def keys(parser: ArgumentParser) -> dict[str, Action]:
    """Return a parser's actions by key, without keys of groups, which take no value."""
    actions = {action.dest: action for action in parser._actions if action.dest != "help"}
    groups = {dest for dest in actions if any(key.startswith(f"{dest}.") for key in actions)}
    return {dest: action for dest, action in actions.items() if dest not in groups}


def hint(action: Action) -> Any:
    """Return the type, as in an annotation, of the value that a parser's option takes."""
    return getattr(action, "_typehint", action.type)


def typed(
    parser: ArgumentParser,
    values: dict[str, Any],
    prefix: str = "",
    defaults: bool = True,
) -> Namespace:
    """Return nested `values` checked and converted to the parser's types.

    Args:
        parser: parser with the keys and their types.
        values: values by key, as nested dicts.
        prefix: text before the keys in errors.
        defaults: whether to add the defaults of keys that are not in `values`.

    Raises:
        BadInput: a key does not exist, a required key is missing, or a value has another type.
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
    """Yield dotted keys and values of a nested dict.

    Args:
        values: the nested dict.
        actions: the keys that exist, with their parser actions.
        prefix: text before the keys in errors.
        path: the key of `values` itself with a dot; empty at the top.

    Raises:
        BadInput: a key does not exist, or a group of keys has a value.
    """
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
            problem = f"it is a group of keys: set one of {', '.join(inside)}"
            raise BadInput(prefix + key, value, problem)


def unknown(
    key: str,
    value: Any,
    names: list[str],
    command: str = "fit",
) -> BadInput:
    """Return the error for a key that does not exist. It lists up to 20 `names` of keys, or refers
    to the help of `command`."""
    listed = (", ".join(names) or "none") if len(names) <= 20 else f"see fl-train {command} --help"
    return BadInput(key, value, f"no such key{catalogue.did_you_mean(key, names)}; keys: {listed}")
