"""Flower in an environment of its own, and deployments that end with the test."""

import pytest

from .machines import Machines, environment


@pytest.fixture(scope="session")
def flower(tmp_path_factory):
    """The folder of Flower's commands."""
    return environment(tmp_path_factory.mktemp("flower") / "env")


@pytest.fixture
def machines(flower, tmp_path, monkeypatch):
    """Processes of a deployment in this test's folder, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    made = Machines(flower, tmp_path)
    yield made
    made.end()
