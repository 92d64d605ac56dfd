"""YAML that a user has written: what is wrong with it in one line, and no key twice."""

from __future__ import annotations

from typing import Any

import yaml

from fl_lightning.errors import BadInput


class _Loader(yaml.SafeLoader):
    """YAML forbids a key twice in a mapping; PyYAML takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    problem = f"the key {key.value!r} is given twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse(key: str, name: str, text: str) -> Any:
    """What `text` holds.

    Args:
        key: what errors call it: `config`, `study`.
        name: of the file.
        text: of it.

    Raises:
        BadInput: it is no YAML, or a key is given twice in a mapping.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise BadInput(key, name, f"{place}{getattr(error, 'problem', None) or error}") from None
