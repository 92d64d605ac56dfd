"""The networks of the package: their sizes by hand and as papers print them, and what they refuse."""

import re

import pytest
import torch
from refusals import refuses
from torchvision.models import resnet18

from fl_lightning.configuration.config import Component
from fl_lightning.core.layout import Layout
from fl_lightning.models import build, head_of
from fl_lightning.models.alexnet import AlexNet
from fl_lightning.models.cnn import CNN, CNN5
from fl_lightning.models.cnn1d import CNN1D
from fl_lightning.models.lenet import LeNet
from fl_lightning.models.mlp import MLP
from fl_lightning.models.resnet18 import ResNet18
from fl_lightning.models.shufflenetv2 import ShuffleNetV2
from fl_lightning.models.transformer import Transformer

GRAY, COLOUR = (1, 28, 28), (3, 32, 32)
# 25*32+32 + 25*32*64+64 + 64*S*S*512+512 + 512*128+128 + 128*10+10, S pixels left along a side:
# 28 -> 24 -> 12 -> 8 -> 4 without padding; 28 -> 14 -> 7, 8 -> 4 -> 2, 32 -> 16 -> 8 with 2.
CONVOLUTIONS, TOP = 832 + 51_264, 512 + 65_664 + 1_290
SIZES = [
    (lambda: CNN(GRAY, 10), CONVOLUTIONS + 1024 * 512 + TOP),
    (lambda: CNN(GRAY, 10, padding=2), CONVOLUTIONS + 3136 * 512 + TOP),
    (lambda: CNN(GRAY, 10, hidden=(512,)), CONVOLUTIONS + 1024 * 512 + 512 + 5130),
    (lambda: CNN((1, 8, 8), 10, padding=2), CONVOLUTIONS + 256 * 512 + TOP),
    (lambda: CNN(COLOUR, 10, channels=(4, 8), padding=2), 304 + 808 + 512 * 512 + TOP),
    # 75*16+16 + 400*32+32 + 800*120+120 + 120*84+84 + 84*10+10
    (lambda: CNN5(COLOUR, 10), 1_216 + 12_832 + 96_120 + 10_164 + 850),
    (lambda: CNN5(COLOUR, 43), 121_182 + 33 * 85),
    # FEDORA's: 784*128+128 + 128*128+128 + 128*10+10
    (lambda: MLP(GRAY, 10, (128, 128)), 118_282),
    (lambda: MLP((1, 8, 8), 10, ()), 650),
    (lambda: MLP((20,), 10, (3,)), 63 + 40),
    # 26*6 + 151*16 + 257*120 + 121*84 + 85*10, and 76*6 and 401*120 in place of the first and third
    (lambda: LeNet(GRAY, 10), 44_426),
    (lambda: LeNet(COLOUR, 10), 62_006),
    # 10*64 + 577*192 + 1729*384 + 3457*256 + 2305*256 + 257*16 + 17*16 + 17*7; 28*64 and 1025*16
    (lambda: AlexNet(GRAY, 7, width=16), 2_254_935),
    (lambda: AlexNet(COLOUR, 7, width=16), 2_268_375),
    (lambda: ResNet18(10, COLOUR, "7x7"), 11_181_642),
    (lambda: ResNet18(10, COLOUR, "3x3"), 11_173_962),
    (lambda: ResNet18(10, GRAY, "7x7"), 11_181_642 - 2 * 49 * 64),
    (lambda: ResNet18(10, GRAY, "3x3"), 11_173_962 - 2 * 9 * 64),
    # FedHKD, Table 1: 1.286, 11.209 and 11.215 million
    (lambda: ShuffleNetV2(10, COLOUR, representation=32), 1_286_734),
    (lambda: ResNet18(10, COLOUR, representation=64), 11_209_994),
    (lambda: ResNet18(100, COLOUR, representation=64), 11_215_844),
]


