import sys

import numpy as np
import pytest
from lines import run_line
from numpy.testing import assert_array_equal
from refusals import refuses

from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import datamodule
from fl_lightning.data.load import read

CODE = """
import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset


class Readings(Dataset):
    def __init__(self, first, count, clients):
        self.first, self.count, self.clients = first, count, clients

    def __len__(self):
        return self.count

    def __getitem__(self, k):
        k += self.first
        x, y = torch.full((1, 8, 8), float(k)), k % 2
        return (x, torch.tensor(y), f"site {k % 3}") if self.clients else (x, y)


class Natural(LightningDataModule):
    class_names = ["calm", "storm"]

    def setup(self, stage):
        self.parts = {"fit": Readings(0, 60, True), "test": Readings(60, 15, True)}

    def train_dataloader(self):
        return DataLoader(self.parts["fit"], batch_size=7, shuffle=True)

    def test_dataloader(self):
        return DataLoader(self.parts["test"])


class Plain(LightningDataModule):
    def __init__(self, root):
        super().__init__()
        self.size = 0 if root == "." else int(root)

    def train_dataloader(self):
        return DataLoader(Readings(0, self.size, False))


class Tokens(Plain):
    def train_dataloader(self):
        return DataLoader([(torch.arange(5), 0), (torch.arange(5), 1)] * 10)


class Uneven(Plain):
    def train_dataloader(self):
        return DataLoader([(torch.zeros(3), 0), (torch.zeros(2), 1)])


class Dicts(Plain):
    def train_dataloader(self):
        return DataLoader([{"x": torch.zeros(3), "y": 0}] * 4)


class Words(Plain):
    def train_dataloader(self):
        return DataLoader([(torch.zeros(3), "calm")] * 4)


class Persons(Plain):
    def train_dataloader(self):
        rows = [(torch.zeros(3), k % 2, "here", f"person {k // 2}") for k in range(8)]
        return DataLoader(rows)


class Fractions(Plain):
    def train_dataloader(self):
        return DataLoader([(torch.zeros(3), 1.0), (torch.zeros(3), 0.9)])


class Lost(Plain):
    def train_dataloader(self):
        return DataLoader([(torch.zeros(3), 0), (torch.tensor([1.0, float("nan"), 0.0]), 1)])


class Numbered(Plain):
    def train_dataloader(self):
        clients = [k % 11 if k % 2 else torch.tensor(k % 11) for k in range(44)]
        return DataLoader([(torch.full((3,), float(c)), k % 2, c) for k, c in enumerate(clients)])


class Strange(Natural):
    def setup(self, stage):
        self.parts = {"fit": Readings(0, 2, True), "test": Readings(60, 15, True)}


class Other:
    pass
"""


@pytest.fixture(autouse=True)
def _module(tmp_path, monkeypatch):
    (tmp_path / "my_readings.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_readings", raising=False)


def loaded(name, root="1"):
    return datamodule.load(DataConfig(source=name, root=root))


def test_the_third_of_a_sample_is_its_client():
    source = loaded("my_readings.Natural")
    assert source.group_names == ["site 0", "site 1", "site 2"] and source.class_names == [
        "calm",
        "storm",
    ]
    for pool, first, size in ((source.train, 0, 60), (source.test, 60, 15)):
        raw = pool.read_all()
        assert raw.shape == (size, 1, 8, 8) and raw.dtype == np.float32
        assert raw[:, 0, 0, 0].tolist() == list(range(first, first + size))
        assert_array_equal(raw[:, 0, 0, 0] % 2, pool.labels)
        assert_array_equal(raw[:, 0, 0, 0] % 3, pool.groups)


def test_clients_that_are_numbers_go_by_size_tensors_too():
    source = loaded("my_readings.Numbered")
    assert source.group_names == [str(k) for k in range(11)]
    assert_array_equal(source.train.read_all()[:, 0], source.train.groups)


def test_tests_are_left_alone_where_validation_scores(monkeypatch):
    import my_readings

    monkeypatch.setattr(my_readings.Natural, "test_dataloader", lambda self: 1 / 0)
    with refuses("division by zero"):
        read(DataConfig(source="my_readings.Natural"))
    source = read(DataConfig(source="my_readings.Natural", score_on="validation"))
    assert len(source.train.labels) == 60 and source.test.read_all().max() == 59


def test_classes_may_be_names():
    source = loaded("my_readings.Words")
    assert source.class_names == ["calm"] and source.train.labels.tolist() == [0] * 3


def test_the_fourth_of_a_sample_is_its_unit():
    source = loaded("my_readings.Persons")
    units = [set(pool.units.tolist()) for pool in (source.train, source.test)]
    assert len(units[0] | units[1]) == 4 and not units[0] & units[1]


def test_whole_numbers_are_tokens():
    with refuses(r"whole numbers, tokens: .*vocabulary"):
        loaded("my_readings.Tokens")


@pytest.mark.parametrize(
    "name, message",
    {
        "my_readings.Nothing": "it cannot be imported",
        "no_such.Module": "it cannot be imported",
        "my_readings.Other": "must name a LightningDataModule",
        "my_readings.Plain": "cannot be read: .*NoneType",
        "my_readings.Uneven": "its sample 1 has another form",
        "my_readings.Dicts": "its sample 0 has another form",
        "my_readings.Fractions": "y must hold class numbers from 0 or class names",
        "my_readings.Lost": r"x_train holds values that are not finite \(sample 2\)",
        "my_readings.Strange": "client_test holds 'site 2', which has no name or training sample",
    }.items(),
)
def test_what_does_not_go_is_said(name, message):
    root = None if name == "my_readings.Plain" else "1"
    with refuses(rf"data\.source='.*: .*{message}"):
        loaded(name, root)


def test_a_run_by_its_import_path(fit):
    flags = (
        "--data.source my_readings.Natural --data.partition natural --federation.clients 3 "
        "--data.fraction 1"
    )
    assert (fit("a", flags, "--method fedavg --federation.rounds 1") / "summary.json").exists()
    assert run_line("fit --data.source nomodule") == 2
