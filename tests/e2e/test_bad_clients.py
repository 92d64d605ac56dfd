"""Clients that fail in real runs: on one process and on two, cut in half and resumed, the numbers
are the same."""

from pathlib import Path

import pytest

FAULT = "--callbacks fl_own_models.Fault --callbacks.fault.at [2,4] --federation.rounds 4"
METHODS = ("fedavg", "kapc")


def all_of(folder, record):
    return record(folder), (folder / "failures.csv").read_text()


def test_skip_says_so_counts_and_lists(fit, table, capsys):
    folder = fit("a", FAULT, "--federation.on_bad_client skip")
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("client ")]
    assert [row["clients_failed"] for row in table(folder)] == ["0", "1", "0", "1"]
    assert len(table(folder, "clients.csv")) == 4 * 5 - 2
    listed = table(folder, "failures.csv")
    assert [(row["round"], row["client"]) for row in listed] == [("2", "1"), ("4", "1")]
    for row, line in zip(listed, told, strict=True):
        assert f"stage {row['stage']}: {row['reason']}" in line
        assert line.endswith(f"; {row['outcome']}") and row["outcome"] == "skipped"


@pytest.mark.slow
def test_skipping_is_the_same_on_two_processes_and_after_a_resume(
    fit,
    small,
    on_ranks,
    record,
):
    flags = {m: f"{FAULT} --federation.on_bad_client skip --method {m}" for m in METHODS}
    on_ranks(2, *(small(f"{m}-2", flags[m]) for m in METHODS))
    for m in METHODS:
        one = all_of(fit(m, flags[m]), record)
        assert all_of(Path(f"runs/{m}-2"), record) == one
        fit(f"{m}-cut", flags[m], "--federation.rounds 2")
        assert all_of(fit(f"{m}-cut", flags[m], "--resume"), record) == one
