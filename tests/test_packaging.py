"""What is shipped: the lists in pyproject.toml agree with the disk, and a wheel works on its
own."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import setuptools
import yaml

import fl_lightning
from fl_lightning.foundation.extras import MODULES, command

ROOT = Path(__file__).resolve().parents[1]
MAPPED = {"callbacks", "configs", "slurm"}
"""Folders at the top that are subpackages of fl_lightning."""


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def files() -> list[str]:
    """Paths of the project's files, relative to its root."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no git checkout")
    line = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    out = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in out.split("\0") if name and (ROOT / name).exists()]


def packages_on_disk() -> set[str]:
    """Folders with an `__init__.py`, by import name."""
    inside = {path.parent for path in (ROOT / "fl_lightning").rglob("__init__.py")}
    mapped = {path.parent for top in MAPPED for path in (ROOT / top).rglob("__init__.py")}
    own = {".".join(folder.relative_to(ROOT).parts) for folder in inside}
    return own | {".".join(("fl_lightning", *folder.relative_to(ROOT).parts)) for folder in mapped}


def test_pip_and_uv_are_held_to_the_same_versions(pyproject: dict[str, Any]) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = [line for line in lines if line and not line.startswith("#")]
    assert constraints == pyproject["tool"]["uv"]["constraint-dependencies"]
    assert all("==" in line for line in constraints)
    assert (
        runpy.run_path(str(ROOT / ".ci" / "constraints.py"))["text"]()
        == (ROOT / "constraints.txt").read_text()
    )


def test_every_dependency_has_an_exact_version_to_test_with(pyproject: dict[str, Any]) -> None:
    groups = pyproject["dependency-groups"]
    assert pyproject["tool"]["uv"]["default-groups"] == list(groups)  # `uv sync` installs them all
    extras = pyproject["project"]["optional-dependencies"]
    lists = [pyproject["project"]["dependencies"], *groups.values(), *extras.values()]
    exact = {line.partition("==")[0] for line in pyproject["tool"]["uv"]["constraint-dependencies"]}
    names = {line.partition(">")[0].partition("[")[0].lower() for lines in lists for line in lines}
    assert names - {"fl_lightning"} <= exact


def test_every_extra_is_installed_to_test_with(pyproject: dict[str, Any]) -> None:
    """Through `all`, which the group dev names; and each extra has the packages that
    `extras.MODULES` looks for."""
    extras = dict(pyproject["project"]["optional-dependencies"])
    (everything,) = extras.pop("all")
    assert everything == f"fl_lightning[{','.join(extras)}]"
    assert "fl_lightning[all]" in pyproject["dependency-groups"]["dev"]
    assert extras.keys() == MODULES.keys()
    distributions = metadata.packages_distributions()
    for extra, modules in MODULES.items():
        listed = {line.partition(">")[0] for line in extras[extra]}
        names = {name.lower() for module in modules for name in distributions[module]}
        assert listed <= names | {"wandb-workspaces"}
        assert command(extra).endswith(
            f"pip install {' '.join(repr(line) for line in extras[extra])}"
        )


def test_the_packages_are_those_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", given.update)
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    assert set(given["packages"]) == packages_on_disk()
    assert len(given["packages"]) == len(set(given["packages"]))
    assert given["package_dir"] == {f"fl_lightning.{name}": name for name in MAPPED}


def test_on_windows_one_line_says_where_it_runs() -> None:
    code = "import sys; sys.platform = 'win32'; import fl_lightning"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "ImportError: fl_lightning runs on Linux and macOS"
    )


def test_the_metadata_is_what_an_index_asks_for(pyproject: dict[str, Any]) -> None:
    project = pyproject["project"]
    (author,) = yaml.safe_load((ROOT / "CITATION.cff").read_text())["authors"]
    assert project["authors"] == [author]
    said = {
        line
        for line in project["classifiers"]
        if line.startswith(("Operating", "Programming Language :: Python :: 3."))
    }
    versions = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"][
        "tests"
    ]["strategy"]["matrix"]["python"]
    systems = {"Operating System :: MacOS", "Operating System :: POSIX :: Linux"}
    assert said == systems | {
        f"Programming Language :: Python :: {version}" for version in versions
    }
    assert project["requires-python"] == f">={versions[0]}"


def test_python_files_lie_in_packages() -> None:
    for top in ("fl_lightning", *MAPPED):
        for path in (ROOT / top).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), path


def test_the_version_is_said_once(pyproject: dict[str, Any]) -> None:
    assert pyproject["project"]["version"] == fl_lightning.__version__


def test_the_link_to_callbacks_is_relative() -> None:
    link = ROOT / "fl_lightning" / "callbacks"
    if not os.path.lexists(link):
        pytest.skip("an sdist has no link: callbacks/ is installed as a subpackage")
    if link.is_symlink():  # a checkout without symlinks has a small file instead
        assert os.readlink(link) == "../callbacks"
    else:
        assert link.read_text() == "../callbacks"


