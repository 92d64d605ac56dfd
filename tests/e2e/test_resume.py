"""Broken off and resumed is the same as never broken off, bit for bit."""

from pathlib import Path

import pytest
from lines import run_line

from fl_lightning.foundation.csvtable import CsvTable

RUNS = {
    "stepped": "--method.solver step --method.start own --method.prior uniform --method.rho_units "
    "absolute",
    "partial": "--federation.participation 0.5 --evaluation.every 2",
    "adam": "--optimizer.name adam --optimizer.keep_state true --federation.participation 0.5 "
    "--optimizer.lr 0.01",
    "compressed": "--callbacks layerselection,quantize --federation.participation 0.5 "
    "--optimizer.momentum "
    "0.5",
    "stacked": "--fabric.executor vmap --federation.participation 0.6 --optimizer.momentum 0.5"
    " --optimizer.keep_state true",
    "normed": "--model fl_own_models.Normed --method fedavg --federation.participation 0.5",
}


@pytest.mark.sampled("compressed")
@pytest.mark.parametrize("flags", RUNS.values(), ids=RUNS)
def test_in_two_parts_as_in_one(fit, record, flags):
    whole = fit("whole", flags, "--federation.rounds 6")
    fit("parts", flags, "--federation.rounds 3")
    parts = fit("parts", flags, "--federation.rounds 6 --resume")
    expected, found = record(whole), record(parts)
    # the first part's last round is judged because it is the last: that is all
    if "every" in flags:
        for record_ in (expected, found):
            for row in [record_.metrics[2], *(r for r in record_.clients if r["round"] == "3")]:
                row.update({column: "" for column in row if "accuracy" in column})
    assert found == expected


def test_without_a_config_and_when_there_is_nothing_to_do(fit, record):
    whole = fit("a", "--resume")  # safe on a first start
    before = record(whole)
    assert run_line("fit --name a --resume") == 0
    assert record(whole) == before


BURSTING = "--model fl_own_models.Bursting --federation.batch_size 1000"


@pytest.mark.slow
def test_broken_off_before_its_first_checkpoint_a_run_begins_again(fit, record, bursts, capsys):
    """Which is told; a run that should have one by now is refused."""
    whole = record(fit("unbroken", BURSTING, "--federation.rounds 4"))
    bursts.at = 2 + 5 * 2 + 2  # client 1 in round 3
    with pytest.raises(AssertionError):
        fit("parts", BURSTING, "--federation.rounds 4")
    bursts.at = 0
    assert not Path("runs/parts/checkpoints").exists() and Path("runs/parts/metrics.csv").exists()
    table = CsvTable(Path("runs/parts/metrics.csv"))
    text = table.path.read_text()
    first, *rows = table.read()
    table.write([first | {"seconds": 11.0}, *rows])  # rounds as long as these are saved
    with pytest.raises(AssertionError):
        fit("parts", BURSTING, "--federation.rounds 4 --resume")
    assert "it would begin again" in capsys.readouterr().err
    table.path.write_text(text)
    flags = "--federation.rounds 4 --resume --callbacks.checkpoint.seconds 0"
    assert record(fit("parts", BURSTING, flags)) == whole
    line = "resume: the run was stopped before its first checkpoint; it begins again"
    assert line in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_keeps_no_checkpoints_begins_again(fit, bursts, capsys):
    flags = f"{BURSTING} --federation.rounds 3 --callbacks null"
    whole = (fit("unbroken", flags) / "final.csv").read_text()
    bursts.at = 2 + 5 + 2  # client 1 in round 2
    with pytest.raises(AssertionError):
        fit("parts", flags)
    bursts.at = 0
    assert len(Path("runs/parts/metrics.csv").read_text().splitlines()) == 2
    capsys.readouterr()
    assert (fit("parts", flags, "--resume") / "final.csv").read_text() == whole
    assert len(Path("runs/parts/metrics.csv").read_text().splitlines()) == 4
    line = "resume: the run keeps no checkpoints; it begins again, with the same numbers"
    assert line in capsys.readouterr().err


@pytest.mark.slow
def test_rounds_after_the_last_checkpoint_are_run_again(fit, record, bursts):
    """A checkpoint every other round: what was written of round 3 is forgotten and written again,
    once."""
    flags = f"--callbacks.checkpoint.every 2 --callbacks.checkpoint.seconds 0 {BURSTING}"
    flags += " --federation.rounds 4"
    unbroken_record = record(fit("unbroken", flags))
    bursts.at = 2 + 5 * 3 + 2  # client 1 in round 4, when checkpoint 2 is the last
    with pytest.raises(AssertionError):
        fit("parts", flags)
    bursts.at = 0
    assert record(fit("parts", flags, "--resume")) == unbroken_record
