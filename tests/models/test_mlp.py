from __future__ import annotations

import pytest

from fl_lightning.models.mlp import MLP


@pytest.mark.parametrize(
    ("shape", "hidden", "expected"),
    # FEDORA's: 784*128+128 + 128*128+128 + 128*10+10.
    [((1, 28, 28), (128, 128), 118_282), ((1, 8, 8), (), 650), ((20,), (3,), 63 + 40)],
)
def test_parameters(shape: tuple[int, ...], hidden: tuple[int, ...], expected: int) -> None:
    assert sum(p.numel() for p in MLP(shape, 10, hidden).parameters()) == expected
