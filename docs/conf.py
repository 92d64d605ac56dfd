"""The site of these pages and of the code's docstrings: uv run sphinx-build -W docs build/site."""

import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from fl_lightning import __version__
from fl_lightning.configuration import index
from fl_lightning.configuration.explain import page

ROOT = Path(__file__).resolve().parents[1]

project = "fl_lightning"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"fl_lightning {release}"
highlight_language = "text"  # blocks that name no language are command lines
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
default_role = "code"  # docstrings write `names` as Markdown does
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_use_ivar = True

METHOD_ARGUMENTS = Path(__file__).with_name("method-arguments.md")
"""A page that is made with the site and is not in git."""
METHOD_ARGUMENTS.write_text(page(index.read()["methods"]), encoding="utf-8")

LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)\)")


def outside(app: Sphinx, page: str, source: list[str]) -> None:
    """A link to what lies beside these pages becomes its path: the site has no copy of the code."""

    def named(link: re.Match[str]) -> str:
        text, target = link.groups()
        path = (Path(app.srcdir, page).parent / target).resolve()
        if path.is_relative_to(app.srcdir):
            return link.group()
        where = path.relative_to(ROOT).as_posix()
        return f"`{where}`" if text.strip("`/") in where else f"{text} (`{where}`)"

    source[0] = LINK.sub(named, source[0])


def plain(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Stars and bars of docstrings (products, norms, `**kwargs`) are no markup, outside of
    `names`."""
    for number, line in enumerate(lines):
        parts = re.split(r"(`[^`]*`)", line)
        lines[number] = "".join(
            p if p.startswith("`") else re.sub(r"(?<!\\)([*|])", r"\\\1", p) for p in parts
        )


def setup(app: Sphinx) -> None:
    """What Sphinx calls."""
    app.connect("source-read", outside)
    # when napoleon has read its sections
    app.connect("autodoc-process-docstring", plain, priority=900)
