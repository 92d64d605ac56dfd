"""What is shipped: the lists in pyproject.toml agree with the disk, and a wheel works on its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import fl_lightning

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


def test_every_dependency_has_an_exact_version_to_test_with(pyproject: dict[str, Any]) -> None:
    groups = pyproject["dependency-groups"]
    assert pyproject["tool"]["uv"]["default-groups"] == list(groups)  # `uv sync` installs them all
    wanted = [*pyproject["project"]["dependencies"], *(line for group in groups.values() for line in group)]
    held = {line.partition("==")[0] for line in pyproject["tool"]["uv"]["constraint-dependencies"]}
    names = {line.partition(">")[0].partition("[")[0].lower() for line in wanted}
    assert names <= held


def test_the_list_of_packages_is_what_is_on_the_disk(pyproject: dict[str, Any]) -> None:
    listed = pyproject["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    assert set(listed) == packages_on_disk()
    assert pyproject["tool"]["setuptools"]["package-dir"] == {f"fl_lightning.{name}": name for name in MAPPED}


def test_python_files_lie_in_packages() -> None:
    for top in ("fl_lightning", *MAPPED):
        for path in (ROOT / top).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), path


def test_the_version_is_said_once(pyproject: dict[str, Any]) -> None:
    assert pyproject["project"]["version"] == fl_lightning.__version__


def test_the_link_to_callbacks_is_relative() -> None:
    link = ROOT / "fl_lightning" / "callbacks"
    if link.is_symlink():  # a checkout without symlinks has a small file instead
        assert os.readlink(link) == "../callbacks"
    else:
        assert link.read_text() == "../callbacks"


def test_nothing_large_and_no_lock_file_is_kept(files: list[str]) -> None:
    large = [name for name in files if (ROOT / name).is_file() and (ROOT / name).stat().st_size > 1_000_000]
    assert large == []
    assert "uv.lock" not in files  # it holds addresses of registries


# ---------------------------------------------------------------- the wheel


@pytest.fixture(scope="module", params=["link", "no link"])
def wheel(request: pytest.FixtureRequest, files: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built of a copy; once of a checkout without symlinks."""
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("no uv to build a wheel with")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in files:
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    if request.param == "no link":
        (source / "fl_lightning" / "callbacks").unlink()
        (source / "fl_lightning" / "callbacks").write_text("../callbacks")
    line = [uv, "build", "--wheel", "--no-config", "--python", sys.executable, "--out-dir", str(out), str(source)]
    done = subprocess.run(line, cwd=source, capture_output=True, text=True, timeout=300, check=False)
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
        str(path.relative_to(ROOT)) for path in (ROOT / "fl_lightning").rglob("*.py") if "callbacks" not in path.parts
    }
    for top, pattern in (
        ("callbacks", "*.py"),
        ("configs", "*.py"),
        ("configs", "*.yaml"),
        ("configs", "*.csv"),
        ("slurm", "*"),
    ):
        found = [path for path in (ROOT / top).rglob(pattern) if path.is_file() and "__pycache__" not in path.parts]
        wanted |= {f"fl_lightning/{path.relative_to(ROOT)}" for path in found}
    wanted |= {str(path.relative_to(ROOT)) for path in (ROOT / "fl_lightning" / "report").glob("page.*")}
    assert set(held) == wanted | {"fl_lightning/py.typed", "fl_lightning/__init__.pyi"}
    assert any(name.endswith("/LICENSE") for name in names)


@pytest.mark.slow
def test_a_wheel_works_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    """Installed into an environment of its own, which borrows the dependencies of this one."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {"WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}

    def run(*line: str) -> str:
        done = subprocess.run(line, cwd=empty, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    empty = tmp_path / "empty"
    empty.mkdir()
    venv = tmp_path / "venv"
    python = str(venv / "bin" / "python")
    run(sys.executable, "-m", "venv", "--without-pip", str(venv))
    run("uv", "pip", "install", "--quiet", "--no-deps", "--python", python, str(wheel))
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(site, "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")  # after the wheel's own

    where = run(
        python, "-c", "import fl_lightning, fl_lightning.callbacks as c; print(fl_lightning.__file__, c.__file__)"
    )
    assert all(word.startswith(str(venv)) for word in where.split())
    command = str(venv / "bin" / "fl-train")
    listed = [line.split()[0] for line in run(command, "list", "configs").splitlines()]
    assert listed == sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
    out = run(command, "fit", "--config", "kapc_mnist.yaml", "--smoke", "--fabric.accelerator", "cpu")
    assert "runs/kapc_mnist-001" in out
    assert (empty / "runs" / "kapc_mnist-001" / "summary.json").exists()
