"""The tutorial "From study to three hospitals": its lines as they stand on the page, in one
shell."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fl_lightning.results.folder import RunFolder

from .machines import HERE, SILENT, free_port, kill_all
from .test_equal import PAGE

TITLE = "## From study to three hospitals"


def lines():
    """Of the page: the environment, the six commands, and the export."""
    text = PAGE.read_text()
    section = text[text.index(TITLE) :].split("\n## ", 1)[0]
    setup, six, export = re.findall(r"^```\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    return setup, six, export


@pytest.mark.slow
@pytest.mark.alone
def test_its_lines_lead_to_three_hospitals_and_a_report(tmp_path):
    """Ports alone are others; Flower's dependencies have the versions that the other tests have."""
    setup, six, export = lines()
    first = free_port()
    for old, new in (("8000", str(first)), ("909$k", f"$(({first} + 1 + $k))")):
        assert old in six
        six = six.replace(old, new)
    env = {**os.environ, **SILENT, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    env |= {"UV_CONSTRAINT": str(HERE / "flower.txt"), "WANDB_MODE": "offline"}
    try:
        script = "\n".join(["set -e", setup, six, export])
        with (tmp_path / "out.txt").open("wb") as out:
            code = subprocess.call(
                ["bash", "-c", script], cwd=tmp_path, env=env, stdout=out, stderr=out, timeout=1500
            )
        assert code == 0, (tmp_path / "out.txt").read_text()[-3000:]
    finally:
        kill_all(tmp_path / "home")
    assert len(RunFolder(tmp_path / "runs" / "app").read("metrics")) == 2
    assert (tmp_path / "runs" / "app" / "report.html").is_file()
    assert (tmp_path / "hospital_1.safetensors").is_file()
