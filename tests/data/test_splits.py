"""What is test part: drawn by the run's seed where data have none, and of a small class as often as
of a large one."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torchvision
from PIL import Image
from refusals import refuses

from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import imbalance, partition, prepare
from fl_lightning.data.federated import samples_digest
from fl_lightning.data.load import load
from fl_lightning.data.sampling import systematic

COUNT = 40
"""Samples of each source here, of two classes; the first number of a sample is its own."""


def of_digits(folder, monkeypatch):
    return DataConfig()


def table(folder, header, rows, **keys):
    """The data of a table."""
    (folder / "t.csv").write_text("\n".join([header, *rows]))
    return DataConfig(root=str(folder / "t.csv"), **keys)


def of_a_table(folder, monkeypatch):
    return table(folder, "x,label", [f"{k},{k % 2}" for k in range(COUNT)])


def pictures(folder):
    for k in range(COUNT):
        (folder / str(k % 2)).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (k, 0, 0)).save(folder / str(k % 2) / f"{k}.png")


def of_image_folders(folder, monkeypatch):
    pictures(folder)
    return DataConfig(source="images", root=str(folder))


def of_domains(folder, monkeypatch):
    pictures(folder / "art")
    return DataConfig(source="domains", root=str(folder))


def of_leaf(folder, monkeypatch):
    held = {"x": [[k, 0.0, 0.0] for k in range(COUNT)], "y": [k % 2 for k in range(COUNT)]}
    (folder / "a.json").write_text(
        json.dumps({"users": ["a"], "num_samples": [COUNT], "user_data": {"a": held}})
    )
    return DataConfig(source="leaf", root=str(folder))


def of_torchvision(folder, monkeypatch):
    whole = SimpleNamespace(
        data=np.arange(COUNT, dtype=np.uint8)[:, None, None], targets=np.arange(COUNT) % 2
    )
    monkeypatch.setattr(torchvision.datasets, "EuroSAT", lambda **words: whole)
    return DataConfig(source="eurosat", root=str(folder))


def of_a_data_module(folder, monkeypatch):
    name = f"fl_split_readings_{folder.name}"
    (folder / f"{name}.py").write_text(f"""
import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader

class Plain(LightningDataModule):
    def train_dataloader(self):
        return DataLoader([(torch.tensor([float(k)]), k % 2) for k in range({COUNT})])
