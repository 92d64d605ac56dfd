import shutil
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import glyphs

FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"


@pytest.fixture
def two(tmp_path):
    for name in ("DejaVuSans.ttf", "STIXGeneral.ttf"):
        shutil.copy(FONTS / name, tmp_path)
    return str(tmp_path)


def test_a_typeface_is_a_group_and_draws_each_character_in_several_ways(two):
    source = glyphs.load(DataConfig(root=two))
    assert (
        source.group_names == ["DejaVuSans", "STIXGeneral"]
        and "".join(source.class_names) == glyphs.CLASSES
    )
    assert len(glyphs.CLASSES) == 62
    assert (len(source.train.labels), len(source.test.labels)) == (496, 124)
    chosen = np.flatnonzero(source.train.labels == glyphs.CLASSES.index("Q"))
    images = source.train.read(chosen)
    assert images.shape[1:] == (1, 28, 28) and images.dtype == np.uint8
    assert len({image.tobytes() for image in images}) == len(chosen)
    ink = (images > 128).mean(axis=(1, 2, 3))
    assert (ink > 0.03).all() and (ink < 0.5).all()
    # the same in every run
    assert (images == glyphs.load(DataConfig(root=two)).train.read(chosen)).all()
