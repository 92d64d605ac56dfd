"""The source of a shipped architecture, as lines that need torch (some torchvision), but not this
package."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from typing import Any

PACKAGE = "fl_lightning"
STANDINS = {
    "check": "def check(key, value, holds, allowed):\n    if not holds:\n        raise "
    "ValueError(allowed)\n",
    "BadInput": "class BadInput(ValueError):\n    pass\n",
}
"""Replacements of this package's functions by which our architectures refuse arguments."""


def standalone(class_path: str) -> str | None:
    """Return the imports and definitions that the class needs, in order; None: it is no shipped
    architecture."""
    module, _, name = class_path.rpartition(".")
    if not module.startswith(f"{PACKAGE}.models."):
        return None
    imports: dict[str, None] = {}
    definitions: dict[str, str] = {}
    _collect(module, name, imports, definitions)
    body = "\n\n".join(text.strip() for text in definitions.values())
    return "\n".join(imports) + "\n\n\n" + body + "\n"


def _collect(
    module: str,
    name: str,
    imports: dict[str, None],
    definitions: dict[str, str],
) -> None:
    """Add a definition of a module to `definitions`, after those that it uses, and the module's
    imports to `imports`."""
    if name in definitions:
        return
    if name in STANDINS:
        definitions[name] = STANDINS[name]
        return
    text = Path(inspect.getfile(importlib.import_module(module))).read_text(encoding="utf-8")
    tree = ast.parse(text)
    module_of: dict[str, str] = {}
    node_of: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(PACKAGE):
            names = [alias.asname or alias.name for alias in node.names]
            module_of |= dict.fromkeys(names, str(node.module))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            if getattr(node, "module", "") != "__future__":
                imports[ast.unparse(node)] = None
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            node_of[node.name] = node
        elif isinstance(node, ast.Assign):
            targets = [target.id for target in node.targets if isinstance(target, ast.Name)]
            node_of |= dict.fromkeys(targets, node)
    node = node_of[name]
    # marked as begun, since a definition may use itself; its place is after those that it uses
    definitions[name] = ""
    for used in _names(node):
        if used in module_of or used in node_of:
            _collect(module_of.get(used, module), used, imports, definitions)
    del definitions[name]
    definitions[name] = ast.get_source_segment(text, node) or ""


def _names(node: Any) -> list[str]:
    return list(dict.fromkeys(part.id for part in ast.walk(node) if isinstance(part, ast.Name)))
