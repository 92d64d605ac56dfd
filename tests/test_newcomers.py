"""Clients that are held out of a run, and the model that each method gives to one that it has never
seen."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from classes import (
    CFL,
    FEDORA,
    IFCA,
    KAPC,
    FedAvg,
    FedBABU,
    FedCAC,
    FedMD,
    FedPAC,
    FedPer,
    FedRep,
    FeSEM,
    KNNPer,
    Local,
    PFedHN,
)
from every import NAMES, method_of
from refusals import refuses
from watching import Nets, Watch, run_all, same

from fl_lightning import Run
from fl_lightning.callbacks.base import Transform
from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import ClientData, ResidentPart, normalisation, prepare
from fl_lightning.data.newcomers import drawn_per_class, from_file, with_few_labels
from fl_lightning.engine.joining import join, newcomers

HELD = {"held_out_clients": 0.34, "alpha": 0.5}
"""Of four clients one is held out."""


def done(make, method, data=None, **changes):
    """After all rounds."""
    given = {**HELD, **data} if isinstance(data, dict) else data or HELD
    fed = make(method, data=given, **changes)
    fed.prepare()
    run_all(fed)
    return fed


def kept(fed):
    """Copies of all that clients and server keep."""
    run = fed.run
    found = [
        v
        for state in run.states.values()
        for v in (*state.vectors.values(), *state.memory.values())
    ]
    found += [
        *run.server.memory.values(),
        *(v for group in run.groups for v in group.vectors.values()),
    ]
    return [v.clone() for v in found]


# ---------------------------------------------------------------- who is held out


def test_the_split_is_the_one_of_all_and_who_is_held_out_is_drawn():
    everyone = prepare(DataConfig(alpha=0.5), 10, 0)
    held = prepare(DataConfig(alpha=0.5, held_out_clients=0.3), 10, 0)
    assert (held.clients, len(held.held_out)) == (7, 3)
    assert sorted([*held.numbers, *(who.number for who in held.held_out)]) == list(range(10))
    for place, number in enumerate(held.numbers):
        assert torch.equal(held.client(place).train.y, everyone.client(number).train.y)
    for who in held.held_out:
        (_, y), (_, test) = held.held_out_samples(who, torch.device("cpu"), torch.float32)
        assert torch.equal(y, everyone.client(who.number).train.y) and torch.equal(
            test, everyone.client(who.number).test.y
        )
    other = prepare(DataConfig(alpha=0.5, held_out_clients=0.3), 10, 1)
    assert [who.number for who in other.held_out] != [who.number for who in held.held_out]


def test_normalisation_does_not_look_at_them():
    data = prepare(DataConfig(alpha=0.5, validation=0.2, held_out_clients=0.3), 10, 0)
    away = np.concatenate([index for who in data.held_out for index in (who.train, who.validation)])
    mean, std = normalisation(np.delete(data._train.raw.numpy(), away, 0))
    assert torch.equal(data._train.mean, mean) and torch.equal(data._train.std, std)


@pytest.mark.sampled("FedAvg", "KAPC", "FEDORA")
@pytest.mark.parametrize(
    "method",
    [FedAvg(), KAPC(), FEDORA(), PFedHN(), FeSEM(clusters=2), FedMD(samples=24)],
    ids=lambda m: type(m).__name__,
)
def test_their_data_never_influence_training(federation, tmp_path, method):
    """Inputs are made noise and labels moved on, in the file that is read: no bit of the run is
    another."""
    arrays = dict(np.load(digits(tmp_path)))
    settings = {**HELD, "source": "arrays", "root": str(tmp_path / "digits.npz"), "validation": 0.2}
    if isinstance(method, FedMD):
        settings |= {"public": "held_back", "public_samples": 24}
    config = DataConfig(**settings)
    data = prepare(config, 4, 0)
    clean = done(federation, method, data)
    dirty = prepare(config, 4, 0)
    for who in dirty.held_out:
        for index in (who.train, who.validation):
            dirty._train.raw[index], dirty._train.labels[index] = (
                255,
                (dirty._train.labels[index] + 1) % 10,
            )
        dirty._test.raw[who.test] = 0
    poisoned = done(federation, method, dirty)
    assert same(kept(clean), kept(poisoned))
    scores = [fed.evaluator.everyone() for fed in (clean, poisoned)]
    assert scores[0] == scores[1] and len(scores[0]["final_accuracies"]) == 3
    assert newcomers(clean.worker)["newcomers"] != newcomers(poisoned.worker)["newcomers"]
    if not isinstance(method, FedMD):  # its public data are cut from the file first
        raw = arrays["x_train"].copy()
        raw[np.concatenate([who.train for who in data.held_out])] = 255
        np.savez(tmp_path / "digits.npz", **(arrays | {"x_train": raw}))
        assert torch.equal(prepare(config, 4, 0)._train.mean, data._train.mean)


def digits(folder):
    """The digits as a file."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x, y = (found.images * 15).astype(np.uint8)[:700], found.target[:700]
    np.savez(
        folder / "digits.npz", x_train=x[:500], y_train=y[:500], x_test=x[500:], y_test=y[500:]
    )
    return folder / "digits.npz"


