"""What is shipped: the lists in pyproject.toml agree with the disk, and a wheel works on its
own."""

import os
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).resolve().parents[1]
MAPPED = {"callbacks", "configs", "slurm"}
"""Folders at the top that are subpackages of fl_lightning."""


@pytest.fixture(scope="module")
def pyproject():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def files():
    """Paths of the project's files, relative to its root."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no git checkout")
    line = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    out = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in out.split("\0") if name and (ROOT / name).exists()]


def packages_on_disk():
    """Folders with an `__init__.py`, by import name."""
    inside = {path.parent for path in (ROOT / "fl_lightning").rglob("__init__.py")}
    mapped = {path.parent for top in MAPPED for path in (ROOT / top).rglob("__init__.py")}
    own = {".".join(folder.relative_to(ROOT).parts) for folder in inside}
    return own | {".".join(("fl_lightning", *folder.relative_to(ROOT).parts)) for folder in mapped}


def test_pip_and_uv_are_held_to_the_same_versions(pyproject):
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = [line for line in lines if line and not line.startswith("#")]
    assert constraints == pyproject["tool"]["uv"]["constraint-dependencies"]
    assert all("==" in line for line in constraints)
    assert (
        runpy.run_path(str(ROOT / ".ci" / "constraints.py"))["text"]()
        == (ROOT / "constraints.txt").read_text()
    )


def test_the_packages_are_those_on_the_disk(monkeypatch):
    arguments = {}
    monkeypatch.setattr(setuptools, "setup", arguments.update)
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    assert set(arguments["packages"]) == packages_on_disk()
    assert len(arguments["packages"]) == len(set(arguments["packages"]))
    assert arguments["package_dir"] == {f"fl_lightning.{name}": name for name in MAPPED}


# ---------------------------------------------------------------- the wheel


@pytest.fixture
def source(files, tmp_path_factory):
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
def wheel(request, source, tmp_path):
    """A wheel built of a copy; once of a checkout without symlinks."""
    out = tmp_path / "wheel"
    if request.param == "no link":
        (source / "fl_lightning" / "callbacks").unlink()
        (source / "fl_lightning" / "callbacks").write_text("../callbacks")
    line = shlex.split("uv build --wheel --no-config --python")
    line += [sys.executable, "--out-dir", str(out), str(source)]
    done = subprocess.run(
        line, cwd=source, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.mark.slow
def test_a_wheel_holds_every_module_once_and_nothing_else(wheel):
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
    patterns = ["lab/*/page.*", "lab/report/base.*", "sites/app_*"]
    pages = [path for each in patterns for path in (ROOT / "fl_lightning").glob(each)]
    wanted |= {str(path.relative_to(ROOT)) for path in pages}
    others = {"py.typed", "__init__.pyi", "configuration/index.json"}
    assert set(held) == wanted | {f"fl_lightning/{name}" for name in others}
    assert any(name.endswith("/LICENSE") for name in names)


def run(cwd, *line):
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


@pytest.mark.slow
def test_a_wheel_works_in_an_empty_folder(wheel, tmp_path):
    """Installed into an environment of its own, which borrows the dependencies of this one."""
    empty = tmp_path / "empty"
    empty.mkdir()
    venv = tmp_path / "venv"
    python = str(venv / "bin" / "python")
    run(empty, sys.executable, "-m", "venv", "--without-pip", str(venv))
    install = shlex.split("uv pip install --quiet --no-deps --no-config --python")
    run(empty, *install, python, str(wheel))
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = run(empty, python, "-c", where).strip()
    # after the wheel's own
    Path(site, "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
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
    words = shlex.split("fit --config kapc_mnist.yaml --smoke --fabric.accelerator cpu")
    out = run(empty, command, *words)
    assert "runs/kapc_mnist-001" in out
    assert (empty / "runs" / "kapc_mnist-001" / "summary.json").exists()
