"""scikit-learn's handwritten digits (E. Alpaydin and C. Kaynak, UCI, 1998): 1,797 real images of 8x8 pixels."""

from __future__ import annotations

from functools import cache

import numpy as np

from fl_lightning.data.source import Pool, Source, split_source


def load() -> Source:
    """Images (1, 8, 8) of 17 grey levels; the 80/20 split is the same in every run, whatever its seed."""
    images, labels = (values.copy() for values in _read())
    return split_source(Pool.of(images, labels), [str(digit) for digit in range(10)])


@cache
def _read() -> tuple[np.ndarray, np.ndarray]:
    """Once for all runs of a process: to unpack the numbers, which are text, takes longer than a round."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return bunch.images.astype(np.uint8)[:, None], bunch.target
