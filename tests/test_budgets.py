"""How much there is to read: tokens of code by room, and how densely they are written."""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
TOKENS = {
    "benchmarks": 18_500,
    "callbacks": 35_100,
    "configuration": 19_200,
    "core": 15_900,
    "data": 46_300,
    "drawing": 2_700,
    "engine": 27_500,
    "exporting": 3_700,
    "foundation": 14_600,
    "lab": 95_700,
    "methods": 45_000,
    "models": 7_700,
    "privacy": 3_600,
    "results": 15_900,
    "sites": 17_500,
    "storage": 3_300,
    "top": 10_400,
    "training": 24_600,
}
"""Tokens at most, by room: what they hold today. A change that shrinks a room lowers its number."""
ALL = 407_000
DENSITY = 8.5
"""Tokens a line at most, over a room; other codebases of this kind have 5.7 to 7.8."""


def sources():
    """The product's files; `fl_lightning/callbacks` is a link to `callbacks`."""
    roots = ("fl_lightning", "callbacks", "benchmarks")
    files = [file for root in roots for file in (ROOT / root).rglob("*.py")]
    return sorted(file for file in files if ROOT / "fl_lightning/callbacks" not in file.parents)


def room(file):
    """The room of a file: a package of fl_lightning, or a folder beside it."""
    first, second, *_ = *file.relative_to(ROOT).parts, ""
    if first != "fl_lightning":
        return first
    return "top" if second.endswith(".py") else second


def docstring_lines(text):
    """The lines of a file's docstrings."""
    expressions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr))
    texts = (node for node in expressions if isinstance(node.value, ast.Constant))
    docstrings = [node for node in texts if isinstance(node.value.value, str)]
    return {n for node in docstrings for n in range(node.lineno, (node.end_lineno or 0) + 1)}


def measure(text):
    """Tokens without comments, layout and docstrings, and the lines that hold one."""
    documented = docstring_lines(text)
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in LAYOUT
        and not (token.type == tokenize.STRING and token.start[0] in documented)
    ]
    lines = {n for token in tokens for n in range(token.start[0], token.end[0] + 1)}
    return len(tokens), lines


@pytest.mark.slow
def test_rooms_stay_within_their_budgets():
    tokens, lines = Counter[str](), Counter[str]()
    for file in sources():
        count, used = measure(file.read_text(encoding="utf-8"))
        tokens[room(file)] += count
        lines[room(file)] += len(used)
    assert {name: n for name, n in tokens.items() if n > TOKENS.get(name, 0)} == {}
    assert sum(tokens.values()) <= ALL
    density = {name: tokens[name] / lines[name] for name in tokens}
    assert {name: round(d, 1) for name, d in density.items() if d > DENSITY} == {}


def test_no_file_overrules_the_formatter():
    assert [file.name for file in sources() if "# fmt:" in file.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize(
    "text, count, line_count",
    [
        ("x = 1  # one\n", 3, 1),
        ('"""Text."""\n\nx = f(\n    1,\n)\n', 7, 3),
        ('x = """a\nb"""\n', 3, 2),
    ],
)
def test_tokens_are_what_a_reader_reads(text, count, line_count):
    tokens, lines = measure(text)
    assert (tokens, len(lines)) == (count, line_count)
