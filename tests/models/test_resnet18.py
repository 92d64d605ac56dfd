import pytest
import torch

from fl_lightning.models.resnet18 import ResNet18


@pytest.mark.parametrize(
    "shape, stem, expected",
    [
        ((3, 32, 32), "7x7", 11_181_642),
        ((3, 32, 32), "3x3", 11_173_962),
        ((1, 28, 28), "7x7", 11_181_642 - 2 * 49 * 64),
        ((1, 28, 28), "3x3", 11_173_962 - 2 * 9 * 64),
    ],
)
def test_parameters(shape, stem, expected):
    model = ResNet18(10, shape, stem)
    assert sum(p.numel() for p in model.parameters()) == expected
    assert model.eval()(torch.zeros(2, *shape)).shape == (2, 10)


def test_the_colour_7x7_stem_is_torchvisions():
    from torchvision.models import resnet18

    torch.manual_seed(0)
    ours = ResNet18(10, (3, 32, 32)).state_dict()
    torch.manual_seed(0)
    theirs = resnet18(weights=None, num_classes=10).state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
