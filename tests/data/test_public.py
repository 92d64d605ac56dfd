import numpy as np
import pytest
import torch
from refusals import refuses
from torch.testing import assert_close

from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import prepare


def arrays(folder, name="a.npz", shape=(4, 4), dtype=np.uint8):
    rng = np.random.default_rng(len(name))
    x = rng.integers(0, 256, (60, *shape)).astype(dtype)
    np.savez(
        folder / name, x_train=x, y_train=np.arange(60) % 2, x_test=x[:10], y_test=np.arange(10) % 2
    )
    return str(folder / name)


def train_images(data):
    parts = [
        getattr(data.client(i), part)
        for i in range(data.clients)
        for part in ("train", "validation")
    ]
    return torch.cat([x for part in parts for x, _ in part.batches(1000)])


def rows(images):
    return sorted(image.numpy().tobytes() for image in images)


def test_what_is_held_back_and_what_clients_hold_make_up_the_training_set(tmp_path):
    root = arrays(tmp_path)
    raw = np.load(root)["x_train"].astype(np.float32)
    data = prepare(DataConfig(root=root, partition="iid", public="held_back", validation=0.2), 3, 0)
    assert data.public_size == 6  # a tenth of 60
    assert sum(data.train_sizes) == 54 - 3 * 3
    seen = data._train
    both = torch.cat([train_images(data), data.public()]) * seen.std + seen.mean
    assert rows(both.round()) == rows(torch.from_numpy(raw[:, None]))


def test_the_normalisation_is_that_of_the_private_data(tmp_path):
    data = prepare(
        DataConfig(root=arrays(tmp_path), partition="iid", public="held_back", public_samples=20),
        2,
        0,
    )
    assert data.public_size == 20
    private = train_images(data)
    assert private.mean() == pytest.approx(0, abs=1e-6)
    assert private.std(correction=0) == pytest.approx(1, abs=1e-5)
    assert abs(float(data.public().mean())) > 1e-4


def test_a_file_without_labels_and_a_limit(tmp_path):
    root = arrays(tmp_path)
    x = np.arange(40 * 16, dtype=np.uint8).reshape(40, 4, 4)
    np.savez(tmp_path / "public.npz", x_public=x, x_train=x[:2])
    config = DataConfig(root=root, partition="iid", public=str(tmp_path / "public.npz"))
    data = prepare(config, 2, 0)
    seen = data._train
    expected = (torch.from_numpy(x[:, None]).float() - seen.mean) / seen.std
    assert_close(data.public(), expected)
    assert sum(data.train_sizes) == 60  # nothing is taken from the clients
    config.public_samples = 7
    some = prepare(config, 2, 0)
    assert some.public_size == 7
    assert set(rows(some.public())) < set(rows(data.public()))
    assert rows(some.public()) != rows(prepare(config, 2, 1).public())


def test_grey_public_images_for_colour_clients(tmp_path):
    root = arrays(tmp_path, shape=(4, 4, 3))
    data = prepare(
        DataConfig(root=root, partition="iid", public=arrays(tmp_path, "grey.npz")), 2, 0
    )
    raw = data.public() * data._train.std + data._train.mean
    assert raw.shape == (60, 3, 4, 4)
    assert_close(raw[:, 0], raw[:, 2])
    assert not torch.equal(raw[0], raw[1])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"public": "mnits"}, r"data\.public='mnits'.*did you mean mnist"),
        ({"public": "nowhere.npz"}, r"data\.public='nowhere\.npz'.*no such file"),
        (
            {"public": "svhn", "public_root": "none"},
            r"data\.public_root='none'.*below data\.public_root$",
        ),
        (
            {"public": "held_back", "public_samples": 1438},
            r"data\.public_samples=1438.*below 1438, the training",
        ),
        ({"public": "held_back", "public_samples": 1400}, r"federation\.clients"),
    ],
)
def test_bad_input(options, message):
    with refuses(message) as caught:
        prepare(DataConfig(**options), 10, 0)
    assert "\n" not in str(caught.value)
