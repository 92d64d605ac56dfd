"""Turns a command line's flags, `--key value`, into layers of settings. Values stay text until the
configuration is resolved."""

from __future__ import annotations

from argparse import Action
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from fl_lightning.configuration.config import check
from fl_lightning.configuration.files import NAMED, Layer, nested, read_config
from fl_lightning.configuration.keys import COMPONENTS, hint, run_keys, unknown
from fl_lightning.foundation.errors import NO_VALUE, BadInput


@dataclass(frozen=True)
class Flag:
    """A flag of the command line: a key, and the text of its value."""

    key: str
    text: str
    words: tuple[str, ...]
    """The flag's words on the command line: `("--key", "value")` or `("--key=value",)`."""

    def layers(self) -> list[Layer]:
        """Return the flag's settings; for `--config` those of the file and its bases."""
        if self.key == "config":
            return read_config(self.text)
        return [nested(self.key, self._value())]

    def _value(self) -> Any:
        """Return the value: read as YAML if the key is a component or its `init_args`, weights or
        adapters, which may be lists, mappings or null; else the text."""
        head, *rest = self.key.split(".")
        # `method` and `model` themselves, or one of `callbacks`: a deeper key is an argument
        names_component = len(rest) <= (1 if head in NAMED else 0)
        is_init_args = rest[-1:] == ["init_args"]
        is_yaml = names_component or is_init_args or self.key in ("model.weights", "model.adapters")
        if head not in COMPONENTS or not is_yaml:
            return self.text
        try:
            return yaml.safe_load(self.text)
        except yaml.YAMLError:
            raise BadInput(self.key, self.text, "it is not valid YAML: quote text") from None


def read_flags(
    argv: Sequence[str],
    actions: dict[str, Action] | None = None,
    command: str = "fit",
    takes_words: bool = False,
) -> tuple[list[str], list[Flag]]:
    """Split a command line into positional words and flags.

    Args:
        argv: the command line behind the name of the command.
        actions: the command's keys with their parser actions; None: the keys of a run.
        command: its name, for errors.
        takes_words: whether the command takes positional words.

    Raises:
        BadInput: a key does not exist, a value is missing, or a word is not expected.
    """
    actions = run_keys() if actions is None else actions
    words: list[str] = []
    flags: list[Flag] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            is_word = takes_words and word != "--"
            check("command line", word, is_word, "expected --key value")
            words.append(word)
            continue
        key, equals, text = word[2:].partition("=")
        if key not in actions and key.replace("-", "_") in actions:
            key = key.replace("-", "_")
        head = key.partition(".")[0]
        if key not in actions and not (head in COMPONENTS and head in actions):
            value = text if equals or not rest else rest[0]
            raise unknown(key, value, list(actions), command)
        if equals:
            flags.append(Flag(key, text, (f"--{key}={text}",)))
        elif _takes_next(key, rest, actions, takes_words):
            flags.append(Flag(key, rest[0], (f"--{key}", rest.pop(0))))
        else:
            is_switch = key in actions and hint(actions[key]) is bool
            check(key, ..., is_switch, NO_VALUE)
            flags.append(Flag(key, "true", (f"--{key}",)))
    return words, flags


def _takes_next(
    key: str,
    rest: list[str],
    actions: dict[str, Action],
    takes_words: bool,
) -> bool:
    """Return whether the next word is the value of `key`.

    If the command takes positional words, a switch takes only `true` and `false` as its value.
    `sbatch` also takes a word such as `--exclusive`, unless it is a flag of the command.
    """
    if not rest:
        return False
    word = rest[0]
    if word.startswith("--"):
        return key == "sbatch" and word[2:].partition("=")[0].replace("-", "_") not in actions
    is_switch = key in actions and hint(actions[key]) is bool
    return not is_switch or not takes_words or word.lower() in ("true", "false")


def layers_of_flags(flags: Sequence[Flag]) -> tuple[list[Layer], str | None]:
    """Return the layers of settings that a run's flags give, and the name of the first config file
    among them (None: there is none). The run is named after that file."""
    first = next((flag.text for flag in flags if flag.key == "config"), None)
    return [layer for flag in flags for layer in flag.layers()], first