@pytest.mark.parametrize(
    "share, said",
    [
        (0.05, "of 4 clients that is 0"),
        (0.9, "of 4 clients that is 4"),
        (1.0, r"in \[0, 1\)"),
        (-0.1, r"in \[0, 1\)"),
        (float("nan"), "finite"),
    ],
)
def test_shares_that_leave_nobody_are_refused(federation, share, said):
    config = federation(FedAvg()).run.config
    with refuses(rf"^data\.held_out_clients=.*{said}"):
        replace(config, data=replace(config.data, held_out_clients=share)).validate()


# ---------------------------------------------------------------- few samples


def test_more_samples_hold_the_fewer_ones_and_nobody_has_more_than_it_has():
    data = prepare(DataConfig(**HELD), 4, 0)
    who, cpu = data.held_out[0], torch.device("cpu")
    (_, y), _ = data.held_out_samples(who, cpu, torch.float32)
    places = {k: drawn_per_class(y, who, k, 0) for k in (1, 5, 20)}
    assert set(places[1].tolist()) < set(places[5].tolist()) < set(places[20].tolist())
    for k, index in places.items():
        counts = torch.bincount(y[index], minlength=10)
        assert torch.equal(counts, torch.bincount(y, minlength=10).clamp_max(k))
    with_labels, knows = with_few_labels(data, who, 5, 0.2, 0, cpu, torch.float32)
    assert knows and len(with_labels.train) + len(with_labels.validation) == len(places[5])
    without, knows = with_few_labels(data, who, 0, 0.0, 0, cpu, torch.float32)
    assert not knows and len(without.train) == len(y)
    assert not torch.cat([y for _, y in without.train.batches(64)]).any()


# ---------------------------------------------------------------- every method


@pytest.mark.sampled("[kapc]", "[ktpfl]")
@pytest.mark.parametrize("name", [name for name in NAMES if name != "partialpooling"])
def test_every_method_gives_unseen_clients_a_model(federation, name):
    """Rows for all; the run keeps what it had; once more gives the same. `partialpooling` takes no
    images."""
    # one that is chosen may be 0, on some machines
    method = method_of(name, **({"lam": "0.5"} if name == "knnper" else {}))
    fed = done(
        federation, method, {"validation": 0.2, "public": "held_back"}, net="norm", clients=5
    )
    before = kept(fed)
    found = newcomers(fed.worker)
    rows = found["newcomers"]
    assert same(kept(fed), before) and fed.run.clients == 3
    assert [(row["client"], row["samples_per_class"]) for row in rows] == [
        (who.number, count) for who in fed.run.data.held_out for count in (0, 1, 5, 20)
    ]
    for row in rows:
        assert (
            row["rule"]
            and row["samples"] <= 10 * row["samples_per_class"]
            and row["test_samples"] > 0
        )
        alone = name in ("local", "fedproto", "fedtgp") and not row["samples"]
        assert ("accuracy" in row) == (not alone)
    losses = {row["samples_per_class"]: row.get("loss") for row in rows[:4]}
    assert len(set(losses.values())) == 4  # each sample tells something
    assert newcomers(fed.worker) == found


def test_local_has_no_model_for_them_and_says_so(federation):
    fed = done(federation, Local())
    rows = newcomers(fed.worker)["newcomers"]
    assert {row["rule"] for row in rows} == {"own training only"}
    assert not any("accuracy_received" in row for row in rows)
    with refuses("local gives a new client no model"):
        after(fed, 0)


# ---------------------------------------------------------------- one client: join


@pytest.mark.sampled("KAPC", "FedAvg", "IFCA")
@pytest.mark.parametrize(
    "method",
    [
        FedAvg(),
        KAPC(),
        IFCA(clusters=2),
        FEDORA(),
        FedRep(),
        PFedHN(),
        FedCAC(),
        FedPAC(),
        KNNPer(),
        CFL(),
    ],
    ids=lambda m: type(m).__name__,
)
def test_join_gives_what_the_row_says(federation, tmp_path, method):
    """For the same samples, from a file: bit for bit."""
    fed = done(federation, method, {"validation": 0.2})
    data, who = fed.run.data, fed.run.data.held_out[0]
    rows = {row["samples_per_class"]: row for row in newcomers(fed.worker)["newcomers"]}
    raw, y = data._train.raw[who.train].numpy(), data._train.labels[who.train]
    test = {
        "x_test": data._test.raw[who.test].numpy(),
        "y_test": data._test.labels[who.test].numpy(),
    }
    for count in (0, 5):
        index = drawn_per_class(y, who, count, 0).numpy() if count else slice(None)
        held = {"x_train": raw[index][:, 0], **(test | {"x_test": test["x_test"][:, 0]})}
        np.savez(tmp_path / "new.npz", **held, **({"y_train": y.numpy()[index]} if count else {}))
        new, knows = from_file(data, str(tmp_path / "new.npz"), 0.2, 0)
        scores = join(fed.worker, new, knows, 2).scores
        assert scores == {name: rows[count][name] for name in scores} and "loss" in scores


