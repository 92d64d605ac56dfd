"""scikit-learn's handwritten digits (E. Alpaydin and C. Kaynak, UCI, 1998): 1,797 real images of 8x8 pixels."""

from __future__ import annotations

import numpy as np

from fl_lightning.data.source import Pool, Source, split_source


def load() -> Source:
    """Images (1, 8, 8) of 17 grey levels; the 80/20 split is the same in every run, whatever its seed."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = bunch.images.astype(np.uint8)[:, None]
    return split_source(Pool.of(images, bunch.target), [str(digit) for digit in range(10)])
