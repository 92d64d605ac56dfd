import gzip
import inspect
import urllib.error

import numpy as np
import pytest
import torch
import torchvision.datasets
from refusals import refuses

from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import idx, vision
from fl_lightning.data.source import Absent
from fl_lightning.data.vision import RECIPES
from fl_lightning.foundation.errors import BadInput


def load(name, root):
    return vision.load(DataConfig(source=name, root=str(root)))


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_fit_torchvisions_signatures(name):
    recipe = RECIPES[name]
    build = getattr(torchvision.datasets, recipe.dataset)
    parameters = inspect.signature(build).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if open_ended:  # EMNIST, QMNIST and ImageNet hand the rest to their base
        parameters = {**inspect.signature(build.__mro__[1]).parameters, **parameters}
    for arguments in recipe.parts.values():
        passed = {"root", *arguments, *(["download"] if recipe.downloads else [])}
        assert passed <= set(parameters)
    assert set(recipe.parts) in ({"train", "test"}, {"whole"})


@pytest.mark.parametrize("name", RECIPES)
def test_missing_files_are_one_line_with_the_remedies(name, tmp_path):
    with pytest.raises(BadInput) as caught:
        load(name, tmp_path)
    line = str(caught.value)
    assert line.startswith("data.root=")
    assert "\n" not in line
    assert RECIPES[name].files in line
    assert ("--data.download true" in line) == RECIPES[name].downloads


def test_a_failed_download_leaves_no_folder_behind(tmp_path, monkeypatch):
    def unreachable(*_, **__):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr("torchvision.datasets.mnist.download_and_extract_archive", unreachable)
    (tmp_path / "kept" / "empty").mkdir(parents=True)
    for root in (tmp_path, tmp_path / "new" / "data"):
        with pytest.raises(BadInput):
            vision.load(DataConfig(source="mnist", root=str(root), download=True))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["empty", "kept"]
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    (tmp_path / "MNIST" / "raw" / "half").write_bytes(b"of another run")
    with pytest.raises(BadInput):
        vision.load(DataConfig(source="mnist", root=str(tmp_path), download=True))
    assert (tmp_path / "MNIST" / "raw" / "half").exists()


class Fake:
    """Stands for a torchvision data set: attributes as given, samples decoded one by one."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def __getitem__(self, index):
        from PIL import Image

        return Image.new("RGB", (40, 50), (index, 0, 255)), 0


def fake(monkeypatch, dataset, **attributes):
    calls = []

    def build(**arguments):
        calls.append(arguments)
        return Fake(**attributes)

    monkeypatch.setattr(torchvision.datasets, dataset, build)
    return calls


def test_channels_first_and_last_become_first(monkeypatch):
    images = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(20) % 10
    fake(
        monkeypatch,
        "CIFAR10",
        data=images,
        targets=labels.tolist(),
        classes=[f"c{k}" for k in range(10)],
    )
    calls = fake(monkeypatch, "SVHN", data=images.transpose(0, 3, 1, 2), labels=labels)
    cifar, svhn = (
        load("cifar10", "r"),
        load("svhn", "r"),
    )
    index = np.array([3, 1])
    assert np.array_equal(cifar.train.read(index), images[index].transpose(0, 3, 1, 2))
    assert np.array_equal(svhn.train.read(index), images[index].transpose(0, 3, 1, 2))
    assert cifar.class_names == [f"c{k}" for k in range(10)]
    assert [call["split"] for call in calls] == ["train", "test"]
    assert np.array_equal(svhn.test.labels, labels)


# ---------------------------------------------------------------- idx files in the root itself


def write_idx(folder, train, packed):
    """MNIST-like files of two pools, those of the test part one sample shorter; gives the training
    images."""
    folder.mkdir(exist_ok=True)
    images = np.random.default_rng(0).integers(0, 256, (len(train), 28, 28), dtype=np.uint8)
    for part, size in (("train", len(train)), ("t10k", len(train) - 1)):
        for name, array in (
            ("images-idx3", images[:size]),
            ("labels-idx1", np.array(train[:size], np.uint8)),
        ):
            content = (
                bytes((0, 0, 8, array.ndim))
                + np.array(array.shape, ">i4").tobytes()
                + array.tobytes()
            )
            file = folder / f"{part}-{name}-ubyte{'.gz' * packed}"
            file.write_bytes(gzip.compress(content) if packed else content)
    return images


@pytest.mark.parametrize("packed", [True, False])
def test_idx_files_in_the_root(packed, tmp_path):
    images = write_idx(tmp_path, [3, 1, 9, 0], packed)
    source = load("fashionmnist", tmp_path)
    assert source.train.labels.tolist() == [3, 1, 9, 0] and source.test.labels.tolist() == [3, 1, 9]
    assert np.array_equal(source.train.read(np.array([2, 0])), images[[2, 0], None])
    assert source.class_names[9] == "Ankle boot"


def test_bad_idx_files_are_one_line(tmp_path, monkeypatch):
    write_idx(tmp_path, [3, 1, 9, 0], True)
    monkeypatch.setattr(idx, "WHOLE", 4)
    with refuses(r"another data set's: training labels begin \[3, 1, 9, 0\]"):
        load("fashionmnist", tmp_path)
    monkeypatch.undo()
    labels = tmp_path / "train-labels-idx1-ubyte.gz"
    whole = labels.read_bytes()
    for content, said in (
        (whole[:-4], "train-labels-idx1-ubyte.gz cannot be read"),
        (gzip.compress(bytes((0, 0, 9, 1, 0, 0, 0, 4)) + bytes(4)), "no idx file of bytes"),
        (
            gzip.compress(bytes((0, 0, 8, 1, 0, 0, 0, 3)) + bytes(3)),
            "do not fit together: 4 images, 3 labels",
        ),
        (gzip.compress(bytes((0, 0, 8, 1, 0, 0, 0, 4, 0, 1, 2, 10))), "do not fit together"),
    ):
        labels.write_bytes(content)
        with refuses(said):
            load("fashionmnist", tmp_path)
    labels.unlink()
    with pytest.raises(
        Absent, match=r"it lacks train-labels-idx1-ubyte \(or train-labels-idx1-ubyte\.gz\)"
    ):
        load("fashionmnist", tmp_path)


def test_labels_start_at_zero(monkeypatch):
    data = torch.zeros(26, 28, 28, dtype=torch.uint8)
    names = ["N/A", *"abcdefghijklmnopqrstuvwxyz"]
    calls = fake(monkeypatch, "EMNIST", data=data, targets=torch.arange(1, 27), classes=names)
    letters = load("emnist_letters", "r")
    assert letters.train.labels.tolist() == list(range(26))
    assert letters.class_names == names[1:]
    assert calls[0] == {"root": "r", "split": "letters", "train": True, "download": False}
    assert letters.train.read(np.arange(2)).shape == (2, 1, 28, 28)


def test_labels_outside_the_classes_are_refused(monkeypatch):
    fake(monkeypatch, "CIFAR10", data=np.zeros((2, 32, 32, 3), np.uint8), targets=[0, 10])
    with refuses("labels 0 to 10 for 10 classes"):
        load("cifar10", "r")
