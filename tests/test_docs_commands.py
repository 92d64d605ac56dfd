"""Runs of README and docs, as they are shown there."""

import re
import shlex

import pytest

from fl_lightning.cli import main

from .test_docs import PAGES, QUICK, ROOT, TUTORIALS, blocks, folder  # noqa: F401  (a fixture)

TOOL = re.compile(r"(pip install uv && uv run )?fl-train (fit|test|export|dashboard --json) ")
"""What is run here; test_docs.py looks at the keys of all other commands."""
PAGES_RUN = {*TUTORIALS, "own-model-and-data", "add-a-method"}
"""Pages whose blocks test_docs.py runs line by line."""
LEFT_OUT = {
    "they need MNIST or CIFAR-10, or a package of an extra": (
        r"fl-train fit .*--data.root path/to/data.*",
        r"fl-train fit --config kapc_(vit_adapters|watch).*",
        r"fl-train fit --config \S+ --smoke",
    ),
    "they need several GPUs or processes": (r"fl-train fit .*--fabric.devices [24].*",),
    "they need files of other pages": (
        r"fl-train fit --(model|method|data.source) .*(my_|digits.npz|images).*",
        r"fl-train export --run hospital-.*",
    ),
    "they run nothing": (r"fl-train fit .*(--help|--print_config)",),
}
"""Commands that are not run here, by the reason, as the whole line looks."""


def shown(page):
    """The commands of a page, in blocks and in its text; there `fl-train fit` is a name, and `RUN`
    stands for one."""
    held = [block for kind in ("", "text", "bash", "console") for block in blocks(page, kind)]
    outside = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    names = re.compile(
        r"\S+|(fl-train|uv|wandb) \S+|.* (runs|--help)|.*(\.\.\.|\b[A-Z]{2,}\b|\[).*"
    )
    spoken = [
        line
        for said in re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", outside)
        if not names.fullmatch(line := " ".join(said.split()))
    ]
    return [line for line in [*"".join(held).splitlines(), *spoken] if TOOL.match(f"{line} ")]


def ours():
    """The commands that are run here, each once, in their order."""
    pages = [page for page in PAGES if page.stem not in PAGES_RUN]
    patterns = [pattern for patterns in LEFT_OUT.values() for pattern in patterns]
    lines = dict.fromkeys(line for page in pages for line in shown(page))
    return [line for line in lines if not any(re.fullmatch(pattern, line) for pattern in patterns)]


@pytest.mark.slow
def test_commands_run(folder, capsys):  # noqa: F811
    """In their order, a round each, in one folder."""
    for line in ours():
        _, *words = shlex.split(line.removeprefix("pip install uv && uv run "))
        words += QUICK if words[0] == "fit" else []
        # as many as `long` has done, or one more
        words += ["--federation.rounds", "2"] if "--resume" in words else []
        assert main(words) == 0, (line, capsys.readouterr().err)
    assert {"client3.safetensors", "view.json"} <= {file.name for file in folder.iterdir()}
