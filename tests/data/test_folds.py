"""Each client's own folds: over a cycle of seeds every sample is tested once, and every fold has
the client's mix."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from refusals import refuses

from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import prepare, windows

SIZES = {"Aarau": 40, "Basel": 23, "Chur": 31}


def table(folder, positives=6, sizes=SIZES):
    """Hospitals with so many positives each; the first number of a row is its own."""
    rows = [(name, k < positives) for name, size in sizes.items() for k in range(size)]
    lines = [
        "site,number,noise,ill",
        *(f"{s},{n},{n % 7},{'yes' if p else 'no'}" for n, (s, p) in enumerate(rows)),
    ]
    (folder / "sites.csv").write_text("\n".join(lines))
    keys = {"label_column": "ill", "group_column": "site", "partition": "natural"}
    return DataConfig(root=str(folder / "sites.csv"), **keys)


def rows(data, client, part):
    """The numbers of a client's samples."""
    x = torch.cat([x for x, _ in getattr(data.client(client), part).batches(999)])
    return sorted((x * data._train.std + data._train.mean)[:, 0].round().int().tolist())


@pytest.mark.parametrize("k", [2, 3, 5])
def test_a_cycle_of_seeds_tests_every_sample_once(tmp_path, k):
    config = replace(table(tmp_path), folds=k)
    runs = [prepare(config, 3, seed) for seed in range(k)]
    begins = np.concatenate([[0], np.cumsum([*SIZES.values()])])
    for client in range(3):
        tested = [rows(run, client, "test") for run in runs]
        everything = list(range(begins[client], begins[client + 1]))
        assert sorted(number for own in tested for number in own) == everything
        assert max(map(len, tested)) - min(map(len, tested)) <= 1
        for run, own in zip(runs, tested, strict=True):
            assert sorted(rows(run, client, "train") + own) == everything
            labels = torch.cat([y for _, y in run.client(client).test.batches(999)])
            assert 6 // k <= labels.sum() <= -(-6 // k)  # "no" is class 0


def test_silos_stay_within_a_cycle_where_they_are_drawn():
    runs = [prepare(DataConfig(folds=4, alpha=1.0), 5, seed) for seed in (4, 5, 6, 7, 8)]
    sizes = [[a + b for a, b in zip(run.train_sizes, run.test_sizes, strict=True)] for run in runs]
    assert sizes[0] == sizes[1] == sizes[2] == sizes[3] != sizes[4]
    assert [sum(run.test_sizes[c] for run in runs[:4]) for c in range(5)] == sizes[0]


@pytest.mark.parametrize(
    "change, what",
    [
        (
            {"folds": 30, "min_samples": 2},
            r"data\.folds=30.*Basel has 23 samples: set it to at most",
        ),
        (
            {"folds": 3, "client_test": 0.2},
            r"data\.folds=3.*data\.client_test is 0\.2: one of them must be null",
        ),
        ({"folds": 1}, r"data\.folds=1.*at least 2"),
        (
            {"folds": 5, "least_test_positives": 2},
            r"least_test_positives=2.*Aarau has 1 test samples of class yes",
        ),
        (
            {"client_test": 0.2, "least_test_positives": 9},
            r"least_test_positives=9.*Aarau has .* test samples of class",
        ),
    ],
)
def test_what_cannot_be_cut_is_one_line(tmp_path, change, what):
    config = replace(table(tmp_path), **change)
    with refuses(what):
        config.validate()
        prepare(config, 3, 0)


@pytest.mark.parametrize("seed", range(6))
def test_a_rare_class_gets_its_test_positives(tmp_path, seed):
    """Of 3 positives a fifth is 0 or 1 test sample with every seed; 2 are asked for."""
    plain = replace(table(tmp_path, positives=3), client_test=0.2)
    config = replace(plain, least_test_positives=2)
    data, without = prepare(config, 3, seed), prepare(plain, 3, seed)
    assert data.test_sizes == without.test_sizes and data.train_sizes == without.train_sizes
    least = [
        min(torch.bincount(torch.cat([y for _, y in data.client(c).test.batches(99)])))
        for c in range(3)
    ]
    assert min(least) == 2 > without.least_test_class
    for client in range(3):
        assert not {*rows(data, client, "train")} & {*rows(data, client, "test")}


def test_a_partition_seed_keeps_the_clients(tmp_path):
    """Cycles of another draw of folds: the same samples in each client; without it, others."""

    def owned(seed, **keys):
        run = prepare(DataConfig(folds=2, fraction=0.2, test_seed=0, **keys), 3, seed)
        return [
            sorted(x.numpy().tobytes() for x in torch.cat(run.raw_samples(c))) for c in range(3)
        ]

    assert owned(0, partition_seed=4) == owned(1, partition_seed=4) == owned(6, partition_seed=4)
    assert owned(0) != owned(6)


def test_folds_of_windows_are_stretches_of_recordings():
    """Every window is tested once, no training window shares a moment with a tested one, and cycles
    cut elsewhere."""
    spans = np.array([(r, 5 * k, 5 * k + 10) for r in range(3) for k in range(20)], np.int64)
    shares = [np.arange(20), np.arange(20, 60)]
    cuts = []
    for cycle in range(2):
        parts = [
            windows.fold(shares, spans, 5, number, np.random.default_rng(cycle))
            for number in range(5)
        ]
        for c, own in enumerate(shares):
            assert sorted(np.concatenate([tests[c] for _, tests in parts])) == own.tolist()
        for trains, tests in parts:
            assert not windows.overlapping(
                spans[np.concatenate(trains)], spans[np.concatenate(tests)]
            ).any()
            assert [len(test) for test in tests] == [4, 8]
        cuts.append([tests[0].tolist() for _, tests in parts])
    assert cuts[0] != cuts[1]


def test_named_clients_are_held_out(tmp_path):
    config = replace(table(tmp_path), folds=5, held_out=[1])
    runs = [prepare(config, 3, seed) for seed in range(2)]
    for run in runs:
        assert run.numbers == [0, 2] and [who.number for who in run.held_out] == [1]
    everyone = prepare(replace(config, held_out=None), 3, 1)
    assert rows(runs[1], 1, "test") == rows(everyone, 2, "test")


def test_a_share_leaves_a_sample_to_train_on():
    """Beside the one for validation."""
    tiny = prepare(DataConfig(train_share=0.01, validation=0.2, fraction=0.3), 10, 0)
    assert tiny.train_sizes == tiny.validation_sizes == [1] * 10
