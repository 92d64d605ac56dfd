"""What sites send, for every deployed method: none of their samples, labels or personal blocks; and
how many bytes."""

import json

import numpy as np
import pytest
import torch

from fl_lightning.configuration import catalogue
from fl_lightning.results.folder import RunFolder
from fl_lightning.sites import wire
from fl_lightning.sites.rehearsal import LocalTransport, rehearse

from .test_equal import REFUSED, config_of

RUN = 8
"""Numbers of a block, one behind the other, that are searched for."""
A_MESSAGE = 3000
"""Bytes of a message beside its vectors: header and names."""
DEPLOYED = [name for name in catalogue.table("methods") if name not in REFUSED]


class Watched(LocalTransport):
    """Keeps what goes both ways, and after each answer the numbers at its site: those of blocks
    that its method uploads, and those that stay."""

    def push(self, address, message, ttl):
        name = super().push(address, message, ttl)
        kind = wire.unpack(message)["kind"]
        self.sent.append((kind, message))
        self.come.append((kind, self.waiting[-1][1]))
        site = self.sites[address].site  # type: ignore[attr-defined]
        for uploaded, numbers in numbers_of(site):
            seen = self.uploaded if uploaded else self.personal
            seen |= {(address, run) for run in runs_of(numbers)}
        return name


def watched(kept):
    def made(sites):
        transport = Watched(sites)
        transport.sent, transport.come = [], []
        transport.personal, transport.uploaded = set(), set()
        kept.append(transport)
        return transport

    return made


def numbers_of(site):
    """Whether a client's method uploads them, and numbers: of blocks of its model, of vectors that
    are not exchanged, and of its memory."""
    state = site.fed.run.states.get(site.client)
    if state is None:
        return
    blocks = site.group.layout.blocks
    for block, uploaded in zip(blocks, site.group.up_mask, strict=True):
        yield bool(uploaded), state.vectors["model"][block.start : block.stop]
    for name, slot in site.fed.run.method.slots().items():
        for block in blocks if not slot.exchanged else ():
            yield False, state.vectors[name][block.start : block.stop]
    for kept in state.memory.values():
        yield False, kept.flatten()


def secrets(transport):
    """Of what stays with clients: what is not uploaded as part of the model, and what the centre
    does not know anyway (units that no sample reaches keep the values that it has sent, or that all
    begin with)."""
    sent = b"".join(message for _, message in transport.sent)
    initial = transport.sites[0].site.group.initial.numpy().tobytes()
    return {
        (c, run)
        for c, run in transport.personal - transport.uploaded
        if run not in sent and run not in initial
    }


def runs_of(numbers):
    """Pieces of `numbers` that nothing else is likely to be."""
    for start in range(0, len(numbers) - RUN + 1, RUN):
        run = numbers[start : start + RUN].numpy()
        if len(np.unique(run)) > RUN // 2:
            yield run.tobytes()


def own_runs(file):
    """A site's samples and labels, in each form that a message could have them."""
    with np.load(file) as content:
        for part in ("train", "validation", "test"):
            x, y = content[f"x_{part}"], content[f"y_{part}"]
            for kind in (np.float32, np.float64, np.uint8):
                yield from (sample.astype(kind).tobytes() for sample in x.reshape(len(x), -1))
            yield from (
                y[:16].astype(kind).tobytes() for kind in (np.int64, np.int32, np.uint8, np.float32)
            )
            yield json.dumps(y[:16].tolist())[1:-1].encode()


@pytest.mark.sampled("fedper")
@pytest.mark.parametrize("method", DEPLOYED)
def test_nothing_personal_is_in_what_sites_send(method, tmp_path):
    kept = []
    rehearse(config_of(method), tmp_path, watched(kept))
    sent = b"".join(answer for _, answer in kept[0].come)
    assert not [client for client, run in secrets(kept[0]) if run in sent]
    for client in range(3):
        file = tmp_path / "data" / f"site-{client}.npz"
        site = kept[0].sites[client].site
        normalised = [x.numpy().tobytes() for x in site.data.client(client).train.x]
        assert not any(run in sent for run in [*own_runs(file), *normalised])
    if method in ("fedper", "ditto"):  # the classifier; a whole model
        assert len(secrets(kept[0])) > {"fedper": 3 * 2 * RUN, "ditto": 3 * 2 * 64}[method]


def test_the_search_finds_what_is_sent(tmp_path):
    """A site that also sends its first sample, its labels and its classifier."""
    kept = []
    rehearse(config_of("fedper"), tmp_path, watched(kept))
    runs = [*own_runs(tmp_path / "data" / "site-1.npz")]
    with np.load(tmp_path / "data" / "site-1.npz") as content:
        x, y = content["x_train"][0].astype(np.float32), content["y_train"].astype(np.int64)
    leaks = (torch.from_numpy(x), torch.from_numpy(y))
    assert all(any(run in wire.pack({"leak": leak}) for run in runs) for leak in leaks)
    model = kept[0].sites[1].site.fed.run.states[1].vectors["model"]
    assert any(run in wire.pack({"leak": model}) for client, run in kept[0].personal if client == 1)


def test_an_upload_in_the_clear_is_no_part_of_a_private_deployment(tmp_path):
    """Sites send noisy models; epsilon is counted at the centre."""
    kept = []
    flags = "--callbacks.localprivacy.clip 1 --callbacks.localprivacy.noise 1"
    run = rehearse(config_of("fedper", *flags.split()), tmp_path, watched(kept))
    sent = b"".join(answer for _, answer in kept[0].come)
    assert kept[0].uploaded
    assert not any(run in sent for _, run in kept[0].uploaded)
    first, second = (row["privacy_epsilon"] for row in RunFolder(run).read("metrics"))
    assert 0 < first < second


@pytest.mark.sampled("fedper")
@pytest.mark.parametrize("method", DEPLOYED)
def test_bytes_of_visits_are_those_of_the_ledger(method, tmp_path):
    """Both ways, within 2 % and a constant a message."""
    kept = []
    run = rehearse(config_of(method, "--model.hidden", "[256]"), tmp_path, watched(kept))
    rows = RunFolder(run).read("clients")
    for column, messages in (("upload_bytes", kept[0].come), ("download_bytes", kept[0].sent)):
        ledger, visits = (
            sum(row[column] for row in rows),
            [len(m) for kind, m in messages if kind == "visit"],
        )
        assert len(visits) == len(rows) == 6
        assert ledger <= sum(visits) <= 1.02 * ledger + A_MESSAGE * len(visits)
