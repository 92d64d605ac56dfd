"""The number of processes changes no number: neither what is measured nor a single bit of a
weight."""

import subprocess
import sys
from pathlib import Path

import pytest

RUNS = {
    "normed": "--model fl_own_models.Normed --method.classifier own --optimizer.momentum 0.9 "
    "--data.global_test true"
    " --evaluation.metrics [balanced_accuracy,f1,auroc,calibration,class_share_accuracy]",
    "selected": "--callbacks layerselection,quantize,wireless --callbacks.layerselection.mu 0.5",
    "trimmed": "--method fedavg --callbacks attack,trimmedmean --callbacks.attack.kind noise"
    " --callbacks.attack.share 0.2 --callbacks.trimmedmean.share 0.2",
    "krum": "--method fedbn --model fl_own_models.Normed --callbacks attack,krum "
    "--callbacks.attack.kind sign_flip"
    " --callbacks.attack.clients [1] --callbacks.krum.attackers 1 --callbacks.krum.keep 2",
    "compressed": "--callbacks layerselection,quantize,wireless"
    " --federation.participation 0.5 --optimizer.momentum 0.5",
    "mixed": "--config ../mixed.yaml --method fedavg --federation.participation 0.6",
    "taught": "--config ../mixed.yaml --method ktpfl --method.samples 24 --data.public held_back"
    " --federation.participation 0.6",
    # a rank has no client of the cohort
    "lonely": "--federation.participation 0.1 --callbacks quantize",
    "stacked": "--fabric.executor vmap --federation.participation 0.6 --optimizer.momentum 0.5",
    "newcomers": "--data.held_out_clients 0.4 --federation.participation 0.6 "
    "--evaluation.newcomer_samples "
    "[0,5]",
    "kept": "--optimizer.name adam --optimizer.keep_state true --federation.participation 0.5 "
    "--fabric.bank host",
    "banked": "--fabric.bank disk --callbacks quantize --federation.participation 0.6",
}


@pytest.mark.sampled("compressed")
@pytest.mark.sampled("compressed-2", "newcomers-2")  # more runs on two ranks are golden
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", RUNS)
def test_several_processes_give_what_one_gives(
    name,
    ranks,
    fit,
    small,
    on_ranks,
    record,
):
    on_ranks(ranks, small("several", RUNS[name]))
    one = fit("one", RUNS[name])
    assert record(one.with_name("several")) == record(one)
    assert record(one).weights


@pytest.mark.slow
@pytest.mark.parametrize("name", ["selected", "trimmed"])
def test_ranks_that_share_no_memory_give_what_one_gives(
    name,
    fit,
    small,
    on_ranks,
    record,
    monkeypatch,
):
    """As on several machines: what they exchange goes through gloo."""
    monkeypatch.delattr("os.memfd_create")  # the ranks are forked from this process
    on_ranks(2, small("several", RUNS[name]))
    one = fit("one", RUNS[name])
    assert record(one.with_name("several")) == record(one)


@pytest.mark.slow
def test_fl_train_starts_the_processes_itself(fit, small, command, record):
    """Each imports the user's own model, too."""
    flags = (
        "--method fedamp --model fl_own_models.Normed --federation.participation 0.5 "
        "--callbacks.heatmaps.every 2"
    )
    one = fit("one", flags)
    done = command(*small("several", flags, "--fabric.devices 3"))
    assert "Traceback" not in done.stderr
    several = one.with_name("several")
    assert record(several) == record(one)
    assert '"world_size": 3' in (several / "summary.json").read_text()


@pytest.mark.slow
def test_torchrun_starts_the_processes(fit, small, workplace, record):
    bin = Path(sys.executable).parent
    line = [str(bin / "torchrun"), "--standalone", "--nproc_per_node", "2", str(bin / "fl-train")]
    line += small("several", "--fabric.devices 2")
    done = subprocess.run(
        line, cwd=workplace, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    one = fit("one")
    assert record(one.with_name("several")) == record(one)
