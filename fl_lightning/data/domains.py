"""Domains: the same classes in several looks (photographs, sketches, ...), each domain shared by
several clients."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from fl_lightning.configuration.config import DataConfig, check
from fl_lightning.data import digits, images, vision
from fl_lightning.data.sampling import in_turn, split, stratified
from fl_lightning.data.source import TEST_SHARE, SamplePool, Source, at_root
from fl_lightning.foundation.named import composed, entries
from fl_lightning.foundation.rng import numpy_rng

LAYOUT = "a folder with DOMAIN/CLASS/*.jpg, as PACS, Office-Home and DomainNet have them"


def load(data: DataConfig) -> Source:
    """Read image folders by domain and class; the classes are those of all domains, sorted by name.

    A fifth of each class of a domain is its test part, drawn from `data.test_seed`. Each domain is
    divided into `data.clients_per_domain` natural groups.
    """
    root, folder = at_root(data, LAYOUT)
    folders = [path for path in entries(folder) if path.is_dir()]
    check("data.root", root, bool(folders), f"it holds no folder; it must be {LAYOUT}")
    read = [images.class_folders(root, domain, LAYOUT) for domain in folders]
    names = sorted({name for _, classes in read for name in classes})
    parts = []
    for pool, classes in read:
        numbers = np.array([names.index(name) for name in classes])
        pool = replace(pool, labels=numbers[pool.labels])
        train, test = split(
            pool.labels,
            TEST_SHARE,
            numpy_rng(data.split_seed, "data.split"),
        )
        read_test = test if data.reads_test else train
        parts.append((pool.part(train), pool.part(read_test)))
    return of_domains(
        parts, names, [composed(domain.name) for domain in folders], data.clients_per_domain
    )


def digit_pair(data: DataConfig) -> Source:
    """Make two domains: scikit-learn's digits, and as many images of MNIST, their 28x28 pixels
    averaged to 8x8; (1, 8, 8) uint8.

    The classes are the same, but writers and scanners differ: a shift of features only.
    """
    digit_source = digits.load(data)
    mnist = vision.load(replace(data, source="mnist", score_on="test"))
    digit_pools = []
    mnist_pools = []
    for part in ("train", "test"):
        digit_pool = getattr(digit_source, part)
        mnist_pool = getattr(mnist, part)
        size = min(len(digit_pool.labels), len(mnist_pool.labels))
        chosen = stratified(mnist_pool.labels, size, numpy_rng(0, f"digit_pair {part}"))
        mnist_images = _averaged(mnist_pool.read(chosen))
        mnist_pools.append(SamplePool.of(mnist_images, mnist_pool.labels[chosen]))
        digit_images = (digit_pool.read_all() * (255 / 16)).round()
        digit_pools.append(SamplePool.of(digit_images.astype(np.uint8), digit_pool.labels))
    names = digit_source.class_names
    return of_domains(
        [digit_pools, mnist_pools], names, ["digits", "mnist"], data.clients_per_domain
    )


def of_domains(
    parts: Sequence[Sequence[SamplePool]],
    class_names: list[str],
    domain_names: Sequence[str],
    per_domain: int,
) -> Source:
    """Join the samples of several domains into one source, each domain shared by `per_domain`
    clients.

    The clients, which are the natural groups, get equal numbers of their domain's samples with the
    same class mix, as far as whole samples allow. `Source.domains` holds each client's domain.

    Args:
        parts: training and test pool of each domain.
        class_names: names of the classes, which all domains share.
        domain_names: names of the domains.
        per_domain: clients of each domain.
    """
    pools_of_part = {"train": list[SamplePool](), "test": list[SamplePool]()}
    for number, pools in enumerate(parts):
        for pool, part in zip(pools, pools_of_part, strict=True):
            place = in_turn(pool.labels, per_domain, numpy_rng(0, f"domain {number} {part}"))
            groups = number * per_domain + place
            pools_of_part[part].append(replace(pool, groups=groups))
    train, test = (reduce(SamplePool.followed_by, pools) for pools in pools_of_part.values())
    names = []
    domains = []
    for number, name in enumerate(domain_names):
        for k in range(per_domain):
            names.append(name if per_domain == 1 else f"{name} {k + 1}")
            domains.append(number)
    return Source(
        train,
        test,
        class_names,
        names,
        domains,
    )


def _averaged(raw: np.ndarray) -> np.ndarray:
    """Average images (n, 1, height, width) uint8 to 8x8 pixels."""
    import torch
    from torch.nn.functional import adaptive_avg_pool2d

    images = torch.from_numpy(raw).float()
    return adaptive_avg_pool2d(images, 8).round().byte().numpy()
