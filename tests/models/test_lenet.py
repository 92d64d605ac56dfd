import pytest
import torch
from refusals import refuses

from fl_lightning.models.lenet import LeNet


@pytest.mark.parametrize(
    "shape, flat",
    # 28 -> 24 -> 12 -> 8 -> 4; 32 -> 28 -> 14 -> 10 -> 5
    [((1, 28, 28), 256), ((3, 28, 28), 256), ((1, 32, 32), 400), ((3, 32, 32), 400)],
)
def test_parameters_by_hand(shape, flat):
    model = LeNet(shape, 10)
    convolutions = (25 * shape[0] + 1) * 6 + (25 * 6 + 1) * 16
    assert (
        sum(p.numel() for p in model.parameters())
        == convolutions + (flat + 1) * 120 + 121 * 84 + 85 * 10
    )
    assert model(torch.zeros(2, *shape)).shape == (2, 10)


def test_images_that_are_too_small():
    for shape in ((1, 15, 15), (1, 8, 8), (64,)):
        with refuses("padding"):
            LeNet(shape, 10)
    assert LeNet((1, 16, 16), 10)(torch.zeros(2, 1, 16, 16)).shape == (2, 10)
    assert LeNet((1, 8, 8), 10, padding=2)(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
