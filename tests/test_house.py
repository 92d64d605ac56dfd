"""What a reader may count on in the code, beside ruff's rules, the layers of import-linter and the
budgets."""

import ast
import io
import itertools
import keyword
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def sources():
    """All code that is shipped."""
    return sorted([*(ROOT / "fl_lightning").rglob("*.py"), *(ROOT / "callbacks").rglob("*.py")])


METHODS = sorted(
    file
    for file in (ROOT / "fl_lightning" / "methods").glob("*.py")
    if file.stem not in ("__init__", "base")
)
ALIKE = 8
"""Lines of one shape, one after the other, that two methods' files may not share."""
SHARED = {
    "classmeans",
    "clustered",
    "fedamp",
    "feddf",
    "simpfd",
    "fedmd",
    "prototypes",
    "serveroptimizer",
}
"""What methods of one idea have in common, and methods that others are a variant of, which they say
in the paper."""


def code_lines(text):
    """Lines of code by number, each as its words; names, texts and numbers all look the same."""
    left_out = set()
    for node in ast.walk(ast.parse(text)):
        words = (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        )
        if words or isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(node.lineno, (node.end_lineno or 0) + 1))
    words_of_line = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP):
            said = token.type == tokenize.OP or keyword.iskeyword(token.string)
            for line in range(token.start[0], token.end[0] + 1):
                words_of_line.setdefault(line, []).append(
                    token.string if said else tokenize.tok_name[token.type]
                )
    return {
        line: " ".join(words)
        for line, words in sorted(words_of_line.items())
        if line not in left_out
    }


def runs(text):
    """The shapes of all `ALIKE` lines in a row that stand in functions: what a class declares is no
    logic."""
    spans = [
        (f.lineno, f.end_lineno or 0)
        for f in ast.walk(ast.parse(text))
        if isinstance(f, ast.FunctionDef)
    ]
    code = [
        words for line, words in code_lines(text).items() if any(a <= line <= b for a, b in spans)
    ]
    return {tuple(code[k : k + ALIKE]) for k in range(len(code) - ALIKE + 1)}


def test_no_two_methods_say_the_same_twice():
    lines_of_method = {file.stem: runs(file.read_text()) for file in METHODS}
    pairs = itertools.combinations(lines_of_method, 2)
    assert [
        pair for pair in pairs if not lines_of_method[pair[0]].isdisjoint(lines_of_method[pair[1]])
    ] == []


def test_no_method_imports_another():
    """Save what is made to be shared."""
    for file in METHODS:
        imported = [
            n.module or ""
            for n in ast.walk(ast.parse(file.read_text()))
            if isinstance(n, ast.ImportFrom)
        ]
        names = {m.split(".")[2] for m in imported if m.startswith("fl_lightning.methods.")}
        assert names <= SHARED | {"base", "common"}, file.stem


@pytest.mark.slow
def test_text_files_are_utf_8_whatever_the_locale():
    """`open`, `read_text` and the like name an encoding, or read bytes."""
    missing = {}
    for file in sources():
        calls = (
            node
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            if isinstance(node, ast.Call)
        )
        if lines := [call.lineno for call in calls if _opens_text(call)]:
            missing[str(file.relative_to(ROOT))] = lines
    assert missing == {}


def _opens_text(call):
    """Whether a call reads or writes text in the locale's encoding."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    words = {word.arg: word.value for word in call.keywords}
    modes = [
        node.value for node in [*call.args, words.get("mode")] if isinstance(node, ast.Constant)
    ]
    if "encoding" in words or name not in ("open", "read_text", "write_text", "fdopen"):
        return False
    owner = getattr(getattr(call.func, "value", None), "id", "")
    binary = any(isinstance(mode, str) and "b" in mode and len(mode) < 4 for mode in modes)
    return (
        not binary
        and owner not in ("Image", "tarfile", "memory", "self")
        and (owner, name) != ("os", "open")
    )
