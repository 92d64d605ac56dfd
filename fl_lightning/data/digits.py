"""scikit-learn's handwritten digits (E. Alpaydin and C. Kaynak, UCI, 1998): 1,797 real images of
8x8 pixels."""

import gzip
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from fl_lightning.configuration.config import DataConfig
from fl_lightning.data.source import SamplePool, Source, source_of

FILE = "datasets/data/digits.csv.gz"
"""Path in scikit-learn of the table: 64 pixels and the class in each row."""


def load(data: DataConfig) -> Source:
    """Read the images, (1, 8, 8), of 17 grey levels."""
    table = _table()
    pixels = table[:, :-1].astype(np.uint8)
    images = pixels.reshape(-1, 8, 8)[:, None]
    names = [str(digit) for digit in range(10)]
    return source_of(
        data,
        SamplePool.of(images, table[:, -1].astype(np.int64)),
        None,
        names,
    )


@cache
def _table() -> np.ndarray:
    """Read pixels and classes (1797, 65), once for all runs of a process; the array is not to be
    changed.

    The file is read directly, since importing scikit-learn takes as long as some rounds.
    """
    package = find_spec("sklearn")
    file = Path(package.origin).parent / FILE if package and package.origin else None
    if file is not None and file.is_file():
        with gzip.open(file, "rt", encoding="utf-8") as rows:
            return np.loadtxt(rows, delimiter=",")
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return np.column_stack([bunch.data, bunch.target])
