import pytest
import torch
from refusals import refuses

from fl_lightning.configuration.config import Component
from fl_lightning.models import build, head_of

PATH = "fl_lightning.models.cnn1d.CNN1D"


def test_windows_of_any_length_become_logits():
    model = build(Component(PATH, {"channels": [8, 16, 4], "width": 3}), (6, 50), 7)
    assert model(torch.randn(5, 6, 50)).shape == (5, 7)
    assert head_of(model) == "classifier"
    assert [tuple(conv.weight.shape) for conv in model.convs] == [(8, 6, 3), (16, 8, 3), (4, 16, 3)]


@pytest.mark.parametrize("shape", [(64,), (1, 8, 8), (6, 3)])
def test_what_is_no_window_is_refused(shape):
    with refuses(r"model: 'cnn1d' .*are no windows \(channels, samples\) of 4 or more"):
        build(Component(PATH, {}), shape, 7)