# ---------------------------------------------------------------- rules


def after(fed, count, rounds=2):
    """What the held-out client with so many samples comes to, and its data."""
    run, apart = fed.run, fed.run.config.data.validation
    new, knows = with_few_labels(
        run.data, run.data.held_out[0], count, apart, 0, run.device, run.dtype
    )
    return join(fed.worker, new, knows, rounds), new


@pytest.mark.sampled("norm-FedPer", "plain-FedBABU")
@pytest.mark.parametrize(
    "method", [FedPer(), FedRep(head_epochs=2), FedBABU()], ids=lambda m: type(m).__name__
)
@Nets
def test_a_personal_part_is_trained_under_the_shared_one(federation, net, method):
    """Body and running statistics are the global ones, bit for bit; the classifier is not the first
    one. FedBABU trains everything."""
    fed = done(federation, method, net=net)
    joined, _ = after(fed, 5)
    group = fed.run.groups[0]
    for block in group.layout.blocks:
        ours, theirs = (
            v[block.start : block.stop] for v in (joined.vector, group.vectors["model"])
        )
        trained = block.head or isinstance(method, FedBABU)
        if net == "norm" and block.name == "conv.bias":
            continue  # the normalisation behind it takes a constant out: its gradient is 0
        assert torch.equal(ours, theirs) == (not trained), block.name


def test_the_server_learns_nothing_of_the_others_from_a_newcomer(federation):
    """In each round FedPAC sends it the body that the others have come to, and not its own."""
    watch = Watch()
    fed = done(federation, FedPAC(), callbacks=[watch])
    group = fed.run.groups[0]
    body = group.layout.segments(group.layout.mask(lambda b: not b.head))
    watch.downloads.clear()
    after(fed, 5)
    assert [client for client, _, _ in watch.downloads] == [fed.run.clients] * 2
    for _, received, _ in watch.downloads:
        for s in body:
            assert torch.equal(received[s.columns], group.vectors["model"][s.columns])


def test_one_sample_and_batchnorm(federation):
    """It cannot train on one: the sample counts twice."""
    fed = done(federation, FedAvg(), net="norm")
    run = fed.run
    new, _ = with_few_labels(run.data, run.data.held_out[0], 1, 0.0, 0, run.device, run.dtype)
    [(x, y)] = new.train.batches(1, only=slice(0, 1))
    lone = ClientData(ResidentPart(x, y, None), new.validation, new.test)
    assert join(fed.worker, lone, True, 1).vector.isfinite().all()


# ---------------------------------------------------------------- the run folder


def test_rows_and_means_stand_in_the_run_folder(fit):
    flags = "--method fedavg --data.held_out_clients 0.5 --evaluation.newcomer_samples [0,2]"
    run = Run(fit("a", flags))
    assert run.summary["held_out_clients"] == sorted({*run.newcomers["client"]})
    assert run.summary["clients"] == 2
    means = run.newcomers.groupby("samples_per_class")["accuracy"].mean()
    for count in (0, 2):
        assert run.summary[f"newcomer_mean_accuracy_{count}"] == pytest.approx(means[count])


class Zeros(Transform):
    """What travels becomes zeros, in one direction."""

    changes_download = changes_upload = True

    def __init__(self, way):
        self.way, self.calls = way, list[tuple[str, int]]()

    def _zero(self, way, client, payload):
        self.calls.append((way, client.id))
        if way == self.way:
            payload.vector = torch.zeros_like(payload.vector)

    def on_download(self, client, payload):
        self._zero("download", client, payload)

    def on_upload(self, client, payload):
        self._zero("upload", client, payload)


def test_what_newcomers_receive_goes_through_the_transforms(federation):
    """A model of zeros gives every class the same score, and without samples it is all there is."""
    fed = federation(
        FedAvg(),
        data=HELD,
        callbacks=[zeros := Zeros("download")],
        evaluation={"newcomer_samples": [0]},
    )
    fed.prepare()
    for t in (1, 2):
        fed.round(t)
    zeros.calls.clear()
    before = kept(fed)
    [row] = newcomers(fed.worker)["newcomers"]
    assert row["loss"] == pytest.approx(math.log(10)) and zeros.calls == [
        ("download", fed.run.clients)
    ]
    assert same(kept(fed), before)
