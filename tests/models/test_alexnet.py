import pytest
import torch

from fl_lightning.models.alexnet import AlexNet


@pytest.mark.parametrize("side, left", [(28, 1), (32, 2), (16, 1), (15, 1)])
@pytest.mark.parametrize("channels", [1, 3])
def test_parameters_by_hand(side, left, channels):
    model = AlexNet((channels, side, side), 7, width=16)
    convolutions = (
        (9 * channels + 1) * 64 + (9 * 64 + 1) * 192 + (9 * 192 + 1) * 384 + (9 * 384 + 1) * 256
    )
    convolutions += (9 * 256 + 1) * 256
    top = (256 * left * left + 1) * 16 + 17 * 16 + 17 * 7
    assert sum(p.numel() for p in model.parameters()) == convolutions + top
    assert model(torch.zeros(2, channels, side, side)).shape == (2, 7)
