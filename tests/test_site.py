"""The pages as a site: all of them, nothing that Sphinx has to warn of; and what stands beside them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import fl_lightning

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """A page that the index does not reach is one; so is a link that leads nowhere."""
    line = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", str(DOCS), str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    pages = {page.relative_to(DOCS).with_suffix(".html").as_posix() for page in DOCS.rglob("*.md")}
    assert len(pages) > 40
    assert {page for page in pages if not (tmp_path / page).is_file()} == set()
    api = (tmp_path / "api.html").read_text()
    described = set(re.findall(r'id="(fl_lightning\.[\w.]+)"', api))
    assert {f"fl_lightning.{name}" for name in fl_lightning.__all__ if name[0] != "_"} <= described
    assert {"fl_lightning.methods.Method.phases", "fl_lightning.core.Client.pulled"} <= described
    assert "../fl_lightning" not in (tmp_path / "how-it-works.html").read_text()  # the site has no copy of the code


def test_the_index_names_every_page() -> None:
    """What Sphinx would say, in no time."""
    trees = re.findall(r"^:::\{toctree\}\n(.*?)^:::$", (DOCS / "index.md").read_text(), re.DOTALL | re.MULTILINE)
    listed = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    named = {page.resolve() for entry in listed for page in DOCS.glob(f"{entry}.md")}
    assert len(listed) == len(set(listed))
    assert {page for page in DOCS.rglob("*.md") if page.name != "index.md"} == named


def test_ci_builds_the_site() -> None:
    steps = (ROOT / ".ci" / "run").read_text()
    assert steps.index("uv run mypy") < steps.index("uv run sphinx-build -W") < steps.index("uv run pytest")


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()  # what the format asks for
    assert str(cited["version"]) == fl_lightning.__version__
    assert cited["license"] == "MIT"
