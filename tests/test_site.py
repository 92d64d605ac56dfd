"""The pages as a site: all of them, nothing that Sphinx has to warn of; and what stands beside
them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import fl_lightning

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    """A page that the index does not reach is one; so is a link that leads nowhere."""
    line = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", str(DOCS), str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    pages = {page.relative_to(DOCS).with_suffix(".html").as_posix() for page in DOCS.rglob("*.md")}
    assert len(pages) > 40
    assert {page for page in pages if not (tmp_path / page).is_file()} == set()
    api = (tmp_path / "api.html").read_text()
    described = set(re.findall(r'id="(fl_lightning\.[\w.]+)"', api))
    public = {f"fl_lightning.{name}" for name in fl_lightning.__all__ if name[0] != "_"}
    assert public <= described
    assert {"fl_lightning.methods.Method.phases", "fl_lightning.core.Client.proximal"} <= described
    # the site has no copy of the code
    assert "../fl_lightning" not in (tmp_path / "how-it-works.html").read_text()
