"""Reads configs and studies, which are YAML files, into layers of settings; refuses a wrong file in
one line."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.configuration import catalogue
from fl_lightning.configuration.config import GROUPS, check
from fl_lightning.configuration.keys import COMPONENTS, leaves, run_keys
from fl_lightning.foundation.errors import BadInput

Layer = dict[str, Any]
"""Settings as nested dicts, from one config file or one flag. Later layers override earlier
ones."""

NAMED = ("callbacks", "loggers")
"""The sections that map names to components."""
REMOVED_KEYS = {
    "fabric.channels_last": False,
    "callbacks.wireless.channel": "fitted",
    "loggers.wandb.local": None,
}
"""Keys that earlier versions wrote to a run's config.yaml and that no longer exist, each with the
value that has the effect of today's code."""
INT, FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"


class _Loader(yaml.SafeLoader):
    """Reads YAML more strictly than PyYAML: refuses a key that is given twice in a mapping, and
    numbers such as 010 and 1:30, which YAML reads as 8 and 90.

    A section `callbacks:` or `loggers:` without content sets nothing and is left out, whereas a
    written `null` removes all callbacks or loggers.
    """

    def construct_mapping(
        self,
        node: yaml.MappingNode,
        deep: bool = False,
    ) -> dict[Any, Any]:
        read_keys: set[str] = set()
        node.value = [
            (key, value)
            for key, value in node.value
            if key.value not in NAMED or not _is_empty(value)
        ]
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in read_keys:
                    problem = f"the key {key.value!r} is given twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                read_keys.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> Any:
        """Return a number; refuse one that is octal or sexagesimal to YAML."""
        read = self.construct_yaml_int if node.tag == INT else self.construct_yaml_float
        text = node.value
        value = read(node)
        is_octal = re.fullmatch(r"[-+]?0[0-7_]+", text) and int(text, 8) != int(text)
        if is_octal or ":" in text:
            problem = (
                f"YAML reads {text} as {value} (octal, or base 60): write that, or quote it as text"
            )
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return value


for _tag in (INT, FLOAT):
    _Loader.add_constructor(_tag, _Loader.construct_number)


def _is_empty(value: yaml.Node) -> bool:
    """Return whether a key has no value, not even a written `null`."""
    return (
        value.tag == "tag:yaml.org,2002:null"
        and value.value == ""
        and value.start_mark.index == value.end_mark.index
    )


def read(
    kind: str,
    key: str,
    name: str,
    folder: Path,
) -> tuple[Path, Any]:
    """Find a YAML file and read it; return its path and content.

    Args:
        kind: `configs` or `studies`.
        key: the key that errors name.
        name: a file's path below `folder`; else the name of a config or study that ships with the
            package.
        folder: see `name`.

    Raises:
        BadInput: there is no such file, it cannot be read, is not YAML, or gives a key twice in a
            mapping.
    """
    try:
        file = folder / name if (folder / name).is_file() else catalogue.shipped(kind, name)
        text = "" if file is None else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", error)
        raise BadInput(key, name, f"it cannot be read: {reason}") from None
    if file is None:
        names = list(catalogue.table(kind))
        near = catalogue.did_you_mean(name.removesuffix(".yaml"), names)
        listed = ", ".join(names) if kind == "configs" else f"fl-train list {kind}"
        problem = f"no such file{near}; {kind} that ship with the package: {listed}"
        raise BadInput(key, name, problem)
    try:
        return file, yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise BadInput(key, name, f"{place}{getattr(error, 'problem', None) or error}") from None


def read_config(
    name: str, key: str = "config", folder: Path = Path(), above: tuple[str, ...] = ()
) -> list[Layer]:
    """Return the settings of a config in layers; those of its `base`, and of that one's base, come
    first.

    Args:
        name: a file's path below `folder`; else the name of a shipped config.
        key: the key that errors name.
        folder: see `name`.
        above: files of the configs that have led here by their `base`.

    Raises:
        BadInput: there is no such config, it cannot be read, or it is its own base.
    """
    file, content = read("configs", key, name, folder)
    place = str(file.resolve())
    chain = " -> ".join([*above, place])
    requirement = f"a config cannot be its own base: remove base from one of {chain}"
    check(key, name, place not in above, requirement)
    check(key, name, isinstance(content, dict | None), "it must contain lines of key: value")
    content = content or {}
    settings: Layer = {}
    # raises for a key that is given both with dots and nested
    for key, value in sorted(content.items(), key=lambda item: "." in str(item[0])):
        update(
            settings,
            nested(str(key), value),
            once=str(key),
        )
    return layers_of(name, content, file.parent, (*above, place))


