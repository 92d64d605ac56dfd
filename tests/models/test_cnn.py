import torch
from refusals import refuses

from fl_lightning.core.layout import Layout
from fl_lightning.models.cnn import CNN, CNN5


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def test_parameters_by_hand():
    # 25*32+32 + 25*32*64+64 + 64*S*S*512+512 + 512*128+128 + 128*10+10, S pixels left along a side:
    # 28 -> 24 -> 12 -> 8 -> 4 without padding; 28 -> 14 -> 7, 8 -> 4 -> 2, 32 -> 16 -> 8 with
    # padding 2.
    convolutions, top = 832 + 51_264, 512 + 65_664 + 1_290
    assert parameters(CNN((1, 28, 28), 10)) == convolutions + 1024 * 512 + top == 643_850
    assert (
        parameters(CNN((1, 28, 28), 10, padding=2)) == convolutions + 3136 * 512 + top == 1_725_194
    )
    assert (
        parameters(CNN((1, 28, 28), 10, hidden=(512,)))
        == convolutions + 1024 * 512 + 512 + 5130
        == 582_026
    )
    assert parameters(CNN((1, 8, 8), 10, padding=2)) == convolutions + 256 * 512 + top
    assert (
        parameters(CNN((3, 32, 32), 10, channels=(4, 8), padding=2)) == 304 + 808 + 512 * 512 + top
    )


def test_normalisation_counts_with_its_convolution_and_changes_no_first_weight():
    torch.manual_seed(0)
    plain = CNN((1, 16, 16), 10)
    torch.manual_seed(0)
    normed = CNN((1, 16, 16), 10, norm=True)
    assert parameters(normed) == parameters(plain) + 2 * (32 + 64)
    assert all(torch.equal(p, normed.state_dict()[name]) for name, p in plain.state_dict().items())
    layout = Layout(normed, head="classifier")
    assert layout.layers == ["conv1", "conv2", "fc1", "fc2", "classifier"]
    assert {(b.name.split(".")[0], b.layer) for b in layout.blocks if b.normalisation} == {
        ("norm1", 0),
        ("norm2", 1),
    }
    outputs = normed.eval()(torch.randn(4, 1, 16, 16))
    assert outputs.shape == (4, 10)


def test_fedoras_cnn():
    # 75*16+16 + 400*32+32 + 800*120+120 + 120*84+84 + 84*10+10
    assert parameters(CNN5((3, 32, 32), 10)) == 1_216 + 12_832 + 96_120 + 10_164 + 850 == 121_182
    assert parameters(CNN5((3, 32, 32), 43)) == 121_182 + 33 * 85
    assert CNN5((3, 32, 32), 10)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_images_that_are_too_small():
    with refuses("padding"):
        CNN((1, 8, 8), 10)
    CNN((1, 16, 16), 10)
    with refuses("padding"):
        CNN((64,), 10)


def test_one_or_two_hidden_layers():
    """Of one the logits are those of the layers put together by hand; none and three are refused by
    name."""
    model = CNN((1, 28, 28), 10, channels=(2, 3), hidden=(7,))
    x = torch.randn(4, 1, 28, 28)
    maps = torch.nn.functional.max_pool2d(torch.relu(model.conv1(x)), 2)
    maps = torch.nn.functional.max_pool2d(torch.relu(model.conv2(maps)), 2)
    assert torch.equal(model(x), model.classifier(torch.relu(model.fc1(maps.flatten(1)))))
    for hidden in ((), (5, 6, 7)):
        with refuses("hidden"):
            CNN((1, 28, 28), 10, hidden=hidden)
