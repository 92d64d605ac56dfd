import re

import pytest
from refusals import refuses

from fl_lightning.models.cnn import CNN
from fl_lightning.models.cnn1d import CNN1D
from fl_lightning.models.mlp import MLP
from fl_lightning.models.transformer import Transformer


@pytest.mark.parametrize(
    "shape, hidden, expected",
    # FEDORA's: 784*128+128 + 128*128+128 + 128*10+10.
    [((1, 28, 28), (128, 128), 118_282), ((1, 8, 8), (), 650), ((20,), (3,), 63 + 40)],
)
def test_parameters(shape, hidden, expected):
    assert sum(p.numel() for p in MLP(shape, 10, hidden).parameters()) == expected


def test_layers_without_numbers_are_refused():
    """`hidden [0]` trained a bias alone, in silence."""
    for name, sizes, make in (
        ("hidden", [8, 0], lambda: MLP((20,), 10, (8, 0))),
        ("hidden", [-1], lambda: MLP((20,), 10, (-1,))),
        ("channels", [4, 0], lambda: CNN((1, 28, 28), 10, (4, 0))),
        ("hidden", [0], lambda: CNN((1, 28, 28), 10, hidden=(0,))),
        ("channels", [0], lambda: CNN1D((3, 64), 10, (0,))),
        ("width", [0], lambda: Transformer((8,), 10, 20, width=0)),
    ):
        with refuses(rf"model\.init_args\.{name}: {re.escape(str(sizes))} is not allowed"):
            make()
