"""Configs and studies as YAML: found by file or by name, read, and what is wrong with one in one
line."""

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
"""Settings, nested; a later layer overrides those before it."""

NAMED = ("callbacks", "loggers")
"""The sections whose entries go by names."""
INT, FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"


class _Loader(yaml.SafeLoader):
    """YAML forbids a key twice in a mapping; PyYAML takes the last. It also reads 010 as 8 and 1:30
    as 90: refused.

    A section `callbacks:` or `loggers:` without content is left out: it sets nothing. A null that
    is written out, as on the command line, removes all.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        node.value = [
            (key, value)
            for key, value in node.value
            if key.value not in NAMED or not _is_empty(value)
        ]
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    problem = f"the key {key.value!r} is given twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> Any:
        """A number as everybody reads it."""
        read = self.construct_yaml_int if node.tag == INT else self.construct_yaml_float
        octal = re.fullmatch(r"[-+]?0[0-7_]+", node.value) and int(node.value, 8) != int(node.value)
        if octal or ":" in node.value:
            problem = (
                f"to YAML {node.value} is {read(node)} (octal, or to base 60): write that, or "
                f"quote it as text"
            )
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return read(node)


for _tag in (INT, FLOAT):
    _Loader.add_constructor(_tag, _Loader.construct_number)


def _is_empty(value: yaml.Node) -> bool:
    """Whether nothing follows a key."""
    return (
        value.tag == "tag:yaml.org,2002:null"
        and value.value == ""
        and value.start_mark.index == value.end_mark.index
    )


def read(kind: str, key: str, name: str, folder: Path) -> tuple[Path, Any]:
    """A file and what it holds.

    Args:
        kind: `configs` or `studies`, of which those that ship with the package are also found by
            name.
        key: what errors call it.
        name: of the file, or of a shipped one.
        folder: where a file is looked for.

    Raises:
        BadInput: there is none, it cannot be read, is no YAML, or gives a key twice in a mapping.
    """
    try:
        file = folder / name if (folder / name).is_file() else catalogue.shipped(kind, name)
        text = "" if file is None else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            key, name, f"it cannot be read: {getattr(error, 'strerror', error)}"
        ) from None
    if file is None:
        names = list(catalogue.table(kind))
        near = catalogue.did_you_mean(name.removesuffix(".yaml"), names)
        listed = ", ".join(names) if kind == "configs" else f"fl-train list {kind}"
        raise BadInput(
            key, name, f"no such file{near}; {kind} that ship with the package: {listed}"
        )
    try:
        return file, yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise BadInput(key, name, f"{place}{getattr(error, 'problem', None) or error}") from None


def read_config(
    name: str, key: str = "config", folder: Path = Path(), above: tuple[str, ...] = ()
) -> list[Layer]:
    """The settings in a YAML file, or in the config that ships with the package under this name:
    first those of the config that it names as its `base`, and so on down the chain.

    Args:
        name: of the file or config.
        key: what names it.
        folder: where a file is looked for before the shipped configs.
        above: the configs whose base it is.

    Raises:
        BadInput: there is no such config, it cannot be read, or it is its own base.
    """
    file, content = read("configs", key, name, folder)
    place = str(file.resolve())
    check(
        key,
        name,
        place not in above,
        f"a config cannot be its own base: {' -> '.join([*above, place])}",
    )
    check(key, name, isinstance(content, dict | None), "it must hold keys and values")
    once: Layer = {}
    for dotted, value in sorted((content or {}).items(), key=lambda item: "." in str(item[0])):
        update(once, nested(str(dotted), value), str(dotted))
    return layers_of(name, content or {}, file.parent, (*above, place))


def layers_of(
    name: str, content: dict[Any, Any], folder: Path, above: tuple[str, ...] = ()
) -> list[Layer]:
    """Returns the layers of a config `name`, those of its base before them. The base is looked for
    in `folder`; `above` are the configs that it is the base of."""
    own = {key: value for key, value in content.items() if key != "base"}
    base = content.get("base")
    check(
        "base",
        base,
        isinstance(base, str | None),
        f"it must be the name or the file of one config (in {name})",
    )
    below = [] if base is None else read_config(base, "base", folder, above)
    return [*below, *own_layers(name, own)]


def own_layers(name: str, content: dict[Any, Any]) -> list[Layer]:
    """Returns the layers of a config without its base: removals by null (`callbacks:`, `loggers:`)
    first, so that later keys can name others."""
    removed = {key: None for key in NAMED if content.get(key, "") is None}
    return [
        *([removed] if removed else []),
        layer_of(name, {k: v for k, v in content.items() if k not in removed}),
    ]


def layer_of(name: str, content: dict[Any, Any]) -> Layer:
    """Nests the content of config `name`; `BadInput` for a plain key that does not exist."""
    layer: Layer = {}
    keyed = [(str(key), *str(key).partition(".")[:2], value) for key, value in content.items()]
    for key, head, dot, value in sorted(
        keyed, key=lambda item: item[1] in COMPONENTS and bool(item[2])
    ):
        # an empty section sets nothing
        if value is not None or not (key in COMPONENTS or key in GROUPS):
            if dot and head in COMPONENTS and not isinstance(layer.get(head, {}), dict):
                layer[head] = _by_name(head, layer[head])
            update(layer, nested(str(key), value))
    plain = {key: value for key, value in layer.items() if key not in COMPONENTS}
    try:
        dict(leaves(plain, {key: action for key, action in run_keys().items() if key != "config"}))
    except BadInput as error:
        raise BadInput(error.key, error.value, f"{error.allowed} (in {name})") from None
    return layer


def _by_name(head: str, given: Any) -> Layer:
    """A method, model, callbacks or loggers that a file only names, as a mapping with room for
    arguments."""
    if head in NAMED:
        return mapping(head, given)
    if not isinstance(given, str):
        raise BadInput(
            head,
            given,
            f"{head}.ARG belongs to one {head}: give a list's items their own arguments",
        )
    return {"class_path": given}


def nested(key: str, value: Any) -> Layer:
    """Returns the value of a dotted key in nested mappings."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def update(old: Layer, new: Layer, once: str = "") -> None:
    """Puts `new` over `old`. `once`: a dotted key that must not replace a value (`BadInput`)."""
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(old.get(key), dict):
            update(old[key], value, once)
        # a name, then its arguments
        elif once and key in old and not (key in COMPONENTS and isinstance(value, dict)):
            raise BadInput(
                once, value, f"it is given twice, also as {old[key]!r}: with dots and nested"
            )
        else:
            old[key] = copy.deepcopy(value)


def mapping(kind: str, given: Any) -> Layer:
    """Callbacks or loggers, given as names with commas, as a list of names or as a mapping, as a
    mapping."""
    if isinstance(given, str):
        given = [name.strip() for name in given.split(",")]
    if isinstance(given, list) and all(isinstance(name, str) for name in given):
        given = {short(name): {"class_path": name} for name in given}
    check(
        kind,
        given,
        isinstance(given, dict),
        "it must be names, or a mapping of names to their arguments",
    )
    return given


def short(name: str) -> str:
    """Returns the name of a callback or logger: the last part of an import path, else the word
    itself."""
    return name.rpartition(".")[2].lower() if "." in name else name