def test_nothing_large_and_no_lock_file_is_kept(files: list[str]) -> None:
    large = [
        name
        for name in files
        if (ROOT / name).is_file() and (ROOT / name).stat().st_size > 1_000_000
    ]
    assert large == []
    assert "uv.lock" not in files  # it holds addresses of registries


# ---------------------------------------------------------------- the wheel


@pytest.fixture
def source(files: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout."""
    if shutil.which("uv") is None:
        pytest.skip("no uv to build with")
    source = tmp_path_factory.mktemp("source")
    for name in files:
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    return source


@pytest.fixture(params=["link", "no link"])
def wheel(request: pytest.FixtureRequest, source: Path, tmp_path: Path) -> Path:
    """A wheel built of a copy; once of a checkout without symlinks."""
    out = tmp_path / "wheel"
    if request.param == "no link":
        (source / "fl_lightning" / "callbacks").unlink()
        (source / "fl_lightning" / "callbacks").write_text("../callbacks")
    line = [
        "uv",
        "build",
        "--wheel",
        "--no-config",
        "--python",
        sys.executable,
        "--out-dir",
        str(out),
        str(source),
    ]
    done = subprocess.run(
        line, cwd=source, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.mark.slow
def test_a_wheel_holds_every_module_once_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    held = [name for name in names if ".dist-info/" not in name]
    assert len(held) == len(set(held))
    wanted = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "fl_lightning").rglob("*.py")
        if "callbacks" not in path.parts
    }
    for top, pattern in (
        ("callbacks", "*.py"),
        ("configs", "*.py"),
        ("configs", "*.yaml"),
        ("configs", "*.csv"),
        ("slurm", "*"),
    ):
        found = [
            path
            for path in (ROOT / top).rglob(pattern)
            if path.is_file() and "__pycache__" not in path.parts
        ]
        wanted |= {f"fl_lightning/{path.relative_to(ROOT)}" for path in found}
    patterns = [
        *("lab/audit/page.*", "lab/report/page.*", "lab/report/base.*", "lab/worth/page.*"),
        "sites/app_*",
    ]
    pages = [path for each in patterns for path in (ROOT / "fl_lightning").glob(each)]
    wanted |= {str(path.relative_to(ROOT)) for path in pages}
    others = {"py.typed", "__init__.pyi", "configuration/index.json"}
    assert set(held) == wanted | {f"fl_lightning/{name}" for name in others}
    assert any(name.endswith("/LICENSE") for name in names)


def run(cwd: Path, *line: str) -> str:
    """What a command that ends well prints; this project's own environment is hidden from it."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    env |= {"WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        line, cwd=cwd, env=env, capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def installed(archive: Path, venv: Path) -> str:
    """The Python of a new environment with a wheel or sdist, which borrows the dependencies of this
    one."""
    python = str(venv / "bin" / "python")
    run(venv.parent, sys.executable, "-m", "venv", "--without-pip", str(venv))
    run(
        venv.parent,
        "uv",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-config",
        "--python",
        python,
        str(archive),
    )
    site = run(
        venv.parent, python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"
    ).strip()
    # after the archive's own
    Path(site, "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.mark.slow
def test_an_sdist_is_whole_and_passes_its_own_tests(
    source: Path, files: list[str], tmp_path: Path
) -> None:
    """All that git knows; of its tests some that read files beside the package, and a run."""
    line = [
        "uv",
        "build",
        "--sdist",
        "--no-config",
        "--python",
        sys.executable,
        "--out-dir",
        str(tmp_path),
        str(source),
    ]
    run(tmp_path, *line)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(
            tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
        )
    root = archive.with_name(archive.name.removesuffix(".tar.gz"))
    unpacked = {str(file.relative_to(root)) for file in root.rglob("*") if file.is_file()}
    assert {name for name in files if name != "fl_lightning/callbacks"} <= unpacked
    python = installed(archive, tmp_path / "venv")
    tests = [
        "test_mixing.py",
        "test_house.py",
        "test_configs.py",
        "test_site.py",
        "e2e/test_commands.py",
    ]
    out = run(
        root, python, "-P", "-m", "pytest", "-q", "-n", "0", *(f"tests/{name}" for name in tests)
    )
    assert re.search(r"^\d+ passed", out, re.MULTILINE), out


@pytest.mark.slow
def test_a_wheel_works_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    """Installed into an environment of its own, which borrows the dependencies of this one."""
    empty = tmp_path / "empty"
    empty.mkdir()
    venv = tmp_path / "venv"
    python = installed(wheel, venv)

    where = run(
        empty,
        python,
        "-c",
        "import fl_lightning, fl_lightning.callbacks as c; print(fl_lightning.__file__, "
        "c.__file__)",
    )
    assert all(word.startswith(str(venv)) for word in where.split())
    command = str(venv / "bin" / "fl-train")
    listed = [line.split()[0] for line in run(empty, command, "list", "configs").splitlines()]
    assert listed == sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
    out = run(
        empty,
        command,
        "fit",
        "--config",
        "kapc_mnist.yaml",
        "--smoke",
        "--fabric.accelerator",
        "cpu",
    )
    assert "runs/kapc_mnist-001" in out
    assert (empty / "runs" / "kapc_mnist-001" / "summary.json").exists()
