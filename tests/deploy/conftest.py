"""Flower in an environment of its own, and deployments that end with the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .machines import Machines, environment


@pytest.fixture(scope="session")
def flower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of Flower's commands."""
    return environment(tmp_path_factory.mktemp("flower") / "env")


@pytest.fixture
def machines(flower: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    """Processes of a deployment in this test's folder, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    made = Machines(flower, tmp_path)
    yield made
    made.end()
