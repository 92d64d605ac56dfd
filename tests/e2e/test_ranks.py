"""The number of processes changes no number: neither what is measured nor a single bit of a
weight."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RUNS = {
    "stepped": "--method.solver step --method.prior uniform --method.rho_units absolute "
    "--method.start "
    "own",
    "exact": "--federation.participation 0.5",
    "fedavg": "--method fedavg --federation.participation 0.5",
    "fedamp": "--method fedamp --federation.participation 0.5",
    "normed": "--model fl_own_models.Normed --method.classifier own --optimizer.momentum 0.9 "
    "--data.global_test true"
    " --evaluation.metrics [balanced_accuracy,f1,auroc,calibration,class_share_accuracy]",
    "selected": "--callbacks layerselection,quantize,wireless --callbacks.layerselection.mu 0.5",
    "trimmed": "--method fedavg --callbacks attack,trimmedmean --callbacks.attack.kind noise"
    " --callbacks.attack.share 0.2 --callbacks.trimmedmean.share 0.2",
    "krum": "--method fedbn --model fl_own_models.Normed --callbacks attack,krum "
    "--callbacks.attack.kind sign_flip"
    " --callbacks.attack.clients [1] --callbacks.krum.attackers 1 --callbacks.krum.keep 2",
    "median": "--method fedavg --callbacks attack,median --callbacks.attack.kind label_flip"
    " --callbacks.attack.clients [1]",
    "compressed": "--callbacks layerselection,quantize,wireless --callbacks.wireless.channel table4"
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
    "banked": "--fabric.bank disk --callbacks quantize --federation.participation 0.6",
    "kept": "--optimizer.name adam --optimizer.keep_state true --federation.participation 0.5 "
    "--fabric.bank host",
}


@pytest.mark.sampled("compressed-2", "newcomers-2")  # more runs on two ranks are golden
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", RUNS)
def test_several_processes_give_what_one_gives(
    name: str,
    ranks: int,
    fit: Callable[..., Path],
    small: Callable[..., list[str]],
    on_ranks: Callable[..., None],
    record: Any,
) -> None:
    on_ranks(ranks, small("several", RUNS[name]))
    one = fit("one", RUNS[name])
    assert record(one.with_name("several")) == record(one)
    assert record(one).weights


@pytest.mark.sampled("selected")
@pytest.mark.parametrize("name", ["selected", "trimmed"])
def test_ranks_that_share_no_memory_give_what_one_gives(
    name: str,
    fit: Callable[..., Path],
    small: Callable[..., list[str]],
    on_ranks: Callable[..., None],
    record: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on several machines: what they exchange goes through gloo."""
    monkeypatch.delattr("os.memfd_create")  # the ranks are forked from this process
    on_ranks(2, small("several", RUNS[name]))
    one = fit("one", RUNS[name])
    assert record(one.with_name("several")) == record(one)


@pytest.mark.slow
def test_fl_train_starts_the_processes_itself(
    fit: Callable[..., Path], small: Callable[..., list[str]], command: Any, record: Any
) -> None:
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
def test_torchrun_starts_the_processes(
    fit: Callable[..., Path], small: Callable[..., list[str]], workplace: Path, record: Any
) -> None:
    bin = Path(sys.executable).parent
    line = [str(bin / "torchrun"), "--standalone", "--nproc_per_node", "2", str(bin / "fl-train")]
    line += small("several", "--fabric.devices 2")
    done = subprocess.run(
        line, cwd=workplace, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    one = fit("one")
    assert record(one.with_name("several")) == record(one)


@pytest.mark.slow
def test_real_mnist_on_two_processes(
    fl_data: Path,
    fit: Callable[..., Path],
    small: Callable[..., list[str]],
    on_ranks: Callable[..., None],
    record: Any,
) -> None:
    flags = f"--data.source mnist --data.root {fl_data} --data.fraction 0.01 --data.min_samples 5"
    on_ranks(2, small("several", flags))
    one = fit("one", flags)
    assert record(one.with_name("several")) == record(one)
