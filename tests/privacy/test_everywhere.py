"""Runs with noise give the same bits on one, two and three ranks, and after a resume."""

import pytest

from fl_lightning.results.folder import RunFolder

LOCAL = "--callbacks.localprivacy.clip 1 --callbacks.localprivacy.noise 1"
CENTRAL = "--callbacks.centralprivacy.clip 1 --callbacks.centralprivacy.noise"
STEP = "--optimizer.privacy.clip 1 --optimizer.privacy.noise 1"
BLUR = "--callbacks.blurrelation.noise 0.3"
RUNS = [
    f"--method selfkapc {LOCAL}",
    f"--method fedper {CENTRAL} 0.3 --callbacks.centralprivacy.quantile 0.5",
    f"--method fedavg --callbacks.canaries.guesses 0.5 {CENTRAL} 5 --federation.clients 8",
    f"--method fedavg {STEP}",
    f"--method kapc {STEP}",
    f"--method ditto {STEP}",
    f"--method kapc {BLUR}",
    f"--method simpfd {BLUR} --data.public held_back --method.samples 24",
]


def traces(folder):
    """Tables without times and memory, the relation, and what the summary says of privacy."""
    run, clock = RunFolder(folder), ("seconds", "memory")
    rows = [
        {k: v for k, v in row.items() if not k.startswith(clock)}
        for name in ("metrics", "clients", "final")
        for row in run.read(name)
    ]
    rounds = [t for t in (1, 2, 3) if run.relation_file(t).exists()]
    relations = [run.read_relation(t).rows.tolist() for t in rounds]
    summary = {k: v for k, v in run.read_summary().items() if k.startswith("privacy_")}
    return rows, relations, summary


@pytest.mark.slow
@pytest.mark.parametrize("flags", RUNS)
def test_the_same_bits_on_ranks_and_after_a_resume(fit, flags):
    flags += " --callbacks.checkpoint.seconds 0"
    undisturbed = traces(fit("whole", flags))
    for ranks in (2, 3):
        assert traces(fit(f"ranks-{ranks}", flags, f"--fabric.devices {ranks}")) == undisturbed
    fit("part", flags, "--federation.rounds 2")
    assert traces(fit("part", flags, "--resume --federation.rounds 3")) == undisturbed
