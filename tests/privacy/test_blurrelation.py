"""The relation that the server mixes by and logs is changed as is written, or the method is refused
by name."""

import numpy as np
import pytest
import torch
from classes import KAPC, FedAMP
from every import FEW, NAMES, method_of
from refusals import refuses
from torch.testing import assert_close

from fl_lightning.callbacks.blurrelation import BlurRelation, blurred
from fl_lightning.callbacks.privacy import LocalPrivacy
from fl_lightning.callbacks.relations import Attention
from fl_lightning.core import Server

CHANGED = {
    "fedamp",
    "fedmd",
    "fedora",
    "fedpac",
    "fedu",
    "heurfedamp",
    "kapc",
    "ktpfl",
    "ktpflmodels",
    "pfedgraph",
    "pfedla",
    "selfkapc",
    "simpfd",
    "topkpfd",
}
"""Methods whose server mixes models or predictions by a matrix; all others are refused."""
ROWS = torch.tensor([[[0.4, 0.26, 0.2, 0.14], [0.3, 0.3, 0.3, 0.1]]], dtype=torch.float64)
OWN = torch.tensor([[True, False, False, False], [False, False, False, True]])


def changed(**arguments):
    given = {"decimals": None, "noise": None, "top": None} | arguments
    rows = blurred(ROWS, OWN, **given)[0].tolist()
    return rows


def test_rounding_by_hand():
    rows = changed(decimals=1)  # 0.3, 0.2 and 0.1 of others that have 0.6
    assert rows == [pytest.approx([0.4, 0.3, 0.2, 0.1]), pytest.approx([0.3, 0.3, 0.3, 0.1])]
    rows = changed(decimals=0)  # nothing is left: all others alike
    assert rows == [pytest.approx([0.4, 0.2, 0.2, 0.2]), pytest.approx([0.3, 0.3, 0.3, 0.1])]


def test_the_greatest_by_hand():
    assert changed(top=1) == [pytest.approx([0.4, 0.6, 0, 0]), pytest.approx([0.9, 0, 0, 0.1])]
    first = 0.6 * 0.26 / 0.46
    assert changed(top=2) == [
        pytest.approx([0.4, first, 0.6 - first, 0]),
        pytest.approx([0.45, 0.45, 0, 0.1]),
    ]
    assert changed(top=9) == [pytest.approx(row) for row in ROWS[0].tolist()]


def test_noise_has_its_size_and_is_of_seed_round_receiver_and_layer():
    # so high that nothing is cut at 0
    rows, n = torch.full((2, 3, 4000), 1.0, dtype=torch.float64), 4000

    def noise(seed, round, receivers):
        blur = BlurRelation(noise=0.1)
        blur._seed = seed
        after = blur._blurred(rows[:, : len(receivers)], receivers, range(n), round)
        return after / after.mean(-1, keepdim=True) - 1

    first = noise(0, 1, [0, 1, 2])
    assert first.std(-1).sub(0.1).abs().max() < 5 * 0.1 / (2 * n) ** 0.5
    assert_close(noise(0, 1, [2]), first[:, 2:])  # whichever other clients receive
    parts = [*first.flatten(0, 1), noise(0, 2, [0])[0, 0], noise(1, 1, [0])[0, 0]]
    alike = np.corrcoef(torch.stack(parts)) - np.eye(len(parts))
    assert np.abs(alike).max() < 5 / n**0.5


# ---------------------------------------------------------------- in runs


def made(federation, name, *callbacks, rounds=3):
    public = {"public": "held_back"} if "samples" in FEW.get(name, {}) else {}
    return federation(
        method_of(name), callbacks=list(callbacks), data={"validation": 0.1} | public, rounds=rounds
    )


@pytest.mark.sampled
@pytest.mark.parametrize("name", NAMES)
def test_every_method_mixes_by_the_changed_relation_or_is_refused(federation, name):
    if name == "fedalign":
        return  # needs a deep network; one global model
    fed = made(federation, name, BlurRelation(top=1))
    if name not in CHANGED:
        with refuses(
            rf"callbacks.blurrelation='{name}': the method's relation cannot be changed, since"
        ):
            fed.prepare()
        return
    fed.prepare()
    for t in (1, 2, 3):
        record = fed.round(t)
        others = record.relation.rows.copy()
        for k, receiver in enumerate(record.relation.receivers):
            others[k, :, record.relation.sources.index(receiver)] = 0
        most = (others > 0).sum(-1).max(-1)
        assert (most <= 1).all() or np.ptp(others[others > 0]) == 0  # nothing left: all alike
        fed.notify("on_round_end", record)
        fed.run.server.round = t


def test_what_is_sent_is_mixed_by_what_is_logged(federation):
    fed, plain = made(federation, "kapc", BlurRelation(noise=0.2)), made(federation, "kapc")
    for each in (fed, plain):
        each.prepare()
        each.round(1)
    exact = plain.run.server.memory["relation"]
    assert torch.equal(fed.run.server.memory["relation"], exact)  # what is learned of equal models
    models = {c: state.received["model"].clone() for c, state in fed.run.states.items()}
    server = Server(fed.run, 2, [0, 1, 2, 3], fed.reducer)
    sent = fed.run.method.broadcast(server)
    rows = server.relation_view().rows
    assert not np.allclose(rows, fed.run.server.memory["relation"], atol=0.05)
    for block in fed.run.groups[0].layout.blocks:
        columns = slice(block.start, block.stop)
        for c in range(4):
            mix = sum(float(w) * models[j][columns] for j, w in enumerate(rows[c, block.layer]))
            assert_close(sent[c].vector[columns], mix, rtol=1e-4, atol=1e-5)


class Past(FedAMP):
    """Mixes by its relation's rows without asking for the changed ones."""

    def broadcast(self, server):
        group, relation = server.only, server.run.relation
        assert isinstance(relation, Attention)
        rows = relation.weights(group.inputs(relation, group.cohort, group.cohort))
        return group.send(group.mix(rows, group.cohort, group.cohort))


@pytest.mark.parametrize(
    "method, callbacks, settings, says",
    [
        (
            Past(),
            [BlurRelation(top=1)],
            {},
            "'past': its server mixes by rows of its own",
        ),
        (
            KAPC(),
            [BlurRelation(top=1), BlurRelation(decimals=1)],
            {},
            "2 callbacks of this kind",
        ),
        (
            KAPC(),
            [BlurRelation(top=1)],
            {"held_out_clients": 0.25},
            "held_out_clients=0.25.*that join; set it to 0",
        ),
        (KAPC(), [BlurRelation(top=1), LocalPrivacy(1.0, 1.0)], {}, "named after localprivacy"),
    ],
    ids=["past", "two", "joins", "before"],
)
def test_what_is_refused(federation, method, callbacks, settings, says):
    fed = federation(method, callbacks=callbacks, data=settings)
    with refuses(says):
        fed.fit()
