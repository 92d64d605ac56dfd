from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from refusals import refuses

from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import domains, prepare
from fl_lightning.data.source import Absent

DOMAINS, KINDS = ("art", "photo", "sketch"), ("dog", "guitar", "horse")


@pytest.fixture
def pacs(tmp_path):
    """Ten images of each class and domain; the colour says which: red the domain, green the class,
    blue the number."""
    for d, domain in enumerate(DOMAINS):
        for k, kind in enumerate(KINDS):
            (tmp_path / domain / kind).mkdir(parents=True)
            for n in range(10):
                Image.new("RGB", (40, 30), (50 * d, 50 * k, 20 * n)).save(
                    tmp_path / domain / kind / f"pic_{n:03d}.png"
                )
    return str(tmp_path)


@pytest.mark.parametrize("per_domain", [1, 2])
def test_every_domain_has_its_clients(pacs, per_domain):
    source = domains.load(DataConfig(root=pacs, clients_per_domain=per_domain))
    assert source.class_names == list(KINDS)
    clients = 3 * per_domain
    assert source.domains == [c // per_domain for c in range(clients)]
    expected = (
        list(DOMAINS) if per_domain == 1 else [f"{name} {k}" for name in DOMAINS for k in (1, 2)]
    )
    assert source.group_names == expected
    for pool, size in ((source.train, 24), (source.test, 6)):
        raw = pool.read_all()[:, :, 16, 16]
        assert pool.groups is not None and raw.shape == (3 * size, 3)
        assert (raw[:, 0] // 50 == pool.groups // per_domain).all()
        assert (raw[:, 1] // 50 == pool.labels).all()
        assert set(np.bincount(pool.groups)) == {size // per_domain}
    mixes = 3 * source.train.groups + source.train.labels
    assert set(np.bincount(mixes)) == {8 // per_domain}  # the class mix of the domain


def test_domains_are_the_true_groups(pacs):
    config = DataConfig(
        source="domains", root=pacs, partition="natural", clients_per_domain=2, min_samples=4
    )
    assert prepare(config, 6, 0).groups == [0, 0, 1, 1, 2, 2]
    assert prepare(replace(config, partition="iid"), 6, 0).groups == [0] * 6
    with refuses(r"federation\.clients=3.*it must be 6: a client for each group of the data"):
        prepare(config, 3, 0)
    assert prepare(config, 4, 0, smoke=True).groups == [0, 0, 1, 1]


def test_folders_that_are_none(tmp_path):
    with pytest.raises(Absent, match=r"data\.root=None.*DOMAIN/CLASS"):
        domains.load(DataConfig())
    with refuses(r"holds no folder"):
        domains.load(DataConfig(root=str(tmp_path)))
