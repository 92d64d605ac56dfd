"""Every command that README and docs show is run by a test, or it is said here why not."""

import re
import shlex

import pytest

from fl_lightning.cli import main

from .test_docs import LONG, PAGES, QUICK, ROOT, TUTORIALS, blocks, folder  # noqa: F401  (a fixture)

TOOL = re.compile(
    r"(fl-train|uv run|uv sync|pip install|python|pytest|ruff|bash|sphinx-build|sbatch|wandb|\.) "
)
WHOLE = {
    **dict.fromkeys(TUTORIALS, "test_tutorials_run"),
    "own-model-and-data": "test_examples_run",
}
WHOLE |= {"add-a-method": "test_examples_run"}
"""Pages whose blocks are run line by line, and the tests in test_docs.py that do."""
ELSEWHERE = {
    "it runs the tests, or what .ci/run runs": (
        r"pip install uv && uv run pytest",
        r"pytest -n 0 .*",
        r"ruff check .*",
        r"bash .ci/run",
        r"sphinx-build .*",
        r"python tests/golden/golden.py.*",
    ),
    "it installs, as .ci/run does, or begins an environment": (
        r"pip install (uv && uv sync|-c.*|\.)",
        r"\. \.venv/bin/activate",
    ),
    "it wants MNIST or CIFAR-10, or a package of an extra; test_configs.py runs every config on "
    "made-up data": (
        r"fl-train fit .*--data.root path/to/data.*",
        r"fl-train fit --config kapc_(vit_adapters|watch).*",
    ),
    "it wants four GPUs, or a day": (
        r"fl-train fit --config kapc_resnet18.yaml --fabric.devices 4 .*",
    ),
    "it takes hours; test_benchmarks.py runs what it is made of on tiny data": (
        r"(uv run )?python benchmarks/\S+.*",
    ),
    "it takes hours; study/test_reproduce.py runs its like for a round": (
        r"fl-train study [a-z]+/.*",
    ),
    "test_docs.py::test_commands_are_understood": (
        r"fl-train (list|plan|submit)( .*)?",
        r"fl-train fit .*(--help|--print_config)",
    ),
    "test_docs.py::test_tutorials_run": (
        r"fl-train study study.yaml .*",
        r"fl-train (status|compare) .*",
        r"fl-train archive .* --out .*",
    ),
    "test_docs.py::test_examples_run": (
        r"fl-train fit --(model|method|data.source) .*(my_|digits.npz|images).*",
        r"fl-train check-method my_(methods|optimizer).*",
    ),
    "test_site.py::test_the_site_builds_without_a_warning": (r"uv run sphinx-build .*",),
    "test_configs.py::test_it_runs_without_data_and_without_a_network": (
        r"fl-train fit --config \S+ --smoke",
    ),
    "e2e/test_ranks.py::test_fl_train_starts_the_processes_itself": (
        r"fl-train fit .*--fabric.devices 2",
    ),
    "report/test_workspace.py::test_the_view_is_saved_once_and_again_only_where_it_differs": (
        r"fl-train dashboard --project .*",
    ),
    "study/test_compare.py::test_the_report_of_a_study_has_curves_and_a_forest_plot": (
        r"fl-train report .* --figures pdf",
    ),
    "report/test_command.py::test_where_the_page_goes": (
        r"fl-train report runs/\S+( runs/\S+ --out \S+)?",
    ),
    "e2e/test_commands.py::test_join_where_clients_run_several_architectures": (
        r"fl-train join --run .*",
    ),
    "study/test_archive.py::test_a_cell_comes_to_the_same_bits_again": (
        r"fl-train archive .* --rerun .*",
    ),
    "study/test_tune.py": (r"fl-train tune .*", r"sbatch .*fl-train tune .*"),
    "study/test_reproduce.py": (r"fl-train reproduce .*",),
    "worth/test_command.py": (r"fl-train worth .*",),
    "data/test_silos.py": (r"fl-train check-data .*",),
    "privacy/test_audit.py": (r"fl-train audit .*",),
    "study/test_coverage.py": (r"python tests/study/test_coverage.py",),
    "faults/test_faults.py::test_six_kills": (r"uv run python tests/faults/kills.py .*",),
    "study/test_together.py::test_a_killed_study_comes_to_the_same": (
        r"uv run python tests/study/kills_together.py .*",
    ),
    "fuzz/test_fuzz.py::test_a_few_inputs": (r"python tests/fuzz/fuzz.py.*",),
    "cli/test_arguments.py::test_the_index_is_fresh": (
        r"python -m fl_lightning\.configuration\..*",
    ),
    "deploy/test_tutorial.py": (r"fl-train deploy .*", r"fl-train export --run hospital-.*"),
    "deploy/test_flower.py": (r"python -m fl_lightning.sites.superexec.*",),
    "it takes half an hour; deploy/test_processes.py and deploy/test_flower.py run some of its "
    "kills": (r"uv run python -m tests\.deploy\.kills .*",),
    "test_packaging.py": (r"python \.ci/constraints\.py",),
    "it is W&B's own": (r"wandb .*",),
}
"""What runs a command elsewhere (a test's file and name), or why none does, by what the whole line
looks like."""


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


def where(page, line):
    """The test that runs a command, or why none does; None: it is for the test below."""
    if line in LONG:
        return LONG[line]
    if page.stem in WHOLE and any(line in block.splitlines() for block in blocks(page, "")):
        return f"test_docs.py::{WHOLE[page.stem]}"
    found = (
        said
        for said, patterns in ELSEWHERE.items()
        if any(re.fullmatch(pattern, line) for pattern in patterns)
    )
    return next(found, None)


def ours():
    """The commands that are run here, each once, in their order."""
    return list(
        dict.fromkeys(line for page in PAGES for line in shown(page) if where(page, line) is None)
    )


def test_every_command_is_run_or_marked():
    lines = [(page, line) for page in PAGES for line in shown(page)]
    assert len(lines) > 150
    for said in {said for page, line in lines if (said := where(page, line))}:
        file, _, name = said.partition("::")
        if file.endswith(".py"):
            text = (ROOT / "tests" / file).read_text()
            assert not name or f"def {name}(" in text, said
    for pattern in (pattern for patterns in ELSEWHERE.values() for pattern in patterns):
        assert any(re.fullmatch(pattern, line) for _, line in lines), (
            f"nothing is shown that looks like {pattern}"
        )
    mine = ("fl-train fit ", "fl-train test ", "fl-train export ", "fl-train dashboard --json ")
    assert [
        line
        for line in ours()
        if not line.removeprefix("pip install uv && uv run ").startswith(mine)
    ] == []


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


@pytest.mark.slow
def test_noise_of_the_privacy_page_is_possible_in_whole_runs(tmp_path, monkeypatch, capsys):
    """A target epsilon needs more noise over all rounds than over one, and models diverge only
    after some rounds."""
    monkeypatch.chdir(tmp_path)
    lines = [
        shlex.split(line)[2:]
        for line in shown(ROOT / "docs" / "privacy.md")
        if line.startswith("fl-train fit ")
    ]
    quantile = next(words for words in lines if "--callbacks.centralprivacy.quantile" in words)
    assert main(["plan", *quantile]) == 0, capsys.readouterr().err
    noisy = next(words for words in lines if "--callbacks.localprivacy.noise" in words)
    assert main(["fit", *noisy, *QUICK, "--federation.rounds", "3"]) == 0, capsys.readouterr().err
