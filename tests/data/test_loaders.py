"""What a user's loader does: which samples it yields is heeded, the rest is refused or said, on
both roads."""

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from lightning import LightningDataModule
from refusals import refuses
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import datamodule
from fl_lightning.data.given import keep

NUMBERS = torch.arange(40)
ALL = TensorDataset(NUMBERS[:, None].float(), NUMBERS % 2)
"""Sample k is the number k."""


class Stream(IterableDataset[Any]):
    def __iter__(self):
        return iter(ALL)


class Jittered(Dataset[Any]):
    def __len__(self):
        return 20

    def __getitem__(self, k):
        return torch.rand(3), k % 2


class Endless(Dataset[Any]):
    def __getitem__(self, k):
        return torch.zeros(3), k % 2


class Every(Sampler[int]):
    def __iter__(self):
        return iter(range(0, 40, 2))


class Pairs(Sampler[list[int]]):
    def __iter__(self):
        return iter([[0, 1], [2, 3]])


class Shortened(DataLoader[Any]):
    def __iter__(self):
        return iter(list(super().__iter__())[:1])


def joined(batch):
    return default_collate(batch)


def module_of(train, test=None, **more):
    hooks = {"train_dataloader": lambda self: train()} | more
    if test is not None:
        hooks["test_dataloader"] = lambda self: test()
    return type("Given", (LightningDataModule,), hooks)


@pytest.fixture(params=["source", "python"])
def road(request, monkeypatch, tmp_path):
    """The numbers that are read of a module for training and tests: by its import path, or as a
    script gives it."""

    def by_path(cls):
        module = ModuleType("my_loaders")
        module.Given = cls
        monkeypatch.setitem(sys.modules, "my_loaders", module)
        source = datamodule.load(DataConfig(source="my_loaders.Given"))
        return {
            "train": source.train.read_all().ravel().tolist(),
            "test": source.test.read_all().ravel().tolist(),
        }

    def by_script(cls):
        place, _ = keep(cls(), tmp_path)
        with np.load(place / "given.npz") as arrays:
            parts = {"train": arrays["x_train"].ravel().tolist()}
            return parts | (
                {"test": arrays["x_test"].ravel().tolist()} if "x_test" in arrays else {}
            )

    return by_path if request.param == "source" else by_script


@pytest.mark.parametrize(
    "train, numbers",
    [
        (lambda: DataLoader(ALL, sampler=SubsetRandomSampler(range(30))), range(30)),
        (lambda: DataLoader(ALL, sampler=[7, 3, 5]), [7, 3, 5]),
        (
            lambda: DataLoader(ALL, batch_size=None, sampler=SubsetRandomSampler(range(30))),
            range(30),
        ),
        (
            lambda: DataLoader(
                ALL, batch_sampler=BatchSampler(SubsetRandomSampler(range(30)), 4, False)
            ),
            range(30),
        ),
        (lambda: DataLoader(ALL, sampler=SequentialSampler(range(12))), range(12)),
        (lambda: DataLoader(Subset(ALL, range(8, 20)), sampler=[1, 2]), [9, 10]),
        (lambda: DataLoader(ALL, shuffle=True), range(40)),
    ],
)
def test_samples_are_those_that_the_sampler_can_yield(road, train, numbers):
    rest = SubsetRandomSampler(range(30, 40))
    assert road(module_of(train, lambda: DataLoader(ALL, sampler=rest))) == {
        "train": list(numbers),
        "test": list(range(30, 40)),
    }


@pytest.mark.parametrize(
    "train, line",
    [
        (
            lambda: DataLoader(ALL, sampler=WeightedRandomSampler([1.0] * 40, 40)),
            "sampler WeightedRandomSampler of its",
        ),
        (
            lambda: DataLoader(ALL, sampler=RandomSampler(ALL, replacement=True)),
            "40 of 40 samples with replacement",
        ),
        (lambda: DataLoader(ALL, sampler=Every()), "the sampler Every of its train_dataloader"),
        (lambda: DataLoader(ALL, sampler=[1, 1, 2]), "the sampler list of its .* repeats samples"),
        (
            lambda: DataLoader(ALL, batch_sampler=Pairs()),
            "the batch_sampler Pairs of its train_dataloader",
        ),
        (
            lambda: DataLoader(ALL, collate_fn=joined),
            "the collate_fn joined of its train_dataloader",
        ),
        (lambda: Shortened(ALL), "gives a Shortened: it must give one DataLoader"),
        (lambda: {"a": DataLoader(ALL)}, "gives a dict: it must give one DataLoader"),
        (lambda: DataLoader(Stream()), "Stream is an IterableDataset"),
        (lambda: DataLoader(Endless(), sampler=[1, 2]), "Endless has no __len__"),
        (lambda: DataLoader(Jittered()), "sample 0 of Jittered differs at each reading"),
    ],
)
@pytest.mark.parametrize("part", ["train", "test"])
def test_what_clients_would_not_do_is_refused_by_name(road, train, line, part):
    module = module_of(train) if part == "train" else module_of(lambda: DataLoader(ALL), train)
    with refuses(f": .*{line.replace('train_', f'{part}_')}"):
        road(module)


def test_hooks_of_batches_are_refused(road):
    hooked = module_of(
        lambda: DataLoader(ALL), on_after_batch_transfer=lambda self, batch, dataloader_idx: batch
    )
    with refuses("its on_after_batch_transfer would not be called"):
        road(hooked)


def test_a_test_set_of_from_datasets_is_read(tmp_path):
    """Lightning puts its loaders on the object, not on a class."""
    parts = Subset(ALL, range(30)), Subset(ALL, range(30, 40))
    place, _ = keep(LightningDataModule.from_datasets(parts[0], test_dataset=parts[1]), tmp_path)
    with np.load(place / "given.npz") as arrays:
        assert arrays["x_test"].ravel().tolist() == list(range(30, 40))


@pytest.mark.parametrize(
    "data, line",
    [
        (Stream(), "Stream is an IterableDataset"),
        (Endless(), "Endless has no __len__"),
        (Jittered(), "sample 0 of Jittered differs at each reading"),
        (DataLoader(ALL), "'DataLoader': give"),
        ([DataLoader(ALL), DataLoader(ALL)], "'list': give"),
    ],
)
def test_data_of_a_script_that_cannot_be_read_are_refused(data, line, tmp_path):
    with refuses(rf"^data=.*{line}"):
        keep(data, tmp_path)
