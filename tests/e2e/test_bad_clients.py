"""Clients that fail in real runs: on one process and on two, cut in half and resumed, the numbers
are the same."""

from pathlib import Path

import pytest

FAULT = "--callbacks fl_own_models.Fault --callbacks.fault.at [2,4] --federation.rounds 4"
METHODS = ("fedavg", "kapc")
LINES = {
    "raise": "stage upload: OSError: the disk of this client is gone (traceback in failure.txt)",
    "nan": "stage upload: its upload is not finite; lower optimizer.lr",
    "shape": "stage upload: ValueError: its upload is torch.float32 of shape (5,), not "
    "torch.float32 "
    "of shape (",
    "explode": "stage training: its model is not finite; lower optimizer.lr",
}


def all_of(folder, record):
    return record(folder), (folder / "failures.csv").read_text()


@pytest.mark.sampled("explode")
@pytest.mark.parametrize("kind", LINES)
def test_skip_says_so_counts_and_lists(kind, fit, table, capsys):
    folder = fit("a", FAULT, f"--callbacks.fault.kind {kind} --federation.on_bad_client skip")
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("client ")]
    assert [line.endswith("; skipped") for line in told] == [True, True]
    assert [LINES[kind] in line for line in told] == [True, True]
    assert [row["clients_failed"] for row in table(folder)] == ["0", "1", "0", "1"]
    assert len(table(folder, "clients.csv")) == 4 * 5 - 2
    listed = [
        (row["round"], row["client"], row["outcome"]) for row in table(folder, "failures.csv")
    ]
    assert listed == [("2", "1", "skipped"), ("4", "1", "skipped")]
    assert all(
        f"stage {row['stage']}: {row['reason']}" in line
        for row, line in zip(table(folder, "failures.csv"), told, strict=True)
    )


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


@pytest.mark.sampled("kapc")
@pytest.mark.parametrize("method", METHODS)
def test_a_retried_client_leaves_no_trace(method, fit, table, record):
    import fl_own_models

    fl_own_models.Fault.done.clear()
    flags = f"{FAULT} --method {method} --federation.on_bad_client retry"
    folder = fit("a", flags, "--callbacks.fault.once true")
    assert [row["outcome"] for row in table(folder, "failures.csv")] == ["retried", "retried"]
    assert record(folder) == record(fit("b", flags, "--callbacks.fault.at []"))