def layers_of(
    name: str, content: dict[Any, Any], folder: Path, above: tuple[str, ...] = ()
) -> list[Layer]:
    """Return the settings in a config's `content` in layers; those of its `base` come first.

    Args:
        name: of the config, for errors.
        content: the YAML file's mapping.
        folder: where the file of the base is looked for.
        above: files of this config and of those that have led here by their `base`.
    """
    own_content = {key: value for key, value in content.items() if key != "base"}
    base = content.get("base")
    requirement = f"it must be the name or the file of one config (in {name})"
    check("base", base, isinstance(base, str | None), requirement)
    base_layers = [] if base is None else read_config(base, "base", folder, above)
    return [*base_layers, *layers_without_base(name, own_content)]


def layers_without_base(name: str, content: dict[Any, Any]) -> list[Layer]:
    """Return the layers of a config's own `content`, without those of its base.

    `callbacks: null` and `loggers: null` are a layer before the others: they remove what the base
    has, and dotted keys of the same file (`callbacks.quantize`) can add to it.
    """
    removals = {key: None for key in NAMED if content.get(key, "") is None}
    rest = {key: value for key, value in content.items() if key not in removals}
    layer = layer_of(name, rest)
    return [removals, layer] if removals else [layer]


def layer_of(name: str, content: dict[Any, Any]) -> Layer:
    """Return the `content` of config `name`, which may have dotted keys, as nested dicts.

    Raises:
        BadInput: a key outside of `COMPONENTS` does not exist.
    """
    layer: Layer = {}
    arguments: Layer = {}
    for key, value in content.items():
        key = str(key)
        is_section = key in COMPONENTS or key in GROUPS
        if value is None and is_section:  # an empty section sets nothing
            continue
        if key.partition(".")[0] in COMPONENTS and "." in key:
            arguments[key] = value
        else:
            update(layer, nested(key, value))
    # arguments come after the components that they belong to
    for key, value in arguments.items():
        head = key.partition(".")[0]
        if not isinstance(layer.get(head, {}), dict):
            layer[head] = _as_mapping(head, layer[head])
        update(layer, nested(key, value))
    drop_removed_keys(layer)
    plain = {key: value for key, value in layer.items() if key not in COMPONENTS}
    try:
        dict(leaves(plain, {key: action for key, action in run_keys().items() if key != "config"}))
    except BadInput as error:
        requirement = f"{error.requirement} (in {name})"
        raise BadInput(error.key, error.value, requirement) from None
    return layer


def drop_removed_keys(layer: Any) -> None:
    """Delete from `layer` the keys of `REMOVED_KEYS` that have the value given there."""
    for key, value in REMOVED_KEYS.items():
        *path, name = key.split(".")
        section: Any = layer
        for part in path:
            section = section.get(part) if isinstance(section, dict) else None
        if isinstance(section, dict) and name in section and section[name] == value:
            del section[name]


def _as_mapping(head: str, value: Any) -> Layer:
    """Return a component given as text (`method: ditto`; callbacks also as a list) as a mapping, to
    which arguments can be added."""
    if head in NAMED:
        return mapping(head, value)
    requirement = "it is a list of several: give each item its own arguments"
    check(head, value, isinstance(value, str), requirement)
    return {"class_path": value}


def nested(key: str, value: Any) -> Layer:
    """Return nested dicts with the value at a dotted key: `a.b` gives `{"a": {"b": value}}`."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def update(old: Layer, new: Layer, once: str = "") -> None:
    """Merge `new` into `old` in place, nested dicts key by key.

    With `once`, the dotted key of `new` in the config file, overwriting a value raises `BadInput`.
    """
    for key, value in new.items():
        adds_arguments = key in COMPONENTS and isinstance(value, dict)
        if isinstance(value, dict) and isinstance(old.get(key), dict):
            update(old[key], value, once)
        elif once and key in old and not adds_arguments:
            problem = f"it is given twice, also as {old[key]!r}: with dots and nested"
            raise BadInput(once, value, problem)
        else:
            old[key] = copy.deepcopy(value)


def mapping(kind: str, value: Any) -> Layer:
    """Return callbacks or loggers as a mapping of names to arguments. `value` may also be a list of
    names, or names separated by commas."""
    if isinstance(value, str):
        value = [name.strip() for name in value.split(",")]
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        value = {short(name): {"class_path": name} for name in value}
    requirement = "it must be names, or a mapping of names to their arguments"
    check(kind, value, isinstance(value, dict), requirement)
    return value


def short(name: str) -> str:
    """Return the name of a callback or logger: the last part of an import path in lower case, else
    `name` itself."""
    return name.rpartition(".")[2].lower() if "." in name else name