def size(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.slow
def test_parameters_by_hand():
    sizes = [size(make()) for make, _ in SIZES]
    assert sizes == [expected for _, expected in SIZES]
    assert [sizes[k] for k in (0, 1, 2, 5)] == [643_850, 1_725_194, 582_026, 121_182]


def test_images_become_scores():
    for model, shape in (
        (LeNet(GRAY, 10), GRAY),
        (LeNet((1, 8, 8), 10, padding=2), (1, 8, 8)),
        (CNN5(COLOUR, 10), COLOUR),
        (AlexNet((1, 15, 15), 10, width=16), (1, 15, 15)),
        (ResNet18(10, GRAY, "3x3"), GRAY),
    ):
        assert model.eval()(torch.zeros(2, *shape)).shape == (2, 10)


def test_normalisation_counts_with_its_convolution_and_changes_no_first_weight():
    torch.manual_seed(0)
    plain = CNN((1, 16, 16), 10)
    torch.manual_seed(0)
    normed = CNN((1, 16, 16), 10, norm=True)
    assert size(normed) == size(plain) + 2 * (32 + 64)
    assert all(torch.equal(p, normed.state_dict()[name]) for name, p in plain.state_dict().items())
    assert Layout(normed, "classifier").layers == ["conv1", "conv2", "fc1", "fc2", "classifier"]
    assert normed.eval()(torch.randn(4, 1, 16, 16)).shape == (4, 10)


def test_images_that_are_too_small():
    for network in (CNN, LeNet):
        for shape in ((1, 15, 15), (1, 8, 8), (64,)):
            with refuses("padding"):
                network(shape, 10)
        network((1, 16, 16), 10)


def test_one_or_two_hidden_layers():
    """Of one the logits are those of the layers put together by hand; none and three are refused by
    name."""
    model = CNN(GRAY, 10, channels=(2, 3), hidden=(7,))
    x = torch.randn(4, *GRAY)
    maps = torch.nn.functional.max_pool2d(torch.relu(model.conv1(x)), 2)
    maps = torch.nn.functional.max_pool2d(torch.relu(model.conv2(maps)), 2)
    assert torch.equal(model(x), model.classifier(torch.relu(model.fc1(maps.flatten(1)))))
    for hidden in ((), (5, 6, 7)):
        with refuses("hidden"):
            CNN(GRAY, 10, hidden=hidden)


def test_the_colour_7x7_stem_is_torchvisions():
    torch.manual_seed(0)
    ours = ResNet18(10, COLOUR).state_dict()
    torch.manual_seed(0)
    theirs = resnet18(weights=None, num_classes=10).state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("representation", [None, 32])
@pytest.mark.parametrize("channels", [1, 3])
def test_shufflenets_scores_and_classifier(representation, channels):
    model = ShuffleNetV2(7, (channels, 32, 32), representation)
    assert model.eval()(torch.randn(2, channels, 32, 32)).shape == (2, 7)
    assert head_of(model) == "classifier"
    assert model.classifier.in_features == (representation or 1024)
    assert any(b.head for b in Layout(model, "classifier").blocks)


CNN1D_PATH = "fl_lightning.models.cnn1d.CNN1D"


def test_windows_of_any_length_become_logits():
    model = build(Component(CNN1D_PATH, {"channels": [8, 16, 4], "width": 3}), (6, 50), 7)
    assert model(torch.randn(5, 6, 50)).shape == (5, 7)
    assert head_of(model) == "classifier"
    assert [tuple(conv.weight.shape) for conv in model.convs] == [(8, 6, 3), (16, 8, 3), (4, 16, 3)]


@pytest.mark.parametrize("shape", [(64,), (1, 8, 8), (6, 3)])
def test_what_is_no_window_is_refused(shape):
    with refuses(r"model='cnn1d'.*it needs windows \(channels, samples\) of 4 or more"):
        build(Component(CNN1D_PATH, {}), shape, 7)


def test_layers_without_numbers_are_refused():
    """`hidden [0]` trained a bias alone, in silence."""
    for name, sizes, make in (
        ("hidden", [8, 0], lambda: MLP((20,), 10, (8, 0))),
        ("channels", [4, 0], lambda: CNN(GRAY, 10, (4, 0))),
        ("channels", [0], lambda: CNN1D((3, 64), 10, (0,))),
        ("width", [0], lambda: Transformer((8,), 10, 20, width=0)),
    ):
        with refuses(rf"model\.init_args\.{name}={re.escape(str(sizes))}:"):
            make()
