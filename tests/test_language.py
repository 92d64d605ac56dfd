"""Plain English: a name says what it holds, prose uses the field's nouns. Product code, configs and pages are read."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAMES = {"asked", "found", "heard", "held", "hung", "said", "spoken", "stands", "stood", "told", "wanted"}
"""Names that do not say what they hold; `_told` and `TOLD` do not either."""
PROSE = {
    r"\bbears?\b": "defends against, tolerates",
    r"\b(mean|means|meant)\s+harm\b": "is malicious",
    r"(?<!there )\b(is|are) (?-i:none)\b(?! of)": "is not one",
    r"\b(is|are) (?-i:none) of (its|ours|theirs|any)\b": "is not one of",
    r"\b(stands?|stood|standing)\b(?! (in )?for\b|-in\b)": "is",
    r"\b(has|have) (its|their|no) say\b": "decides",
    r"\bwhat (is|was) not said\b": "what is not overridden",
    r"\bc[ao]mes? to nothing\b": "fails",
    r"\bonce more\b": "again",
    r"\bshared out\b": "distributed",
    r"\bwhoever\b": "whichever client",
    r"\bc[ao]mes? of\b": "comes from, depends on",
    r"\bat hand\b": "available",
    r"\bborne\b": "survived, tolerated",
    r"\b(hears?|heard)\b": "receives",
}
"""Idioms that need a second reading, and what to write instead."""


def files() -> list[Path]:
    """What is checked: all that is shipped or published, without the tests."""
    code = [*ROOT.glob("fl_lightning/**/*.py"), *ROOT.glob("callbacks/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("fl_lightning/**/*.md")]
    text = [*pages, *ROOT.glob("configs/**/*.yaml"), ROOT / "docs" / "conf.py"]
    return sorted(file for file in [*code, *text] if "site" not in file.parts)


def names(text: str) -> Iterator[tuple[int, str]]:
    """Line and name of each variable, parameter, attribute and function that Python code defines, but for old names
    that are forwarded to new ones.
    """
    tree = ast.parse(text)
    forwarded = {
        target
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and "forwarded" in ast.unparse(node.value)
        for target in node.targets
    }
    for node in ast.walk(tree):
        if node in forwarded:
            continue
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name


def prose(text: str, kind: str) -> str:
    """The file with everything blanked that is no prose: code, and names in backticks."""
    if kind == ".py":
        lines = [""] * (text.count("\n") + 2)
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT or tokenize.tok_name[token.type] in ("STRING", "FSTRING_MIDDLE"):
                words = re.sub(r"\{[^{}]*\}", "", token.string) if token.string[:1] in "fF" else token.string
                for number, line in enumerate(words.split("\n"), token.start[0]):
                    lines[number] += line if " " in line.strip() else ""
        text = "\n".join(lines[1:])
    elif kind == ".md":
        text = re.sub(r"^```.*?^```", lambda block: "\n" * block.group().count("\n"), text, flags=re.M | re.S)
        text = re.sub(r"\]\([^)]*\)", "]", text)
    elif kind == ".yaml":
        text = "\n".join(line.partition("#")[2] for line in text.split("\n"))
    return re.sub(r"`[^`\n]*`", "``", text)


def offences(text: str, kind: str) -> list[str]:
    """What a file says in words of its own, by line."""
    known = names(text) if kind == ".py" else ()
    bad = [f"{line}: the name {name}" for line, name in known if name.strip("_").lower() in NAMES]
    words = prose(text, kind)
    for pattern, better in PROSE.items():
        matches = re.finditer(pattern, words, re.I)
        bad += [f"{words.count(chr(10), 0, m.start()) + 1}: {m.group()!r} (better: {better})" for m in matches]
    return bad


def test_names_and_prose_are_plain() -> None:
    texts = [(file, file.read_text(encoding="utf-8")) for file in files()]
    bad = [f"{file.relative_to(ROOT)}:{offence}" for file, text in texts for offence in offences(text, file.suffix)]
    assert bad == []


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("found = [1]", ".py"),
        ("def f(told): ...", ".py"),
        ("def _spoken(): ...", ".py"),
        ("WANTED = 3", ".py"),
        ("x = [held for held in y]", ".py"),
        ('"""It stands there."""', ".py"),
        ("x = 1  # clients that mean harm", ".py"),
        ("x = 1  # weights that come of it", ".py"),
        ("Callbacks bear attackers.", ".md"),
        ("a: 1  # what is not said", ".yaml"),
    ],
)
def test_home_made_words_are_seen(text: str, kind: str) -> None:
    assert len(offences(text, kind)) == 1


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('x = "stands"', ".py"),
        ("n stands for `stands`; there is none", ".md"),
        ("```\nit stands\n```", ".md"),
        ("a: stands", ".yaml"),
    ],
)
def test_code_and_plain_words_are_not(text: str, kind: str) -> None:
    assert offences(text, kind) == []
