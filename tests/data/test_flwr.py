"""Our partitions beside those of flwr-datasets: the same distributions of what clients hold.

FL_FLWR names a Python that has flwr_datasets, since its bounds on packages may not go with ours; else it is this one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import ks_2samp

from fl_lightning.config import DataConfig
from fl_lightning.data import partition

pytestmark = pytest.mark.slow
SEEDS, CLIENTS, CLASSES, EACH = 60, 10, 10, 200
PYTHON = os.environ.get("FL_FLWR", sys.executable)
SCRIPT = f"""
import json, sys
import numpy as np
from datasets import Dataset
from flwr_datasets.partitioner import DirichletPartitioner, IidPartitioner, PathologicalPartitioner

data, found = Dataset.from_dict({{"label": np.repeat(np.arange({CLASSES}), {EACH}).tolist()}}), {{}}
def counted(name, partitioner):
    partitioner.dataset = data
    found.setdefault(name, []).append([
        np.bincount(partitioner.load_partition(c)["label"][:], minlength={CLASSES}).tolist() for c in range({CLIENTS})
    ])
for seed in range({SEEDS}):
    counted("dirichlet", DirichletPartitioner({CLIENTS}, "label", 0.5, min_partition_size=0, seed=seed))
counted("iid", IidPartitioner({CLIENTS}))
counted("pathological", PathologicalPartitioner({CLIENTS}, "label", 3, "random", seed=0))
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def theirs() -> dict[str, np.ndarray]:
    """Samples by partition: seed, client and class."""
    if subprocess.run([PYTHON, "-c", "import flwr_datasets"], capture_output=True).returncode:
        pytest.skip("flwr_datasets is not installed here, and FL_FLWR names no Python that has it")
    out = subprocess.run([PYTHON, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout
    return {name: np.array(counts) for name, counts in json.loads(out).items()}


def ours(seeds: int = SEEDS, **options: Any) -> np.ndarray:
    labels = np.repeat(np.arange(CLASSES), EACH)
    data = replace(DataConfig(min_samples=1), **options)
    dealt = [partition.deal(labels, labels, CLIENTS, data, np.random.default_rng(s))[0] for s in range(seeds)]
    return np.array([[np.bincount(labels[share], minlength=CLASSES) for share in shares] for shares in dealt])


def test_dirichlet_by_class(theirs: dict[str, np.ndarray]) -> None:
    """Shares of a class, and clients' sizes; another alpha is told apart."""
    found = ours(partition="dirichlet", alpha=0.5)
    assert found.sum(axis=(1, 2)).tolist() == theirs["dirichlet"].sum(axis=(1, 2)).tolist() == [2000] * SEEDS
    for of in (lambda counts: counts.ravel(), lambda counts: counts.sum(axis=2).ravel()):
        assert ks_2samp(of(found), of(theirs["dirichlet"])).pvalue > 0.01
    other = ours(partition="dirichlet", alpha=0.3)
    assert ks_2samp(other.ravel(), theirs["dirichlet"].ravel()).pvalue < 1e-6


def test_iid_and_pathological(theirs: dict[str, np.ndarray]) -> None:
    found = ours(1, partition="iid")
    assert found.sum(axis=2).tolist() == theirs["iid"].sum(axis=2).tolist() == [[200] * CLIENTS]
    found = ours(1, partition="pathological", classes_per_client=3)
    assert (found > 0).sum(axis=2).tolist() == (theirs["pathological"] > 0).sum(axis=2).tolist() == [[3] * CLIENTS]
