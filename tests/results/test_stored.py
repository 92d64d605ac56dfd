"""Stored folders and archives are read, and what is said of them is what was said (stored.py)."""

import difflib

import pytest
import stored


def held(name, now):
    before = stored.expected()[name]
    lines = difflib.unified_diff(
        before.splitlines(), now.splitlines(), "stored", "now", lineterm="", n=0
    )
    assert before, "nothing is stored"
    assert now == before, "\n".join(line[:300] for line in [*lines][:40])


@pytest.mark.sampled("compare.txt")
@pytest.mark.parametrize("name", stored.COMMANDS)
def test_what_commands_print_of_stored_runs(name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    held(name, stored.printed(stored.COMMANDS[name]))


@pytest.mark.sampled("report.html")
@pytest.mark.parametrize("name", stored.REPORTS)
def test_pages_on_stored_runs(name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    held(name, stored.page(stored.REPORTS[name], folder / name))


def test_what_is_stored_is_small():
    assert stored.EXPECTED.stat().st_size < 200_000
    assert sum(file.stat().st_size for file in stored.HERE.glob("*.*z*")) < 200_000
