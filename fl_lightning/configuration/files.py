"""Configs and studies as YAML: found by file or by name, read, and what is wrong with one in one
line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.configuration import catalogue
from fl_lightning.foundation.errors import BadInput

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