""")
    monkeypatch.syspath_prepend(str(folder))
    return DataConfig(source=f"{name}.Plain")


WITHOUT_TEST = [
    of_digits,
    of_a_table,
    of_image_folders,
    of_domains,
    of_leaf,
    of_torchvision,
    of_a_data_module,
]


def samples_tested(data):
    """The test samples of a source."""
    return sorted(sample.tobytes() for sample in load(data, 2, smoke=False)[0].test.read_all())


@pytest.mark.parametrize("make", WITHOUT_TEST, ids=lambda make: make.__name__)
def test_a_test_part_that_data_do_not_bring_is_drawn_from_its_seed(make, tmp_path, monkeypatch):
    data = make(tmp_path, monkeypatch)
    parts = [samples_tested(replace(data, test_seed=seed)) for seed in (0, 1, 0)]
    assert parts[0] == parts[2] != parts[1]
    assert len(parts[0]) == len(parts[1])


@pytest.mark.parametrize(
    "counts, total", [([7, 1], 2), ([5, 3, 0, 2], 3), ([1] * 9, 4), ([4], 4), ([6, 3], 1)]
)
def test_systematic_sampling_is_right_in_the_mean(counts, total):
    """Over all starts, which are equally likely, a class has exactly its share; with each, that
    rounded down or up."""
    everything = sum(counts)
    found = np.array([systematic(np.array(counts), total, start) for start in range(everything)])
    exact = np.array(counts) * total / everything
    np.testing.assert_allclose(found.mean(0), exact)
    assert (
        (found.sum(1) == total).all()
        and (found >= np.floor(exact)).all()
        and (found <= np.ceil(exact)).all()
    )
    units = np.repeat(np.arange(len(counts)), counts)  # as docs/reference.md says it, unit by unit
    for start, row in enumerate(found):
        drawn = [
            ((j + 1) * total + start) // everything > (j * total + start) // everything
            for j in range(everything)
        ]
        assert np.bincount(units[drawn], minlength=len(counts)).tolist() == row.tolist()


def test_a_small_silo_has_its_positive_tested_as_often_as_any_sample():
    """A silo of 8 with one positive, a quarter for tests: rounded down it never had one."""
    labels = np.array([0] * 7 + [1])
    hits = dict.fromkeys((False, True), 0)
    for by_chance in hits:
        for seed in range(400):
            rng = np.random.default_rng(seed)
            trains, tests = partition.cut_off([np.arange(8)], labels, 0.25, rng, by_chance)
            assert len(tests[0]) == 2 and sorted([*trains[0], *tests[0]]) == list(range(8))
            hits[by_chance] += int(labels[tests[0]].sum())
    assert hits[False] == 0
    assert 100 - 4 * 8.7 < hits[True] < 100 + 4 * 8.7  # four deviations of a binomial of 400 by 1/4


@pytest.mark.parametrize(
    "counts, rare",
    [
        ([96, 4], [1]),
        ([95, 5], []),
        ([100, 0], []),
        ([50, 2, 48], [1]),
        ([20] * 50, []),
        ([20] * 49 + [9], [49]),  # of fifty classes each is below 5 %
    ],
)
def test_a_class_is_rare_below_five_percent_and_half_an_equal_share(counts, rare):
    assert imbalance.rare_classes(counts) == rare


@pytest.mark.parametrize("samples, lost", [(2, 4), (4, 0)])
def test_validation_classes_that_no_client_trains_on_are_named(tmp_path, samples, lost):
    """Two clients with one sample of each of ten classes, two held out: of the same two classes at
    both."""
    # half of them are test samples
    rows = [f"{k},{k % 10},{k // 10 % 2}" for k in range(20 * samples)]
    keys = {"group_column": "farm", "partition": "natural", "min_samples": 2, "client_test": 0.5}
    farms = table(tmp_path, "x,label,farm", rows, **keys)
    line = imbalance.untrained_line(prepare(replace(farms, validation=0.2), 2, 0))
    named = (
        "data: 4 of 4 validation and 4 of 20 test samples are of classes that no client trains on; "
        "they tell little"
    )
    assert line == (named if lost else None)
    assert imbalance.untrained_line(prepare(farms, 2, 0)) is None


@pytest.mark.parametrize(
    "task, distinct", [("classification", 40), ("classification", 15), ("regression", 40)]
)
def test_labels_that_look_like_numbers_to_predict_are_named(tmp_path, task, distinct):
    rows = [f"{k},{k % distinct + 0.5}" for k in range(40)]
    keys = {"task": task, "partition": "iid", "fraction": 1.0}
    data = prepare(table(tmp_path, "x,label", rows, **keys), 2, 0)
    many = f"data: {distinct} classes in {sum(data.train_sizes)} training samples"
    named = f"{many}; for a number to predict, --data.task regression"
    assert imbalance.scattered_line(data) == (
        named if (task, distinct) == ("classification", 40) else None
    )


@pytest.mark.parametrize("key", ["label", "farm"])
def test_one_number_written_in_two_ways_is_refused(tmp_path, key):
    odd = ["1.0" if k == 7 else str(k % 2) for k in range(40)]
    rows = [
        f"{k},{odd[k]},{k % 4}" if key == "label" else f"{k},{k % 2},{odd[k]}" for k in range(40)
    ]
    farms = table(tmp_path, "x,label,farm", rows, group_column="farm", partition="iid")
    with refuses(f"column '{key}' writes one number as '1' and '1.0'"):
        load(farms, 2, False)


def test_an_empty_first_cell_is_no_image(tmp_path):
    rows = [f"{'' if k == 0 else k},{k % 2}" for k in range(40)]
    keys = {"partition": "iid", "impute": "median", "fraction": 1.0}
    assert prepare(table(tmp_path, "x,label", rows, **keys), 2, 0).input_shape == (1,)


def test_data_with_other_contents_or_owners_have_another_digest(tmp_path):
    x, y = np.random.default_rng(0).random((60, 5), np.float32), np.arange(60) % 3
    data = DataConfig(source="arrays", root=str(tmp_path / "a.npz"), partition="iid", fraction=1.0)
    digests = []
    for change, seed in ((0.0, 0), (0.0, 0), (0.0, 1), (1e-3, 0)):
        x[7, 2] += change
        np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x[:9], y_test=y[:9])
        digests.append(samples_digest(prepare(data, 4, seed)))
    assert digests[0] == digests[1] and len({*digests}) == 3
