"""Windows are split in time: no sample of a recording is in two parts."""

from dataclasses import replace

import numpy as np
import pytest
from refusals import refuses

from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import prepare

PERSONS, EXERCISES = 4, 3


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """seglearn's file as its wheel has it; a sample's first two axes say where it is: recording and
    place."""
    kinds = [
        (person, exercise)
        for person in range(1, PERSONS + 1)
        for exercise in range(EXERCISES)
        for _ in "ab"
    ]
    lengths = [1000 + 37 * k for k in range(len(kinds))]
    series = [
        np.stack([np.full(n, float(k)), np.arange(n), *np.zeros((4, n))], axis=1)
        for k, n in enumerate(lengths)
    ]
    person, exercise = np.array(kinds, float).T
    held = {
        "X": series,
        "y": exercise,
        "subject": person,
        "y_labels": ["PEN", "ABD", "FEL"],
        "side": person,
    }
    folder = tmp_path / "seglearn" / "data"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    np.save(folder / "watch_dataset.npy", np.array(held, dtype=object), allow_pickle=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder / "watch_dataset.npy"


@pytest.mark.usefixtures("wheel")
@pytest.mark.parametrize(
    "options",
    [
        {"validation": 0.2},
        {"validation": 0.2, "client_test": 0.3},
        {"validation": 0.2, "partition": "dirichlet", "alpha": 10.0},
        {"validation": 0.25, "samples_per_class": 4, "min_samples": 5},
        {"validation": 0.2, "score_on": "validation"},
        {"validation": 0.2, "public": "held_back"},
        {"validation": 0.2, "client_test": 0.3, "public": "held_back", "public_samples": 60},
    ],
)
def test_a_person_is_a_client_and_no_sample_is_in_two_parts(options):
    config = DataConfig(source="watch", **{"partition": "natural", **options})
    config.validate()
    data = prepare(config, PERSONS, 0)
    assert data.input_shape == (6, 100) and data.class_names == ["PEN", "ABD", "FEL"]
    seen = {"train": set(), "validation": set(), "test": set()}
    for client in range(PERSONS):
        for name, samples in seen.items():
            x, y = next(iter(getattr(data.client(client), name).batches(10_000)))
            raw = raw_of(x, data)
            recordings = raw[:, 0, 0]
            assert (recordings // 2 % EXERCISES == y).all()
            if config.partition == "natural":
                assert (recordings // 2 // EXERCISES == client).all()
            samples |= moments(raw)
        if config.samples_per_class:
            assert (data.class_counts[client] <= 4).all() and len(
                data.client(client).validation
            ) == 3
    assert not seen["train"] & seen["validation"]
    if config.score_on == "test":
        assert not seen["test"] & (seen["train"] | seen["validation"])
    if config.public:
        assert data.public_size
        assert not moments(raw_of(data.public(), data)) & (seen["validation"] | seen["test"])


def raw_of(x, data):
    raw = (x * data._train.std + data._train.mean).round().long()
    assert (raw[:, 0] == raw[:, :1, 0]).all() and (raw[:, 1].diff() == 1).all()
    return raw


def moments(raw):
    """(recording, place) of all that the windows show."""
    return {(r, k) for r, begin in raw[:, :2, 0].tolist() for k in range(begin, begin + 100)}


@pytest.mark.usefixtures("wheel")
def test_what_does_not_go_is_said():
    natural = DataConfig(source="watch", partition="natural")
    with refuses(r"federation\.clients=5.*it must be 4: a client for each group of the data"):
        prepare(natural, 5, 0)
    with refuses(r"data\.samples_per_class=2.*would keep 6 samples, and each needs 10"):
        prepare(replace(natural, samples_per_class=2), PERSONS, 0)
    with refuses(r"data\.augment='flip'.*it needs images, but the samples are series"):
        prepare(replace(natural, augment="flip"), PERSONS, 0)
    with refuses(r"data\.min_samples=55.*some client has only \d+ windows"):
        prepare(replace(natural, validation=0.4, min_samples=55), PERSONS, 0)
