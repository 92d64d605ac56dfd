import json

import numpy as np
import pytest
from refusals import refuses

from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import leaf, prepare


def write(folder, part, users, name="all_data_0"):
    """A file as LEAF's scripts write it."""
    (folder / part).mkdir(parents=True, exist_ok=True)
    held = {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }
    (folder / part / f"{name}.json").write_text(json.dumps(held))


def read(folder):
    return leaf.load(DataConfig(source="leaf", root=str(folder)))


def images(user, count):
    x = np.full((count, 784), 1.0)
    x[:, 0], x[:, 1] = user / 10, np.arange(count) / 100
    return x.tolist(), [(user + k) % 4 for k in range(count)]


def femnist(folder):
    write(folder, "train", {"f1": images(1, 12), "f0": images(0, 16)})
    write(folder, "train", {"f2": images(2, 14)}, "all_data_1")
    write(folder, "test", {"f0": images(0, 4), "f1": images(1, 3), "f2": images(2, 2)})
    return str(folder)


def test_femnist(tmp_path):
    root = femnist(tmp_path)
    source = read(tmp_path)
    assert source.group_names == ["f0", "f1", "f2"] and source.class_names == ["0", "1", "2", "3"]
    for pool, sizes in ((source.train, [16, 12, 14]), (source.test, [4, 3, 2])):
        raw = pool.read_all()
        assert raw.shape[1:] == (1, 28, 28) and raw.dtype == np.float32
        assert pool.groups is not None and np.bincount(pool.groups).tolist() == sizes
        np.testing.assert_allclose(raw[:, 0, 0, 0], pool.groups / 10, rtol=1e-6)
        np.testing.assert_array_equal(
            (pool.groups + np.round(raw[:, 0, 0, 1] * 100)) % 4, pool.labels
        )
    data = prepare(DataConfig(source="leaf", root=root, partition="natural"), 3, 0)
    assert data.train_sizes == [16, 12, 14] and data.test_sizes == [4, 3, 2]


LINES = ["the quick ", "he quick b", "e quick br", " quick bro"]


def test_shakespeare(tmp_path):
    write(
        tmp_path,
        "train",
        {"KING": (LINES * 4, list("brow") * 4), "FOOL": (LINES[:2] * 8, list("br") * 8)},
    )
    write(tmp_path, "test", {"FOOL": (["the quick?"], ["!"]), "KING": (["quick"], ["k"])})
    source = leaf.load(DataConfig(source="leaf", root=str(tmp_path), length=8))
    names = source.class_names
    assert names == [
        "<unknown>",
        *sorted(set("".join(LINES) + "brow")),
    ] and source.vocabulary == len(names)
    assert source.group_names == ["FOOL", "KING"]
    tokens, labels, groups = source.train.read_all(), source.train.labels, source.train.groups
    assert tokens.dtype == np.int64 and groups.tolist() == [0] * 16 + [1] * 16
    for row, label, line, letter in zip(
        tokens[16:], labels[16:], LINES * 4, "brow" * 4, strict=True
    ):
        assert "".join(names[t] for t in row) == line[-8:] and names[label] == letter
    # the end of it
    assert [names[t] for t in source.test.read_all()[0]] == [*"e quick", "<unknown>"]
    assert source.test.read_all()[1, :3].tolist() == [0, 0, 0] and source.test.labels[0] == 0


@pytest.mark.parametrize(
    "users, message",
    [
        (
            {"a": ([[1.0, 2.0]], [0, 1])},
            r"all_data_0\.json: the user 'a' must have lists x and y of one length",
        ),
        ({"a": ([], [])}, r"no user in the files of .* has a sample"),
        (
            {"a": ([[1.0, 2.0], [1.0]], [0, 1])},
            r"all_data_0\.json: sample 2 of user 'a': x must hold 2 numbers",
        ),
        ({"a": ([[1.0, 2.0]], [-1])}, r"sample 1 of user 'a': .*y is -1"),
        ({"a": ([[1.0, "x"]], [0])}, r"sample 1 of user 'a': x must hold 2 numbers"),
        ({"a": ([[1.0, float("nan")]], [0])}, r"sample 1 of user 'a': x must hold 2 numbers"),
        ({"a": ([[[1.0], [1.0, 2.0]]], [0])}, r"sample 1 of user 'a': x must hold 2 numbers"),
        ({"a": ([3.5], [0])}, r"sample 1 of user 'a': x must hold 1 numbers"),
        ({"a": ([[1.0, 2.0]], [10**15])}, r"label 10+ of 1 training samples"),
        ({"a": (["to be ", 5], ["o", "r"])}, r"sample 2 of user 'a': x must be a text"),
        (
            {"a": (["to be "], [3])},
            r"sample 1 of user 'a': x must be a text, y the next character; y is 3",
        ),
    ],
)
def test_bad_samples_are_named(users, message, tmp_path):
    write(tmp_path, ".", users)
    with refuses(rf"data\.root=.*{message}"):
        read(tmp_path)


def test_users_without_training_samples_are_left_out_in_a_line(tmp_path, capsys):
    write(tmp_path, "train", {"f0": images(0, 16), "f1": ([], []), "f2": images(2, 14)})
    write(tmp_path, "test", {"f0": images(0, 4), "f1": images(1, 3), "f2": images(2, 2)})
    source = read(tmp_path)
    assert source.group_names == ["f0", "f2"] and len(source.test.labels) == 6
    line = "data: 1 of 3 users have no training samples and are left out, with 3 test samples: 'f1'"
    assert line in capsys.readouterr().err


def test_a_user_without_test_samples_is_named_with_what_to_do(tmp_path):
    write(tmp_path, "train", {"f0": images(0, 16), "f1": images(1, 16)})
    write(tmp_path, "test", {"f0": images(0, 4), "f1": ([], [])})
    config = DataConfig(source="leaf", root=str(tmp_path), partition="natural")
    with refuses(r"the client 'f1' has no test sample: set it"):
        prepare(config, 2, 0)
    shares = DataConfig(source="leaf", root=str(tmp_path), partition="natural", client_test=0.25)
    assert prepare(shares, 2, 0).test_sizes == [5, 4]
