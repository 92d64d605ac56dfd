from dataclasses import replace

import numpy as np
import pytest
import torch
from refusals import refuses

from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import planted, prepare
from fl_lightning.foundation.metric import NO_TARGET

PARTS = ("train", "validation", "test")
PLAIN = DataConfig(partition="iid", validation=0.2)


def whole(part):
    return next(iter(part.batches(len(part))))


@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
def test_labels_are_moved_on_in_every_part_and_nothing_else_changes(partition):
    config = replace(PLAIN, partition=partition, alpha=0.5)
    plain, moved = prepare(config, 7, 0), prepare(replace(config, planted="labels", groups=3), 7, 0)
    assert moved.groups == [0, 1, 2, 0, 1, 2, 0]
    assert plain.groups == [0] * 7
    for i, group in enumerate(moved.groups):
        for name in PARTS:
            (x, y), (same, changed) = (
                whole(getattr(data.client(i), name)) for data in (plain, moved)
            )
            assert torch.equal(x, same)
            assert torch.equal(changed, (y + group) % 10)
        assert moved.class_counts[i].tolist() == np.roll(plain.class_counts[i], group).tolist()


def test_positions_without_a_target_have_none_in_any_group():
    tasks = planted.tasks(replace(PLAIN, planted="labels", groups=3), 6, 120, 0)
    labels = np.array([[5, NO_TARGET, 119], [NO_TARGET, 0, 1]])
    moved = tasks.relabelled(labels, None, 2)
    assert moved.tolist() == [[7, NO_TARGET, 1], [NO_TARGET, 2, 3]]
    assert tasks.relabelled(moved, 2, 0).tolist() == labels.tolist()


@pytest.mark.parametrize(
    "change, clients", [({"planted": "rotation"}, 8), ({"partition": "rotated"}, 4)]
)
def test_images_of_a_group_or_client_are_turned_alike(change, clients):
    """By 90 degrees from one to the next, counter-clockwise."""
    plain, turned = (prepare(config, clients, 0) for config in (PLAIN, replace(PLAIN, **change)))
    assert turned.groups == [i % 4 * ("planted" in change) for i in range(clients)]
    for i in range(clients):
        for name in PARTS:
            (x, y), (other, same) = (
                whole(getattr(data.client(i), name)) for data in (plain, turned)
            )
            assert torch.equal(other, torch.rot90(x, i, (-2, -1)))
            assert torch.equal(y, same)


@pytest.mark.parametrize(
    "options, clients, message",
    [
        (
            {"planted": "labels", "groups": 5},
            4,
            r"data\.groups=5.*at most 4: each group needs a client",
        ),
        (
            {"planted": "labels", "groups": 11},
            20,
            r"data\.groups=11.*at most 10: .*no more classes",
        ),
        ({"planted": "rotation", "groups": 1}, 4, r"data\.groups=1.*at least 2"),
        (
            {"planted": "rotation", "partition": "rotated"},
            4,
            r"data\.planted='rotation'.*turns images already",
        ),
        (
            {"planted": "labels", "global_test": True},
            4,
            r"data\.planted='labels'.*all clients share one test set",
        ),
        (
            {"planted": "labels", "task": "regression"},
            4,
            r"data\.planted='labels'.*has no classes",
        ),
    ],
)
def test_what_cannot_be_planted_is_said(options, clients, message):
    config = replace(PLAIN, **options)
    with refuses(message):
        config.validate()
        prepare(config, clients, 0)
