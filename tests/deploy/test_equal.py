"""A centre and its sites, by messages of bytes alone, come to the bits of the simulator; and what
may not travel."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_lightning.configuration import catalogue
from fl_lightning.configuration.config import Config
from fl_lightning.configuration.flags import layers_of_flags, read_flags
from fl_lightning.configuration.resolve import resolve
from fl_lightning.foundation.errors import BadInput, RunFailed
from fl_lightning.results.folder import RunFolder
from fl_lightning.sites import wire
from fl_lightning.sites.rehearsal import LocalTransport, differences, rehearse, simulate
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
    "pfedfda": ("PFedFDA.personal", "run.server.memory['gaussian.means']"),
}
"""Methods, the hook, and what it reads that does not travel."""
PAGE = Path(__file__).resolve().parents[2] / "docs" / "deploy.md"


ADAPTED = ("fedsalora", "ffalora")
"""Methods that work on adapters."""


def config_of(method: str, *flags: str) -> Config:
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
def test_every_method_comes_to_the_same_bits(method: str, tmp_path: Path) -> None:
    config = config_of(method)
    assert differences(simulate(config, tmp_path), rehearse(config, tmp_path)) == []


@pytest.mark.sampled("fedproto")
@pytest.mark.parametrize("method", REFUSED)
def test_a_hook_that_reads_what_does_not_travel_is_named(method: str, tmp_path: Path) -> None:
    hook, what = REFUSED[method]
    with pytest.raises(BadInput, match=re.escape(f"{hook} reads {what}, which does not travel")):
        rehearse(config_of(method), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "flags"),
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
def test_other_settings_come_to_the_same_bits(method: str, flags: str, tmp_path: Path) -> None:
    config = config_of(method, *flags.split())
    assert differences(simulate(config, tmp_path), rehearse(config, tmp_path)) == []


def test_clients_keep_their_names(tmp_path: Path) -> None:
    config = config_of("fedper", "--data.client_names", "[Aarau,Basel,Chur]")
    assert differences(simulate(config, tmp_path), center := rehearse(config, tmp_path)) == []
    assert [row["name"] for row in RunFolder(center).read("final")] == ["Aarau", "Basel", "Chur"]


def test_the_page_lists_the_refused_methods() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([\w.]+)` \| `([^`]+)` \|$", PAGE.read_text(), re.MULTILINE)
    assert {name: (hook, what) for name, hook, what in rows} == REFUSED
    assert len(REFUSED) == 4 and "All methods but four" in PAGE.read_text()


def test_the_comparison_sees_a_difference(tmp_path: Path) -> None:
    one = simulate(config_of("fedavg"), tmp_path)
    (tmp_path / "other").mkdir()
    other = rehearse(config_of("fedavg", "--optimizer.lr", "0.011"), tmp_path / "other")
    assert any("accuracy" in line or "train_loss" in line for line in differences(one, other))


# ------------------------------------------------------ messages that are lost, late, or come twice


class Lossy(LocalTransport):
    """Every second message is lost once, the others arrive twice."""

    seen: dict[bytes, int]

    def push(self, address: int, message: bytes, ttl: float) -> str:
        self.seen[message] = self.seen.get(message, 0) + 1
        if len(self.seen) % 2 and self.seen[message] == 1:
            return "lost"
        name = super().push(address, message, ttl)
        self.waiting.append((name, self.sites[address](message)))
        return name


class Overheard(LocalTransport):
    """Keeps all that sites have sent."""

    sent: list[bytes]

    def push(self, address: int, message: bytes, ttl: float) -> str:
        name = super().push(address, message, ttl)
        self.sent.append(self.waiting[-1][1])  # type: ignore[arg-type]
        return name


def overheard(sent: list[bytes]) -> Callable[..., Overheard]:
    def made(sites: list[Callable[[bytes], bytes]]) -> Overheard:
        transport = Overheard(sites)
        transport.sent = sent
        return transport

    return made


def test_messages_lost_and_doubled_change_no_number(tmp_path: Path) -> None:
    seen: dict[bytes, int] = {}

    def made(sites: list[Callable[[bytes], bytes]]) -> LocalTransport:
        transport = Lossy(sites)
        transport.seen = seen
        return transport

    config = config_of("ditto")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fl_lightning.sites.rehearsal.LIMITS", (10.0, 10.0, 0.05))
        run = rehearse(config, tmp_path, made)
    assert max(seen.values()) > 1
    assert differences(simulate(config, tmp_path), run) == []


def test_nothing_personal_is_on_the_wire(tmp_path: Path) -> None:
    """FedPer's classifier and every sample of a site: no row of them is in what sites send."""
    heard: list[bytes] = []
    run = rehearse(config_of("fedper"), tmp_path, overheard(heard))
    sent = b"".join(heard)
    import numpy as np
    from safetensors.torch import load_file

    for client in range(3):
        [row, *_] = sorted(
            (tmp_path / f"site-{client}" / "checkpoints" / "rows").glob("*"), reverse=True
        )
        model = load_file(row)["row"]
        shared, personal = model[:64].numpy().tobytes(), model[-176:-16].numpy().tobytes()
        assert shared in sent
        assert personal not in sent
        with np.load(tmp_path / "data" / f"site-{client}.npz") as file:
            samples = file["x_train"]
        assert not any(sample.tobytes() in sent for sample in samples)
    assert run.name == "center"


