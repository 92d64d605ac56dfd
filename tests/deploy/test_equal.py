"""A centre and its sites, by messages of bytes alone, come to the bits of the simulator; and what
may not travel."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fl_lightning.configuration import catalogue
from fl_lightning.configuration.flags import layers_of_flags, read_flags
from fl_lightning.configuration.resolve import resolve
from fl_lightning.results.folder import RunFolder
from fl_lightning.sites.rehearsal import differences, rehearse, simulate
from tests.faults.refusals import refuses
from tests.methods.every import FEW

SMALL = """
--config kapc_exact_digits --loggers null --callbacks null --fabric.accelerator cpu --fabric.threads 1
--model mlp --model.hidden [16] --data.fraction 0.3 --data.validation 0.2 --data.public held_back
--federation.clients 3 --federation.local_epochs 1 --federation.rounds 2 --federation.batch_size 16
"""
REFUSED = {
    "fedora": ("Propagation.init_server", "run.data.client(0)"),
    "fedproto": ("FedProto.outputs", "run.server.memory['means.known']"),
    "fedtgp": ("FedTGP.outputs", "run.server.memory['means.known']"),
    "pfedfda": ("PFedFDA.adapted", "run.server.memory['gaussian.means']"),
}
"""Methods, the hook, and what it reads that is not transmitted."""
PAGE = Path(__file__).resolve().parents[2] / "docs" / "deploy.md"


ADAPTED = ("fedsalora", "ffalora")
"""Methods that work on adapters."""


def config_of(method, *flags):
    """Of a federation that takes no time."""
    small = SMALL.replace("--model.hidden [16]", "") if "--model" in flags else SMALL
    words = [
        *small.split(),
        "--method",
        method,
        *(f"--method.{k}={v}" for k, v in FEW.get(method, {}).items()),
    ]
    words += ["--model.adapters.rank=2"] if method in ADAPTED else []
    return resolve(layers_of_flags(read_flags([*words, *flags])[1])[0])


@pytest.mark.sampled
@pytest.mark.parametrize(
    "method", [name for name in catalogue.table("methods") if name not in REFUSED]
)
def test_every_method_comes_to_the_same_bits(method, tmp_path):
    config = config_of(method)
    assert differences(simulate(config, tmp_path), rehearse(config, tmp_path)) == []


@pytest.mark.sampled("fedproto")
@pytest.mark.parametrize("method", REFUSED)
def test_a_hook_that_reads_what_is_not_transmitted_is_named(method, tmp_path):
    hook, what = REFUSED[method]
    with refuses(re.escape(f"{hook} reads {what}, which is not transmitted")):
        rehearse(config_of(method), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, flags",
    [
        ("selfkapc", "--federation.participation 0.67 --federation.rounds 4"),
        ("crosskapc", "--method.guard 0 --federation.clients 4 --federation.rounds 8"),
        (
            "fedavg",
            "--evaluation.judge before --federation.participation 0.67 --federation.rounds 3",
        ),
        ("fedavg", "--fabric.precision bf16-true"),
        ("fedper", "--evaluation.judge finetuned"),
        ("ditto", "--optimizer.keep_state true --optimizer.momentum 0.9"),
        ("pfedhn", "--model tests.conftest.NormNet"),
        ("fedbn", "--model tests.conftest.NormNet"),
        ("kapc", "--model tests.conftest.NormNet"),
        ("scaffold", "--model tests.conftest.NormNet"),
        ("kapc", "--callbacks.layerselection.mu 0.5 --federation.rounds 4"),
        (
            "kapc",
            "--callbacks.layerselection.mu 0.5 --federation.participation 0.67 "
            "--federation.rounds 4",
        ),
        (
            "selfkapc",
            "--callbacks.layerselection.mu 0.5 --model tests.conftest.NormNet "
            "--federation.rounds 4",
        ),
        ("fedper", "--callbacks.localprivacy.clip 1 --callbacks.localprivacy.noise 1"),
        ("scaffold", "--callbacks.localprivacy.clip 1 --callbacks.localprivacy.epsilon_target 8"),
        (
            "fedhkd",
            "--method.sigma 0 --callbacks.localprivacy.clip 1 --callbacks.localprivacy.noise 1",
        ),
    ],
)
def test_other_settings_come_to_the_same_bits(method, flags, tmp_path):
    config = config_of(method, *flags.split())
    assert differences(simulate(config, tmp_path), rehearse(config, tmp_path)) == []


@pytest.mark.slow
@pytest.mark.parametrize("balance", ["sampler", "weights"])
def test_classes_count_alike_at_a_site_as_in_the_simulator(balance, tmp_path):
    """A site weighs or draws by its own class counts, which it does not send."""
    config = config_of("fedavg", "--data.balance", balance)
    balanced = simulate(config, tmp_path)
    assert differences(balanced, rehearse(config, tmp_path)) == []
    (tmp_path / "plain").mkdir()
    plain = simulate(config_of("fedavg"), tmp_path / "plain")
    assert any("train_loss" in line for line in differences(balanced, plain))


def test_the_comparison_sees_a_difference(tmp_path):
    one = simulate(config_of("fedavg"), tmp_path)
    (tmp_path / "other").mkdir()
    other = rehearse(config_of("fedavg", "--optimizer.lr", "0.011"), tmp_path / "other")
    assert any("accuracy" in line or "train_loss" in line for line in differences(one, other))


# ---------------------------------------------------------------- transforms


@pytest.mark.slow
def test_transforms_at_both_ends(tmp_path):
    """KAPC+BLS: the centre leaves layers out of downloads, sites out of uploads, and the tables say
    which."""
    config = config_of("kapc", "--callbacks.layerselection.mu", "0.2", "--federation.rounds", "3")
    (tmp_path / "whole").mkdir()
    run = rehearse(config, tmp_path)
    assert differences(simulate(config, tmp_path), run) == []
    rounds, whole = (
        RunFolder(run).read("metrics"),
        RunFolder(simulate(replace(config, callbacks={}), tmp_path / "whole")).read("metrics"),
    )
    for way in ("upload_bytes", "download_bytes"):
        assert any(
            0 < some[way] < all_of_it[way] for some, all_of_it in zip(rounds, whole, strict=True)
        )
