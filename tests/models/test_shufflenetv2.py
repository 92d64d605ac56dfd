import pytest
import torch

from fl_lightning.core.layout import Layout
from fl_lightning.models import head_of
from fl_lightning.models.resnet18 import ResNet18
from fl_lightning.models.shufflenetv2 import ShuffleNetV2


def size(model):
    return sum(p.numel() for p in model.parameters())


def test_the_parameters_are_those_that_fedhkd_prints():
    """FedHKD, Table 1: 1.286, 11.209 and 11.215 million."""
    assert size(ShuffleNetV2(10, (3, 32, 32), representation=32)) == 1_286_734
    assert size(ResNet18(10, (3, 32, 32), representation=64)) == 11_209_994
    assert size(ResNet18(100, (3, 32, 32), representation=64)) == 11_215_844


@pytest.mark.parametrize("representation", [None, 32])
@pytest.mark.parametrize("channels", [1, 3])
def test_scores_and_classifier(representation, channels):
    model = ShuffleNetV2(7, (channels, 32, 32), representation)
    assert model.eval()(torch.randn(2, channels, 32, 32)).shape == (2, 7)
    assert head_of(model) == "classifier"
    assert model.classifier.in_features == (representation or 1024)
    assert any(b.head for b in Layout(model, "classifier").blocks)