# ---------------------------------------------------------------- hostile and failing sites


def _spoilt(how: Callable[[bytes], bytes], at: int) -> Callable[..., LocalTransport]:
    def make(sites: list[Callable[[bytes], bytes]]) -> LocalTransport:
        good = sites[at]
        return LocalTransport([*sites[:at], lambda message: how(good(message)), *sites[at + 1 :]])

    return make


def _rewritten(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    def of(answer: bytes) -> bytes:
        message = wire.unpack(answer)
        if message["kind"] == "visit":
            change(message)
        return wire.pack(message)

    return of


HOSTILE = {
    "a vector has shape": _rewritten(
        lambda m: m["payload"].update(model=m["payload"]["model"][:-1])
    ),
    "its upload is not finite": _rewritten(
        lambda m: m["payload"].update(model=m["payload"]["model"] * torch.nan)
    ),
    "answered another message": _rewritten(lambda m: m.update(round=m["round"] - 1)),
    "it holds what the method does not upload": _rewritten(
        lambda m: m["payload"]["vectors"].update(personal=m["payload"]["model"])
    ),
    "its scores are no numbers": _rewritten(lambda m: m.update(values={"accuracy": "all"})),
    "it is cut short": lambda answer: answer[:100] if b"visit" in answer else answer,
}


@pytest.mark.sampled("cut short", "not finite")
@pytest.mark.parametrize("line", HOSTILE)
def test_a_hostile_answer_costs_one_line_and_one_client(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of("fedavg", "--federation.on_bad_client", "skip")
    run = rehearse(config, tmp_path, _spoilt(HOSTILE[line], 1))
    rows = RunFolder(run).read("failures")
    assert [(row["client"], row["outcome"]) for row in rows] == [(1, "skipped"), (1, "skipped")]
    assert line in capsys.readouterr().err
    stopped = config_of("fedavg")
    (tmp_path / "again").mkdir()
    with pytest.raises(RunFailed, match=f"client 1 failed in round 1, .*site 1.*{line}"):
        rehearse(stopped, tmp_path / "again", _spoilt(HOSTILE[line], 1))


# ---------------------------------------------------------------- transforms


def test_transforms_at_both_ends(tmp_path: Path) -> None:
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


def test_an_upload_in_the_clear_is_no_part_of_a_private_deployment(tmp_path: Path) -> None:
    """What a site sends under local privacy is not its model; epsilon is counted at the centre."""
    heard: list[bytes] = []
    flags = "--callbacks.localprivacy.clip 1 --callbacks.localprivacy.noise 1"
    run = rehearse(config_of("fedavg", *flags.split()), tmp_path, overheard(heard))
    sent = b"".join(heard)
    from safetensors.torch import load_file

    for client in range(3):
        [row, *_] = sorted(
            (tmp_path / f"site-{client}" / "checkpoints" / "rows").glob("*"), reverse=True
        )
        assert load_file(row)["row"][:64].numpy().tobytes() not in sent
    epsilons = [row["privacy_epsilon"] for row in RunFolder(run).read("metrics")]
    assert 0 < epsilons[0] < epsilons[1]


def test_a_transform_that_sites_cannot_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"^callbacks.quantize: 'Quantize' is not allowed; it must be null: sites"
    ):
        rehearse(config_of("fedavg", "--callbacks", "quantize"), tmp_path)
