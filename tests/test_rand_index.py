"""Planted groups and what a relation knows of them, round by round."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from lines import run_line
from refusals import refuses

from fl_lightning.configuration.config import DataConfig
from fl_lightning.core import server
from fl_lightning.core.relation import agreement
from fl_lightning.data import prepare
from fl_lightning.lab.report.tables import scores
from fl_lightning.results.folder import RunFolder
from fl_lightning.results.record import RelationView
from fl_lightning.results.runs import load

GROUPS = [0, 1, 0, 1, 2, 2]


def view(rows):
    everyone = list(range(len(GROUPS)))
    return RelationView(rows, everyone, [str(k) for k in range(rows.shape[1])], everyone)


def blocks(groups):
    same = np.equal.outer(groups, groups).astype(np.float32)
    return (same / same.sum(axis=1, keepdims=True))[:, None]


def test_rows_of_the_true_groups_have_1_and_those_of_nobody_in_particular_0():
    assert agreement(view(blocks(GROUPS)), GROUPS) == 1
    assert agreement(view(np.full((6, 1, 6), 1 / 6, np.float32)), GROUPS) == 0
    assert agreement(view(np.eye(6, dtype=np.float32)[:, None]), GROUPS) == 0
    crossed = agreement(view(blocks([0, 1, 2, 2, 0, 1])), GROUPS)
    assert crossed is not None and crossed < 0


@pytest.mark.parametrize("groups", [[0] * 6, list(range(6))])
def test_without_groups_or_receivers_there_is_nothing_to_agree_with(groups):
    assert agreement(view(blocks(GROUPS)), groups) is None
    nobody = RelationView(np.zeros((0, 0, 0), np.float32), [], [], [])
    assert agreement(nobody, GROUPS) is None


@pytest.mark.parametrize(
    "method, least, most", [("kapc --method.solver exact", 0.6, 1), ("fedavg", 0, 0)]
)
def test_it_is_a_column_of_the_metrics(method, least, most, fit):
    planted = "--data.planted labels --data.groups 2 --data.partition iid --federation.clients 6"
    folder = fit("a", f"--method {method} {planted} --federation.local_epochs 3 --optimizer.lr 0.1")
    rows = RunFolder(folder).read("metrics")
    assert least <= rows[-1]["rand_index"] <= most
    assert len(rows) == 3
    [shown] = scores(load([folder])).filter(like="adjusted Rand index", axis="index").to_numpy()
    assert shown.tolist() == [f"{rows[-1]['rand_index']:.2f}"]


# ---------------------------------------------------------------- mixtures


def test_clients_of_a_mixture_are_alike_within_their_group():
    config = DataConfig(partition="mixture", groups=3, alpha=0.3, concentration=200.0)
    data = prepare(config, 12, 0)
    assert data.groups == [c % 3 for c in range(12)]
    assert sum(data.train_sizes) == 1438  # all are dealt out
    mixes = data.class_counts / data.class_counts.sum(axis=1, keepdims=True)
    apart = np.abs(mixes[:, None] - mixes[None]).sum(axis=2) / 2
    same = np.equal.outer(data.groups, data.groups) & ~np.eye(12, dtype=bool)
    assert apart[same].mean() < 0.2 < 0.4 < apart[~same & ~np.eye(12, dtype=bool)].mean()
    loose = prepare(replace(config, concentration=1.0), 12, 0)
    mixes = loose.class_counts / loose.class_counts.sum(axis=1, keepdims=True)
    assert (
        np.abs(mixes[:, None] - mixes[None]).sum(axis=2)[same].mean() / 2 > 2 * apart[same].mean()
    )


# ---------------------------------------------------------------- permuted labels and drift


def labels(data, client, name="train"):
    part = getattr(data.client(client), name)  # type: ignore[attr-defined]
    return next(iter(part.batches(10_000)))[1]


def test_permuted_labels_are_another_permutation_in_each_group_and_seed():
    config = DataConfig(partition="iid", validation=0.2)
    plain, permuted = (
        prepare(replace(config, planted=kind), 8, 0) for kind in ("none", "permuted")
    )
    tables = []
    for client in range(8):
        table = {}
        for name in ("train", "validation", "test"):
            for old, new in zip(
                labels(plain, client, name).tolist(),
                labels(permuted, client, name).tolist(),
                strict=True,
            ):
                assert table.setdefault(old, new) == new
        assert sorted(table.values()) == list(range(10))
        tables.append(table)
    assert tables[:4] == tables[4:] and len({tuple(sorted(t.items())) for t in tables}) == 4
    assert tables[0] == {k: k for k in range(10)}
    assert (
        labels(prepare(replace(config, planted="permuted"), 8, 1), 1) != labels(permuted, 1)
    ).any()


@pytest.mark.parametrize("kind", ["labels", "permuted", "rotation"])
def test_every_second_client_of_a_group_drifts_to_the_next(kind):
    config = DataConfig(
        partition="iid", planted=kind, groups=3, drift_every=5, held_out_clients=0.25
    )  # type: ignore[arg-type]
    config.validate()
    data, first = prepare(config, 12, 0), prepare(replace(config, drift_every=None), 12, 0)
    at = {c: (c + c // 3 % 2) % 3 for c in range(12)}
    begun = [
        (labels(data, i).clone(), next(iter(data.client(i).train.batches(999)))[0])
        for i in range(9)
    ]
    data.at_round(5)
    assert data.groups == first.groups == [c % 3 for c in data.numbers]
    assert all(torch.equal(labels(data, i), begun[i][0]) for i in range(9))
    data.at_round(6)
    assert data.groups == [at[c] for c in data.numbers] != first.groups
    for i, (number, group) in enumerate(zip(data.numbers, data.groups, strict=True)):
        x, y = next(iter(data.client(i).train.batches(999)))
        moved = group != number % 3
        assert torch.equal(x, begun[i][1]) != (kind == "rotation" and moved)
        if kind == "labels":
            assert torch.equal(y, (begun[i][0] + group - number % 3) % 10)
            counts = np.bincount(y, minlength=10)
            assert data.class_counts[i].tolist() == counts.tolist()
    for mine, plain in zip(data.held_out, first.held_out, strict=True):
        assert (mine.angle != plain.angle) == (
            kind == "rotation" and at[mine.number] != mine.number % 3
        )
    data.at_round(1)  # and back: a checkpoint of an earlier round
    assert all(torch.equal(labels(data, i), begun[i][0]) for i in range(9))


def test_a_run_drifts_and_its_truth_with_it(fit, capsys):
    drifting = (
        "--data.planted labels --data.groups 2 --data.drift_every 1 --data.partition iid --method "
        "local"
    )
    folder = fit(
        "a",
        f"{drifting} --federation.rounds 2 --federation.local_epochs 8 --optimizer.lr 0.1 "
        f"--callbacks checkpoint",
    )
    rows = [row for row in RunFolder(folder).read("clients") if row["round"] == 2]
    drifted = [row["accuracy_before"] for row in rows if row["client"] >= 2]  # 2 and 3 go over
    stayed = [row["accuracy_before"] for row in rows if row["client"] < 2]
    assert max(drifted) < 0.3 < 0.5 < min(stayed)

    capsys.readouterr()
    assert run_line(f"test --run {folder}") == 0
    final = RunFolder(folder).read_summary()["final_mean_accuracy"]
    assert str(final) in capsys.readouterr().out  # judged on the last round's tasks


@pytest.mark.slow
@pytest.mark.parametrize("planted", ["labels", "rotation"])
def test_a_run_that_has_drifted_is_resumed(fit, capsys, planted):
    """Its samples, their classes and their shifts are those that it began with, whatever round it
    stands in."""
    drifting = (
        f"--data.planted {planted} --data.groups 2 --data.drift_every 1 --callbacks checkpoint"
    )
    whole, broken = (
        fit("a", f"{drifting} --federation.rounds 3"),
        fit("b", f"{drifting} --federation.rounds 2"),
    )
    capsys.readouterr()
    assert fit("b", f"{drifting} --federation.rounds 3 --resume") == broken
    assert "other samples" not in capsys.readouterr().err
    for name in ("split.csv", "heterogeneity.csv", "final.csv"):
        assert (whole / name).read_bytes() == (broken / name).read_bytes()
    ours, theirs = RunFolder(whole).read_summary(), RunFolder(broken).read_summary()
    kept = {key for key in ours if key.startswith(("heterogeneity", "final"))}
    assert kept and all(ours[key] == theirs[key] for key in kept)


def test_drift_needs_planted_groups():

    with refuses(r"data\.drift_every=3.*data\.planted"):
        DataConfig(drift_every=3).validate()


@pytest.mark.sampled("31")
@pytest.mark.parametrize("most", [31, 32])
def test_a_relation_that_is_too_large_is_neither_kept_nor_drawn(
    most,
    fit,
    monkeypatch,
    capsys,
):
    monkeypatch.setattr(server, "MOST_KEPT", most)
    whole = 4 * 2 * 4  # receivers, layers, sources
    hung = "heatmaps" if most < whole else "progress"
    planted = "--data.planted labels --data.groups 2 --federation.rounds 2"
    folder = fit("a", f"--callbacks {hung} {planted}")
    said = capsys.readouterr().err.count(
        "relation: 4 receivers by 4 sources by layer is 0.0 GiB a round"
    )
    assert said == (most < whole)  # once, not in every round
    held = [RunFolder(folder).read_relation(t).rows.size for t in (1, 2)]
    assert held == [whole * (most >= whole)] * 2
    assert ("rand_index" in RunFolder(folder).read("metrics")[1]) == (most >= whole)
    assert run_line(f"report {folder}") == 0
